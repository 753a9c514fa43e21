"""The offline interface on a tiny model: prompts of every kind, streaming, stopping, log probabilities, failures, and pages that always come back."""

from typing import Any

import pytest
import torch

import atoll
from atoll import LLM, PoolCorruptError, RequestError, RequestOutput, SamplingParams
from atoll.engine.request import Request
from atoll.engine.scheduler import Scheduler
from tests.engine.tiny import BOS, EOS, VOCAB, ByteTokenizer, check_nothing_is_held, make_llm, prompts, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


class ScriptedModel:
    """Logits from a script: after a sequence's token `t` comes `t + 1`, or else `t + 2`; token 0 is followed by NaN."""

    device = torch.device("cpu")
    dtype = torch.float32
    waits_for_device = False

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        attend(0, *(torch.zeros(len(token_ids), heads, 16) for heads in (4, 2, 2)))
        attend(1, *(torch.zeros(len(token_ids), heads, 16) for heads in (4, 2, 2)))
        return token_ids[:, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(hidden), VOCAB), -5.0)
        rows, last = torch.arange(len(hidden)), hidden[:, 0].long()
        logits[rows, (last + 2) % VOCAB] = 4.0
        logits[rows, (last + 1) % VOCAB] = 5.0
        logits[hidden[:, 0] == 0] = float("nan")
        return logits


def scripted(**options: Any) -> LLM:
    return make_llm(model=ScriptedModel(), **options)


def test_every_kind_of_prompt(llm: LLM) -> None:
    text, ids = "atoll", list(b"atoll")
    [one] = llm.generate(text, GREEDY)
    assert (one.prompt, one.prompt_token_ids) == (text, ids)
    [from_ids] = llm.generate(ids, GREEDY)
    assert from_ids.prompt is None
    every: list[str | list[int]] = [text, ids, "other"]
    mixed = llm.generate(every, GREEDY)
    assert [output.token_ids for output in mixed[:2]] == [one.token_ids] * 2 == [from_ids.token_ids] * 2
    assert mixed[2].token_ids != one.token_ids
    assert llm.generate([], GREEDY) == []


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 1, 5, 3)]
    outputs = llm.generate(prompts(4), params)
    assert [len(output.token_ids) for output in outputs] == [9, 1, 5, 3]
    assert [output.prompt_token_ids for output in outputs] == prompts(4)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(messages, GREEDY)
    assert bytes(one.prompt_token_ids) == b"<user>hi<assistant>"
    assert [output.token_ids for output in llm.chat([messages, messages], GREEDY)] == [one.token_ids] * 2


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is None; give a list of messages"),
        ("hi", "messages is 'hi'; give a list"),
        ([], r"messages is \[\]; give a list"),
        ([3], "conversation 3 is not a list of messages"),
        ([[]], r"conversation \[\] is not a list of messages; give at least one"),
        ({"role": "user", "content": "hi"}, "messages is {.*}; give a list"),
        ([{"role": "user"}], "message {'role': 'user'} has no role and content as text; give one like"),
        ([{"role": "user", "content": None}], "has no role and content as text"),
        ([{"role": "user", "content": "\ud800"}], "message .* holds half of a surrogate pair"),
    ],
)
def test_wrong_messages_are_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)


def test_pieces_join_to_the_output() -> None:
    llm = make_llm(max_num_seqs=3)
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3, stop=["a", "xyz"])
    whole = llm.generate(prompts(7), params)
    texts, tokens = [""] * 7, [[] for _ in range(7)]  # type: ignore[var-annotated]
    outputs: dict[int, RequestOutput] = {}
    for piece in llm.generate_stream(prompts(7), params):
        assert piece.index not in outputs, "a piece after the last"
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        if piece.output is not None:
            assert piece.finished and piece.finish_reason == piece.output.finish_reason
            outputs[piece.index] = piece.output
    assert texts == [output.text for output in whole] == [outputs[index].text for index in range(7)]
    assert tokens == [output.token_ids for output in whole]


