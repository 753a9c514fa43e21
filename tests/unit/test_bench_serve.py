"""The serving benchmark: its arithmetic against values worked out by hand, its data, its arrivals, and the command against a server on a real socket."""

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.bench.serve import ServeOptions, ServeRun, Talk, run_serve
from atoll.bench.serve_client import Outcome, Recording, take_event
from atoll.bench.serve_data import WORDS, DataOptions, Turn, Vocabulary, arrival_times, find_vocabulary, make_data
from atoll.bench.serve_report import figures, is_good, max_concurrent, parse_goodput, report_lines
from atoll.cli import app
from atoll.errors import ConfigError
from atoll.eval.endpoint import Endpoint
from tests.kit.fake_server import FakeServer, fake_server

IDS = Vocabulary(tuple(range(100, 150)), 2.0)
TEXT = Vocabulary(None, 1.0)


def outcome(start: float, *arrivals: float, end: float | None = None, tokens: int | None = None, error: str | None = None) -> Outcome:
    last = end if end is not None else arrivals[-1]
    return Outcome(start, list(arrivals), last, "x", True, prompt_tokens=10, told_output_tokens=tokens, cached_tokens=4, error=error)


# Arithmetic


def test_times_of_one_request() -> None:
    one = outcome(10.0, 10.5, 10.7, 11.0, end=11.25)
    assert one.ttft_s == 0.5
    # Three tokens in the half second after the first one are two.
    assert one.tpot_s == pytest.approx(0.25)
    assert one.itls_s == pytest.approx([0.2, 0.3])
    assert one.e2el_s == 1.25
    # A piece may hold several tokens: then the server's count is what time is divided by.
    assert outcome(10.0, 10.5, 10.7, 11.0, tokens=6).tpot_s == pytest.approx(0.1)
    assert outcome(0.0, 1.0).tpot_s is None
    assert Outcome(0.0).ttft_s is None and Outcome(0.0).tpot_s is None and Outcome(0.0).output_tokens == 0


def test_figures_by_hand() -> None:
    outcomes = [outcome(0.0, 0.1 * i, 0.1 * i + 1.0) for i in range(1, 6)] + [outcome(0.5, 1.0, error="broke off")]
    found = figures(ServeRun(outcomes, 4.0), percentiles=(50, 90, 99.9), goodput={"ttft": 300.0, "e2el": 1250.0})
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (5, 1, 50, 10)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1.25, 2.5, 15.0)
    assert found["total_cached_tokens"] == 20
    # First tokens after 100, 200, 300, 400, 500 ms.
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["median_ttft_ms"] == pytest.approx(300)
    assert found["std_ttft_ms"] == pytest.approx(statistics.pstdev([100, 200, 300, 400, 500]))
    assert found["p50_ttft_ms"] == pytest.approx(300)
    assert found["p90_ttft_ms"] == pytest.approx(460)
    assert found["p99.9_ttft_ms"] == pytest.approx(499.6)
    assert found["mean_tpot_ms"] == found["mean_itl_ms"] == pytest.approx(1000)
    assert found["mean_e2el_ms"] == pytest.approx(1300)
    # ttft within 300 ms are three, of which e2el 1100 and 1200 are within 1250.
    assert found["request_goodput"] == 2 / 4
    text = "\n".join(report_lines(found))
    assert "5 requests completed, 1 failed" in text and "goodput: 0.50 requests/s" in text
    assert "ttft  ms: mean 300.00, median 300.00, std 141.42, p50 300.00, p90 460.00, p99.9 499.60" in text


def test_figures_of_nothing_are_none() -> None:
    found = figures(ServeRun([outcome(0.0, 1.0, error="x")], 1.0), metrics=("ttft", "tpot"))
    assert (found["mean_ttft_ms"], found["p99_tpot_ms"], found["request_goodput"]) == (None, None, None)
    assert "mean_itl_ms" not in found
    assert len(report_lines(found)) == 3


def test_the_most_at_once() -> None:
    # The second begins as the first one ends; the third overlaps with both.
    assert max_concurrent([outcome(0.0, 1.0), outcome(1.0, 2.0), outcome(0.5, 1.5)]) == 2
    assert max_concurrent([]) == 0


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200 tpot:50", "e2el:1e3"]) == {"ttft": 200.0, "tpot": 50.0, "e2el": 1000.0}
    for given in ("ttft", "itl:3", "ttft:-1", "ttft:fast"):
        with pytest.raises(ConfigError, match="is not a limit in milliseconds"):
            parse_goodput([given])
    assert is_good(outcome(0.0, 0.2), {"tpot": 1.0, "ttft": 201.0})
    assert not is_good(outcome(0.0, 0.2), {"ttft": 199.0})


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rates_mean_and_the_gammas_variance(burstiness: float) -> None:
    times = arrival_times(20001, 5.0, burstiness, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    # The gamma distribution of shape k and scale 1 / (rate k): mean 1 / rate, variance 1 / (rate^2 k).
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.variance(gaps) == pytest.approx(0.04 / burstiness, rel=0.1)
    assert arrival_times(20001, 5.0, burstiness, seed=1) == times != arrival_times(20001, 5.0, burstiness, seed=2)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="is not above 0"):
            arrival_times(3, rate, burstiness, 0)


