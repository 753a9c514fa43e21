"""Whole engines on the tiers: what was stored before a restart is fetched after it, and the tokens are those of an engine that computes everything."""

from pathlib import Path
from typing import Any

import pytest

from atoll import LLM, ConfigError
from atoll.offload.slab import Slab, data_offset
from tests.offload.cases import answers, evict_all, greedy, load, make_llm, prompt, tokens

WORK = [prompt(length, seed) for length, seed in ((150, 200), (201, 201), (70, 200), (130, 202))]


def serve(name: str, offload: str, **options: Any) -> tuple[list[list[int]], int]:
    """One engine's life: each prompt alone, the pool emptied after each. Its tokens, and how many of the prompts' were fetched."""
    with make_llm(name, offload=offload, **options) as llm:
        outputs = []
        for one in WORK:
            outputs += llm.generate([one], greedy())
            assert llm.engine.drain_transfers(10.0)
            evict_all(llm)
            llm.engine.check()
        return tokens(outputs), sum(output.num_fetched_tokens for output in outputs)


def options_of(tiers: str, folder: Path) -> str:
    return {
        "host": "host:8MiB",
        "mapped": f"host:{folder}/host.slab:8MiB",
        "disk": f"host:1MiB,disk:{folder}/:8MiB",
        "both": f"host:{folder}/host.slab:1MiB,disk:{folder}/disk.slab:8MiB",
    }[tiers]


@pytest.mark.parametrize("tiers", ["mapped", "disk", "both"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_fetched_after_a_restart_equals_computed(name: str, tiers: str, tmp_path: Path) -> None:
    expected = answers(name, WORK)
    first, _ = serve(name, options_of(tiers, tmp_path))
    again, num_fetched = serve(name, options_of(tiers, tmp_path))
    assert first == again == expected
    # All but each prompt's last page and what has no boundary.
    assert num_fetched >= 0.7 * sum(map(len, WORK))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_host_tier_smaller_than_a_prompt_loads_what_it_can_use(name: str, tmp_path: Path) -> None:
    """The disk has all twelve pages of the prompt; six of the host tier are in front of it."""
    one = prompt(201, 201)
    with make_llm(name) as llm:
        page_bytes = llm.engine.pool.layout.page_bytes
    with make_llm(name, offload=f"host:{6 * page_bytes}B,disk:{tmp_path}/:8MiB", state_checkpoint_interval_tokens=64) as llm:
        outputs = []
        for _ in range(4):
            outputs += llm.generate([one], greedy())
            llm.engine._drain(lambda llm=llm: llm.engine.has_pending_transfers, 10.0)
            evict_all(llm)
        assert tokens(outputs) == answers(name, [one]) * 4
        assert llm.engine.offload_stats is not None and llm.engine.offload_stats.num_load_failures == 0
        assert outputs[-1].num_fetched_tokens >= 4 * 16
        llm.engine.check()


def test_a_host_tier_of_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the host tier of \d+ bytes is more memory than this machine gives .*; give a smaller size"):
        make_llm("llama", offload="host:900000TiB")


def test_an_anonymous_host_tier_starts_empty() -> None:
    offload = options_of("host", Path())
    assert serve("llama", offload)[1] == serve("llama", offload)[1] < 0.3 * sum(map(len, WORK))


def spoil(path: Path) -> None:
    """Other bytes in every slot."""
    raw = bytearray(path.read_bytes())
    start = data_offset(int.from_bytes(raw[16:24], "little"))
    raw[start:] = bytes(len(raw) - start)
    path.write_bytes(raw)


@pytest.mark.parametrize("tiers", ["mapped", "disk"])
def test_spoilt_files_cost_a_computation_and_no_token(tiers: str, tmp_path: Path) -> None:
    serve("llama", options_of(tiers, tmp_path))
    for path in tmp_path.iterdir():
        spoil(path)
    assert serve("llama", options_of(tiers, tmp_path))[0] == answers("llama", WORK)


@pytest.mark.parametrize("tiers", ["mapped", "disk"])
def test_spoilt_files_are_seen_in_the_tokens_where_nobody_compares(tiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("llama", options_of(tiers, tmp_path))
    for path in tmp_path.iterdir():
        spoil(path)
    monkeypatch.setattr(Slab, "verify", lambda *_: True)
    assert serve("llama", options_of(tiers, tmp_path))[0] != answers("llama", WORK)


def test_files_of_another_model_are_refused_and_the_first_may_come_back(tmp_path: Path) -> None:
    offload = options_of("both", tmp_path)
    serve("llama", offload)
    with pytest.raises(ConfigError, match="holds pages of another model, layout or format"):
        make_llm("qwen3_5", offload=offload)
    with pytest.raises(ConfigError, match="kv_format 'fp32' there, 'bf16' here"):
        make_llm("llama", offload=offload, kv_format="bf16")
    with make_llm("llama", offload=offload), pytest.raises(ConfigError, match="is in use by another engine"):
        LLM.from_loaded(load("llama"), offload=offload, num_pages=80, max_model_len=250, kv_format="fp32")
    assert serve("llama", offload)[0] == answers("llama", WORK)