def test_a_stop_string_ends_the_text_before_itself() -> None:
    [output] = scripted().generate("a", SamplingParams(temperature=0, max_tokens=20, stop="fgh"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("bcde", "stop", "fgh")
    assert bytes(output.token_ids) == b"bcdefgh"


def test_a_stop_token_ends_the_text_before_itself() -> None:
    [output] = scripted().generate("a", SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[ord("e")]))
    assert (output.text, output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("bcd", "stop", ord("e"), ord("e"))


def test_the_end_of_sequence_stops_unless_ignored() -> None:
    llm = scripted()
    [output] = llm.generate([[EOS - 2]], SamplingParams(temperature=0, max_tokens=4))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS - 1, EOS], "stop", EOS)
    [ignored] = llm.generate([[EOS - 2]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS - 1, EOS, BOS], "length")


def test_min_tokens_puts_every_stop_off() -> None:
    llm = scripted()
    [by_text] = llm.generate("a", SamplingParams(temperature=0, max_tokens=9, min_tokens=3, stop=["c", "g"]))
    assert by_text.text == "bcdef"
    [by_token] = llm.generate("a", SamplingParams(temperature=0, max_tokens=9, min_tokens=3, stop_token_ids=[ord("b")]))
    # "b" may not be chosen in its place, so the next most likely is.
    assert by_token.text == "cdefghijk"


def test_output_is_cut_at_max_model_len() -> None:
    [output] = make_llm(max_model_len=32).generate([prompts(2, longest=25)[1]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (7, "length")


def test_a_pool_smaller_than_the_model_limits_the_sequence() -> None:
    llm = make_llm(num_pages=3, max_model_len=None)
    assert llm.engine.scheduler.config.max_model_len == 32
    [output] = llm.generate([[1] * 31], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    with pytest.raises(RequestError, match=r"the prompt has 32 tokens, at most 31 leave room for one more within max_model_len 32"):
        llm.generate([[1] * 32], GREEDY)


def test_logprobs_are_asked_for_per_request(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    with_them, without = llm.generate(prompts(2), [asked, GREEDY])
    assert without.logprobs is None
    assert with_them.logprobs is not None
    assert [entry.token_id for entry in with_them.logprobs] == with_them.token_ids
    for entry in with_them.logprobs:
        # Greedy takes the most likely one.
        assert entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 3
        assert 0 >= entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]


def test_logits_that_are_not_finite_fail_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    llm = scripted()
    bad, good = llm.generate([[5, 0], [7]], SamplingParams(temperature=0, max_tokens=3))
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error is not None and "after 2 tokens hold NaN or Inf" in bad.error and "float32" in bad.error
    assert "NaN or Inf" in caplog.text
    assert (good.finish_reason, good.token_ids, good.error) == ("length", [8, 9, 10], None)
    check_nothing_is_held(llm)


def test_what_led_to_nan_is_not_reused() -> None:
    llm = scripted(page_size=1)
    [good] = llm.generate([[3, 4, 5, 6]], SamplingParams(temperature=0, max_tokens=3))
    assert llm.generate([[3, 4, 5, 6]], SamplingParams(temperature=0, max_tokens=3))[0].num_cached_tokens == 3 and good.error is None
    bad = [llm.generate([[1, 2, 3, 0]], SamplingParams(temperature=0, max_tokens=3))[0] for _ in range(2)]
    assert [(output.finish_reason, output.num_cached_tokens) for output in bad] == [("error", 0)] * 2
    check_nothing_is_held(llm)


def test_an_empty_prompt_is_a_bos_or_an_error(llm: LLM) -> None:
    [output] = llm.generate("", GREEDY)
    assert output.prompt_token_ids == [BOS]
    with pytest.raises(RequestError, match="the prompt has 0 tokens, 1 is the least"):
        make_llm(tokenizer=ByteTokenizer(bos_token_id=None)).generate("", GREEDY)
    with pytest.raises(RequestError, match="the prompt has 0 tokens"):
        llm.generate([[]], GREEDY)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[1, VOCAB]], f"token id {VOCAB} is outside the vocabulary's 0 to {VOCAB - 1}"),
        ([[1, -1]], "token id -1 is outside"),
        ([[1, True]], "token id True is outside"),
        ([[1, "a"]], "token id 'a' is outside"),
        ([[1] * 256], "the prompt has 256 tokens, at most 255"),
        ([None], "prompt None is a NoneType"),
        ([{"role": "user"}], "is a dict; give text or a list of token ids"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_is_started(llm: LLM, bad: list[Any], message: str) -> None:
    steps = llm.engine.num_steps
    with pytest.raises(RequestError, match=message):
        llm.generate(["good", *bad], GREEDY)
    # The stream too raises at the call, not at its first piece.
    with pytest.raises(RequestError, match=message):
        llm.generate_stream(["good", *bad], GREEDY)
    assert llm.engine.num_steps == steps and not llm.engine.has_work


def test_params_must_fit_the_prompts_and_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling params for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match=f"stop token id {VOCAB} is outside"):
        llm.generate("a", SamplingParams(stop_token_ids=[VOCAB]))


@pytest.mark.parametrize("params", [5, "greedy", [None], {"max_tokens": 3}, SamplingParams])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="is neither SamplingParams nor a list of them"):
        llm.generate("a", params)