# Events


def test_events_without_text_are_no_pieces() -> None:
    seen = Outcome(0.0)
    for number, event in enumerate(
        [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [{"delta": {"reasoning_content": "b"}}]},
            {"choices": [{"text": "c", "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": None}},
        ]
    ):
        take_event(seen, json.dumps(event).encode(), float(number))
    assert (seen.text, seen.arrivals_s, seen.output_tokens, seen.prompt_tokens, seen.cached_tokens) == ("abc", [1.0, 2.0, 3.0], 9, 5, None)
    assert not seen.finished
    take_event(seen, b"[DONE]", 9.0)
    assert seen.finished
    take_event(seen, b'{"error": {"message": "died"}}', 9.0)
    assert seen.error == "died"


def answer(*, chunked: bool) -> bytes:
    """As a server sends it: a piece in its own chunk, two in one, one that lies in two."""
    events = [b"data: %s\n\n" % json.dumps({"choices": [{"text": text}]}).encode() for text in ("a", "b", "c", "d\r\n")]
    parts = [events[0], events[1] + events[2], events[3][:9], events[3][9:], b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\ndata: [DONE]\n\n']
    if not chunked:
        return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join(parts)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_is_read_the_same_however_it_was_cut(chunked: bool) -> None:
    raw, rng = answer(chunked=chunked), random.Random(0)
    for num_cuts in (0, 1, 5, len(raw) - 1):
        cuts = [0, *sorted(rng.sample(range(1, len(raw)), num_cuts)), len(raw)]
        seen = Recording(0.0, [(float(end), raw[begin:end]) for begin, end in itertools.pairwise(cuts)], end_s=1e6).outcome()
        assert (seen.text, seen.finished, seen.error, seen.output_tokens) == ("abcd\r\n", True, None, 4)
        # Each came with the bytes that ended it.
        ends = [raw.index(b'"%b' % text) for text in (b"a", b"b", b"c", b"d")]
        assert all(arrival > end for arrival, end in zip(seen.arrivals_s, ends, strict=True))
        if num_cuts == len(raw) - 1:
            assert seen.arrivals_s[0] < ends[1] and seen.arrivals_s == sorted(seen.arrivals_s)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the stream broke off"),
        (b"SSH-2.0 hello\r\n", "which is no HTTP"),
        (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbusy\r\n0\r\n\r\n", "503: busy"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "ValueError"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: nonsense\n", "JSONDecodeError"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [1]\n", "AttributeError"),
        (answer(chunked=True)[:-30], "the stream broke off"),
    ],
)
def test_an_answer_that_is_none_is_told(raw: bytes, message: str) -> None:
    assert message in (Recording(0.0, [(1.0, raw)] if raw else []).outcome().error or "")


# Data


def test_random_prompts_have_their_lengths() -> None:
    made = make_data("random", DataOptions(50, 40, 10, range_ratio=0.25), IDS, chat=False)
    lengths = [len(turn.said) for [turn] in made]
    assert len(made) == 50 and min(lengths) >= 30 and max(lengths) <= 50 and len(set(lengths)) > 5
    assert all(8 <= turn.output_len <= 12 and set(turn.said) <= set(IDS.token_ids or ()) for [turn] in made)  # type: ignore[arg-type]
    assert made == make_data("random", DataOptions(50, 40, 10, range_ratio=0.25), IDS, chat=False)
    assert made != make_data("random", DataOptions(50, 40, 10, range_ratio=0.25, seed=1), IDS, chat=False)
    assert len({str(turn.said[:8]) for [turn] in made}) == 50


def test_chats_are_said_in_words() -> None:
    [[turn]] = make_data("random", DataOptions(1, 40, 10), IDS, chat=True)
    assert isinstance(turn.said, str) and len(turn.said.split()) == 20 and set(turn.said.split()) <= set(WORDS)


