"""The engine probe: silent on our engine, and loud when the attention below it stops masking."""

from functools import partial

import pytest

from atoll.engine import build
from atoll.engine.output import RequestOutput
from atoll.errors import ConfigError
from atoll.ops.attention import DecodeSpec
from atoll.probe.engine import first_divergence, probe_engine
from tests.engine.tiny import CONFIG, ByteTokenizer, TinyLoaded, prompts, tiny_model

OPTIONS = {"kv_format": "fp32", "max_num_seqs": 8, "max_model_len": 256, "num_pages": 200}


def tiny_loaded() -> TinyLoaded:
    return TinyLoaded(tiny_model(), CONFIG, ByteTokenizer())


@pytest.mark.parametrize("fill", ["nan", "inf", "random"])
def test_a_poisoned_pool_changes_no_bit(fill: str) -> None:
    report = probe_engine(tiny_loaded(), prompts(6), fill=fill, max_tokens=12, **OPTIONS)  # type: ignore[arg-type]
    assert report.same
    assert report.prompts == 6
    assert report.tokens > 6
    assert report.max_logprob_difference == 0.0


def test_an_engine_that_does_not_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "DecodeSpec", partial(DecodeSpec, mask_unowned_kv=False))
    report = probe_engine(tiny_loaded(), prompts(6), fill="nan", max_tokens=12, **OPTIONS)  # type: ignore[arg-type]
    assert not report.same
    found = report.divergences[0]
    assert found.clean != found.poisoned


def test_zeros_against_zeros_are_refused() -> None:
    with pytest.raises(ConfigError, match="fill 'zero' compares zeros with zeros; use nan"):
        probe_engine(tiny_loaded(), prompts(1), fill="zero", **OPTIONS)  # type: ignore[arg-type]


def test_first_divergence_names_the_token() -> None:
    def output(ids: list[int]) -> RequestOutput:
        return RequestOutput(request_id=0, prompt=None, prompt_token_ids=[1], text="", token_ids=ids, finish_reason="length")

    assert first_divergence(0, output([1, 2]), output([1, 2])) is None
    found = first_divergence(3, output([1, 2, 3]), output([1, 5, 3]))
    assert found is not None
    assert (found.prompt, found.token, found.clean, found.poisoned) == (3, 1, 2, 5)
    shorter = first_divergence(0, output([1, 2]), output([1]))
    assert shorter is not None
    assert shorter.poisoned is None