@pytest.mark.parametrize("prompts", [None, 3, b"bytes", {"a": 1}, {1, 2}])
def test_prompts_of_another_type_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="; give text, a list of token ids, or a list of either"):
        llm.generate(prompts)


def test_half_a_surrogate_pair_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 'a\\udcff' holds half of a surrogate pair"):
        llm.generate("a\udcff")


def test_two_streams_at_once_are_refused(llm: LLM) -> None:
    first = llm.generate_stream("abc", GREEDY)
    next(first)
    with pytest.raises(RequestError, match="still generating for an earlier call"):
        llm.generate("abc", GREEDY)
    assert llm.engine.has_work, "the earlier call goes on"
    assert sum(len(piece.token_ids) for piece in first) == 9


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_closing_a_stream_gives_every_page_back(after: int) -> None:
    llm = make_llm(num_pages=17, max_num_seqs=4)
    stream = llm.generate_stream(prompts(6), GREEDY)
    for _ in range(after):
        next(stream)
    assert llm.engine.pool.ledger.num_free < 16
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    check_nothing_is_held(llm)


def test_an_interrupt_gives_every_page_back(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, calls = make_llm(), []
    execute = llm.engine.runner.execute

    def interrupted(step: Any) -> Any:
        calls.append(step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return execute(step)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(5), GREEDY)
    assert not llm.engine.has_work
    check_nothing_is_held(llm)
    assert len(llm.generate("again", GREEDY)[0].token_ids) == 10


def test_aborts_at_every_step_give_every_page_back_and_disturb_nobody() -> None:
    undisturbed = [output.token_ids for output in make_llm().generate(prompts(4), GREEDY)]
    for when in range(14):
        for victim in range(4):
            # Small enough for chunks, waiting and preemption to occur.
            llm = make_llm(num_pages=11, max_model_len=160, max_num_seqs=3, max_num_batched_tokens=66)
            engine = llm.engine
            for index, prompt in enumerate(prompts(4)):
                engine.add(prompt, GREEDY, index=index)
            outputs: dict[int, RequestOutput] = {}
            for number in range(100):
                if number == when:
                    aborted = engine.abort(victim)
                    assert (aborted is None) == (victim in outputs)
                    if aborted is not None:
                        assert aborted.finish_reason == "abort" and aborted.token_ids == undisturbed[victim][: len(aborted.token_ids)]
                        outputs[victim] = aborted
                    engine.check()
                outputs.update({piece.index: piece.output for piece in engine.step() if piece.output is not None})
            check_nothing_is_held(llm)
            assert all(outputs[index].token_ids == undisturbed[index] for index in range(4) if outputs[index].finish_reason != "abort")


def test_control_an_abort_that_keeps_a_page_is_found_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(self: Scheduler, request: Request, *, discard: bool = False) -> None:
        self.cache.release(request.pages[:-1])
        request.pages, request.num_computed = [], 0

    llm = make_llm()
    stream = llm.generate_stream("abcdefgh", GREEDY)
    next(stream)
    monkeypatch.setattr(Scheduler, "_release", leaky)
    with pytest.raises(PoolCorruptError, match="lost without a release"):
        stream.close()  # type: ignore[attr-defined]


def test_the_public_names_exist() -> None:
    assert all(getattr(atoll, name) is not None for name in atoll.__all__)
    assert set(atoll.__all__) <= set(dir(atoll))
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = atoll.Engine
    assert tiny_model().config.vocab_size == VOCAB