@pytest.mark.parametrize("vocabulary", [IDS, TEXT])
def test_prefixes_are_shared_in_turn(vocabulary: Vocabulary) -> None:
    made = [turn.said for [turn] in make_data("shared-prefix", DataOptions(6, 20, 10, prefix_len=30, num_prefixes=2), vocabulary, chat=False)]
    said = [one.split() if isinstance(one, str) else one for one in made]
    assert all(len(one) == 50 for one in said)
    assert said[0][:30] == said[2][:30] == said[4][:30] != said[1][:30]
    assert len({str(one[30:]) for one in said}) == 6


def test_conversations_have_their_turns() -> None:
    made = make_data("multi-turn", DataOptions(10, 8, 5, num_turns=4), IDS, chat=False)
    assert [len(turns) for turns in made] == [4, 4, 2]
    assert all(isinstance(turn.said, str) for turns in made for turn in turns)


def test_a_files_prompts_are_asked_again_where_it_is_short(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "output_len": 3}\n\n{"question": "b"}\n')
    made = make_data("file", DataOptions(3, path=path), TEXT, chat=False)
    assert made == [[Turn("a", 3)], [Turn("b", 128)], [Turn("a", 3)]]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(json.dumps({"messages": messages}))
    assert make_data("file", DataOptions(1, path=path), TEXT, chat=True) == [[Turn(messages, 128)]]
    with pytest.raises(ConfigError, match="holds messages, which completions do not take"):
        make_data("file", DataOptions(1, path=path), TEXT, chat=False)


@pytest.mark.parametrize(
    ("text", "message"), [("", "holds 0 prompts"), ("nonsense", "data:1 is not a JSON object"), ("[]", "data:1 is not"), ("{}", "data:1 is not")]
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data").write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_data("file", DataOptions(1, path=tmp_path / "data"), TEXT, chat=False)


def test_data_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataset 'poems' is unknown; use one of random, shared-prefix, multi-turn, file"):
        make_data("poems", DataOptions(), TEXT, chat=False)
    with pytest.raises(ConfigError, match="has no file"):
        make_data("file", DataOptions(), TEXT, chat=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_data("file", DataOptions(path=tmp_path / "none"), TEXT, chat=False)
    with pytest.raises(ConfigError, match="num_prompts 0 is below 1"):
        DataOptions(num_prompts=0)
    with pytest.raises(ConfigError, match=r"range_ratio 1.0 is outside"):
        DataOptions(range_ratio=1.0)


def test_words_are_measured_by_the_servers_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server() as server:
        endpoint = Endpoint(server.url, "fake")
        monkeypatch.setattr("tests.kit.fake_server._Handler._whole", lambda self, body: self._send(200, {"tokens": [5, 3, 5] * len(WORDS)}))
        assert find_vocabulary(endpoint) == Vocabulary((3, 5), 3.0)
        monkeypatch.setattr("tests.kit.fake_server._Handler._whole", lambda self, body: self._send(404, {}))
        assert find_vocabulary(endpoint).token_ids is None
    assert find_vocabulary(endpoint).token_ids is None
    assert isinstance(TEXT.prompt(random.Random(0), 5, as_text=False), str)


def test_a_conversation_grows() -> None:
    chat, plain = (Talk(ServeOptions(Endpoint("http://x", "m"), path, ignore_eos=True)) for path in ("/v1/chat/completions", "/v1/completions"))
    for talk in (chat, plain):
        talk.body(Turn("one", 3))
        talk.answered("yes")
    assert [message["content"] for message in chat.body(Turn("two", 4))["messages"]] == ["one", "yes", "two"]
    assert plain.body(Turn("two", 4)) == {"model": "m", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "prompt": "oneyes\ntwo"}


# Against a server


def load(server: FakeServer, num: int, **options: Any) -> ServeRun:
    return run_serve(ServeOptions(Endpoint(server.url, "fake"), **options), [[Turn(f"prompt {i}", 3)] for i in range(num)])


def test_every_request_is_sent_and_read() -> None:
    with fake_server() as server:
        run = load(server, 20, num_warmups=2)
    assert [(one.text, one.output_tokens, one.prompt_tokens, one.cached_tokens, one.error) for one in run.outcomes] == [(" one two three", 3, 7, 4, None)] * 20
    assert sorted(body["prompt"] for body in server.bodies[2:]) == sorted(f"prompt {i}" for i in range(20))
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_concurrency_is_kept() -> None:
    with fake_server(piece_delay_s=0.02) as server:
        assert all(one.error is None for one in load(server, 12, max_concurrency=3).outcomes)
        assert server.most_at_once == 3
        load(server, 12)
        assert server.most_at_once > 3


def test_clients_leave_where_they_are_told_to() -> None:
    with fake_server(piece_delay_s=0.01) as server:
        run = load(server, 60, leave_share=0.5, max_concurrency=4)
        again = load(server, 60, leave_share=0.5, max_concurrency=4)
    found = figures(run)
    assert 15 < found["left"] < 45 and found["failed"] == 0 and found["completed"] == 60 - found["left"]
    assert found["total_output_tokens"] == 3 * found["completed"]
    assert "left by their clients" in report_lines(found)[0]
    # Which of them leave is the seed's matter; one that leaves late may have had its whole answer.
    assert abs(figures(again)["left"] - found["left"]) <= 20
    with pytest.raises(ConfigError, match="leave_share 1 is outside 0 to below 1"):
        load(server, 1, leave_share=1)


def test_arrivals_wait_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def noted(delay: float) -> None:
        waits.append(delay)

    monkeypatch.setattr("atoll.bench.serve.asyncio.sleep", noted)
    with fake_server() as server:
        load(server, 4, request_rate=1e-6, burstiness=1e6)
    assert [round(wait / 1e6, 1) for wait in waits] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refusals": [429]}, "429: not now"),
        ({"break_after": 1}, "the stream broke off before the server said that it was done"),
        ({"say": lambda body: []}, None),
    ],
)
def test_what_goes_wrong_is_told(options: dict[str, Any], message: str | None) -> None:
    with fake_server(**options) as server:
        [one] = load(server, 1).outcomes
    assert one.error is None if message is None else message in (one.error or "")


def test_no_server_is_a_failed_request() -> None:
    with fake_server() as server:
        pass
    [one] = load(server, 1).outcomes
    assert one.error is not None and "Connect" in one.error


def test_a_failed_turn_ends_its_conversation() -> None:
    with fake_server(refusals=[400]) as server:
        run = run_serve(ServeOptions(Endpoint(server.url, "fake"), "/v1/chat/completions"), [[Turn("a", 3), Turn("b", 3)]])
        assert [one.error for one in run.outcomes] == ["400: not now"]
        run = run_serve(ServeOptions(Endpoint(server.url, "fake"), "/v1/chat/completions"), [[Turn("a", 3), Turn("b", 3)]])
    assert [one.error for one in run.outcomes] == [None, None]
    assert [len(body["messages"]) for body in server.bodies] == [1, 1, 3]


def test_the_command_saves_its_result(tmp_path: Path) -> None:
    command = ["bench", "serve", "--num-prompts", "6", "--random-output-len", "3", "--max-concurrency", "2", "--request-rate", "500", "--ignore-eos"]
    with fake_server() as server:
        saved = ["--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json", "--metric-percentiles", "50,99"]
        result = CliRunner().invoke(app, [*command, "--base-url", server.url, "--goodput", "ttft:60000", *saved])
        assert result.exit_code == 0, result.output
        assert "6 requests completed, 0 failed" in result.stdout and "the server has no /tokenize" in result.stderr
        other = CliRunner().invoke(app, [*command, "--base-url", server.url, "--json", "--percentile-metrics", "ttft", "--dataset-name", "multi-turn"])
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert found.items() >= {"model_id": "fake", "num_prompts": 6, "completed": 6, "request_rate": 500.0, "burstiness": 1.0, "max_concurrency": 2}.items()
    keys = {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p50", "p99") for metric in ("ttft", "tpot", "itl", "e2el")}
    assert keys | {"duration", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput"} <= found.keys()
    assert found["request_goodput"] == found["request_throughput"] and found["output_lens"] == [3] * 6
    assert all(body["ignore_eos"] for body in server.bodies if body.get("stream"))
    last = json.loads(other.stdout)
    assert last["completed"] == 6 and "mean_ttft_ms" in last and "mean_itl_ms" not in last


def test_the_command_ends_with_1_where_requests_failed() -> None:
    with fake_server() as server:
        # The first refusal is for the question about tokens.
        server.refusals = [404, 400]
        result = CliRunner().invoke(app, ["bench", "serve", "--base-url", server.url, "--num-prompts", "3"])
    assert result.exit_code == 1 and "1 of 3 requests failed; the first: 400: not now" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--endpoint", "/v1/poems"), "endpoint '/v1/poems' is unknown"),
        (("--max-concurrency", "0"), "max_concurrency 0 is below 1"),
        (("--request-rate", "0"), "is not above 0"),
        (("--percentile-metrics", "ttft,joy"), "--percentile-metrics 'joy' is unknown"),
        (("--metric-percentiles", "101"), "--metric-percentiles '101' is not a list"),
        (("--metric-percentiles", "most"), "--metric-percentiles 'most' is not a list"),
        (("--base-url", "http://127.0.0.1:1"), "does not answer"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
