"""Sampling parameters and engine options out of range: each error names the value, the limit and the remedy."""

from typing import Any

import pytest
import torch

from atoll import ConfigError, RequestError, SamplingParams
from atoll.config import CHECKPOINT_POLICIES, DTYPES, KV_FILLS, KV_FORMAT_OPTIONS, MAX_PAGE_SIZE, EngineConfig, checkpoint_policies, make_engine_config
from atoll.engine import build
from atoll.engine.build import CPU_POOL_BYTES, choose_checkpoint_interval, choose_device, choose_dtype, choose_max_model_len, choose_num_pages, choose_sizes
from atoll.errors import BackendError
from atoll.kv import FILLS, PageLayout, SlotLayout
from atoll.ops.attention import spec
from atoll.ops.delta import DeltaSpec
from atoll.ops.quant.formats import KV_FORMATS
from tests.engine.tiny import make_llm

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 is below 1; generate at least one token"),
        ({"max_tokens": 2.5}, "max_tokens 2.5 is a float, not an integer"),
        ({"max_tokens": True}, "max_tokens True is a bool"),
        ({"min_tokens": -1}, "min_tokens -1 is below 0"),
        ({"min_tokens": 20}, "min_tokens 20 is above 16; use at most max_tokens"),
        ({"temperature": -0.1}, "temperature -0.1 is neither 0 nor from 0.0001 to 10000; use 0 for greedy"),
        ({"temperature": 1e-9}, "temperature 1e-09 is neither"),
        ({"temperature": float("nan")}, "temperature nan is neither"),
        ({"top_k": -1}, "top_k -1 is below 0; use 0 to keep every token"),
        ({"top_p": 0.0}, r"top_p 0.0 is outside 0 \(excluded\) to 1"),
        ({"top_p": 1.1}, "top_p 1.1 is outside"),
        ({"top_p": float("nan")}, "top_p nan is outside"),
        ({"min_p": -0.1}, "min_p -0.1 is outside 0 to 1"),
        ({"min_p": 1.5}, "min_p 1.5 is outside 0 to 1"),
        ({"seed": -1}, "seed -1 is below 0"),
        ({"temperature": "0"}, "temperature '0' is a str, not a number"),
        ({"top_p": None}, "top_p None is a NoneType, not a number"),
        ({"stop": None}, "stop None is no list"),
        ({"stop_token_ids": 5}, "stop_token_ids 5 is no list"),
        ({"seed": 2**63}, f"seed {2**63} is above {2**63 - 1}"),
        ({"logprobs": 21}, "logprobs 21 is above 20"),
        ({"logprobs": -1}, "logprobs -1 is below 0"),
        ({"stop": ""}, "stop '' is not a non-empty string"),
        ({"stop": ["a", 3]}, "stop 3 is not a non-empty string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids entry -1 is below 0"),
    ],
)
def test_sampling_params_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_sampling_params_are_plain_and_comparable() -> None:
    assert SamplingParams(stop="a", stop_token_ids=[1]) == SamplingParams(stop=["a"], stop_token_ids=(1,))
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 24}, "page_size 24 is not a power of two; use 16 or 32"),
        ({"page_size": 0}, f"page_size 0 is outside 1 to {MAX_PAGE_SIZE}"),
        ({"page_size": 2048}, f"page_size 2048 is outside 1 to {MAX_PAGE_SIZE}"),
        ({"device": "tpu"}, "device 'tpu' is unknown; use one of auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; use one of auto, float32"),
        ({"kv_format": "int4"}, "kv_format 'int4' is unknown; use one of auto, fp32"),
        ({"kv_fill": "ones"}, "kv_fill 'ones' is unknown; use one of zero, nan"),
        ({"num_pages": 1}, r"num_pages 1 is below 2 \(one page is never allocated, .*\); give 2 or more"),
        ({"num_pages": 9, "kv_memory_bytes": 9}, "num_pages 9 and kv_memory_bytes 9 are both given"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 is below 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 100}, r"max_num_batched_tokens 100 is below 127 \(max_num_seqs 64 - 1 decoding"),
        ({"max_model_len": 1}, "max_model_len 1 is below 2"),
        ({"state_checkpoint_interval_tokens": -2}, "state_checkpoint_interval_tokens -2 is below -1; give a number of tokens, 0 for no checkpoints, or -1"),
        ({"state_checkpoint_interval_tokens": 7}, "state_checkpoint_interval_tokens 7 is not a multiple of page_size 16; use for example 16"),
        ({"state_checkpoint_interval_tokens": 100, "page_size": 32}, "100 is not a multiple of page_size 32; use for example 128"),
        ({"offload": ""}, "offload '' names no tier; give for example host:8GiB, or leave it out"),
        ({"offload": 8}, "offload 8 names no tier"),
        ({"offload": "host:1GiB", "prefix_caching": False}, "offload 'host:1GiB' is given and prefix_caching is off, .*; leave out one of the two"),
        ({"offload_timeout_s": 0}, "offload_timeout_s 0 is not a number of seconds above 0; give for example 30"),
        ({"offload_timeout_s": float("inf")}, "offload_timeout_s inf is not a number of seconds"),
        ({"offload_timeout_s": "30"}, "offload_timeout_s '30' is not a number of seconds"),
        ({"checkpoint_policy": "ladder,often"}, "checkpoint_policy 'often' is unknown; use all, or some of ladder, prompt, demand, end"),
        ({"checkpoint_policy": ""}, "checkpoint_policy '' is unknown"),
        ({"pagesize": 16}, "option 'pagesize' is unknown; use one of device, dtype, page_size"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine_config(options)


def test_the_option_lists_are_those_of_the_parts() -> None:
    assert KV_FORMAT_OPTIONS[1:] == KV_FORMATS
    assert KV_FILLS == FILLS
    assert MAX_PAGE_SIZE == spec.MAX_PAGE_SIZE
    assert [choose_dtype(name) for name in DTYPES] == [None, torch.float32, torch.bfloat16, torch.float16]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(ConfigError, match=r"device 'cuda' was asked for, torch \S+ sees 0 GPUs; use 'cpu'"):
        choose_device("cuda")


def test_a_gpu_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"device 'cuda:2' was asked for, torch \S+ sees 2 GPUs"):
        choose_device("cuda:2")


LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, head_dim=16, page_size=16)


def test_the_pool_is_as_large_as_asked_for() -> None:
    assert choose_num_pages(EngineConfig(num_pages=77), LAYOUT, 2048, CPU) == 77
    assert choose_num_pages(EngineConfig(kv_memory_bytes=10 * LAYOUT.page_bytes), LAYOUT, 2048, CPU) == 10


def test_the_pool_is_no_larger_than_full_sequences_need() -> None:
    config = EngineConfig(max_num_seqs=4)
    assert choose_num_pages(config, LAYOUT, 2048, CPU) == 1 + 4 * 2048 // 16
    assert choose_num_pages(EngineConfig(max_num_seqs=4, max_model_len=100), LAYOUT, 2048, CPU) == 1 + 4 * 7
    wide = PageLayout(num_layers=80, num_kv_heads=8, head_dim=128, page_size=16)
    assert choose_num_pages(config, wide, 10**9, CPU) <= CPU_POOL_BYTES // wide.page_bytes


def test_state_slots_take_their_memory_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotLayout(3, DeltaSpec(2, 4, 16, 16))
    config = EngineConfig(max_num_seqs=8)
    budget = 8 * slots.slot_bytes + 50 * LAYOUT.page_bytes
    monkeypatch.setattr(build, "_memory_budget_bytes", lambda device: budget)
    assert choose_num_pages(config, LAYOUT, 10**6, CPU, slots) == 50
    assert choose_num_pages(config, LAYOUT, 10**6, CPU) == budget // LAYOUT.page_bytes
    # Sizes that were asked for are pages alone.
    assert choose_num_pages(EngineConfig(kv_memory_bytes=10 * LAYOUT.page_bytes), LAYOUT, 2048, CPU, slots) == 10
    many = EngineConfig(max_num_seqs=9 + 50 * LAYOUT.page_bytes // slots.slot_bytes)
    with pytest.raises(ConfigError, match=rf"max_num_seqs {many.max_num_seqs} state slots of {slots.slot_bytes} bytes take \d+ of the {budget} bytes .* lower"):
        choose_num_pages(many, LAYOUT, 10**6, CPU, slots)


def test_sizes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="atoll.engine.build"):
        make_llm(num_pages=5, max_model_len=64)
    assert caplog.messages == ["pool: 5 pages of 8192 bytes, 0.00 GB on cpu"]


def test_the_pool_has_room_for_two_checkpoints_of_each_sequence() -> None:
    slots = SlotLayout(3, DeltaSpec(2, 4, 16, 16))
    assert slots.slot_bytes == 14_592 and LAYOUT.page_bytes == 4096, "an image is 4 pages"
    assert choose_num_pages(EngineConfig(max_num_seqs=4), LAYOUT, 2048, CPU, slots) == 1 + 4 * (2048 // 16 + 8)


@pytest.mark.parametrize(("max_position", "max_model_len", "least"), [(2048, None, 9), (40, None, 8), (2048, 40, 8), (2048, 2000, 130)])
def test_the_least_pool_that_reuses_prefixes_is_told(max_position: int, max_model_len: int | None, least: int, caplog: pytest.LogCaptureFixture) -> None:
    """Images of 4 pages."""
    config = EngineConfig(max_model_len=max_model_len)
    assert choose_sizes(config, max_position, least, 4).image_pages == 4 and not caplog.messages
    assert choose_sizes(config, max_position, least - 1, 4).image_pages == 0
    [message] = caplog.messages
    assert f"give num_pages {least} or more (one is never allocated), or lower max_model_len" in message


@pytest.mark.parametrize(
    ("given", "page_size", "image_pages", "interval"),
    [(None, 16, 3, 1024), (None, 16, 200, 3200), (None, 16, 201, 3264), (-1, 16, 3, -1), (0, 16, 0, -1), (80, 16, 3, 128), (256, 256, 3, 256), (1, 1, 3, 64)],
)
def test_the_ladder_stands_on_whole_pages_and_on_the_prefill_grid(given: int | None, page_size: int, image_pages: int, interval: int) -> None:
    config = EngineConfig(page_size=page_size, state_checkpoint_interval_tokens=given)
    assert choose_checkpoint_interval(config, image_pages) == interval


def test_policies_are_named_alone_together_or_all() -> None:
    assert checkpoint_policies("all") == frozenset(CHECKPOINT_POLICIES)
    assert checkpoint_policies("prompt, end") == {"prompt", "end"}


def test_the_longest_sequence_fits_the_model_and_the_pool() -> None:
    assert choose_max_model_len(EngineConfig(), 2048, 1000) == 2048
    assert choose_max_model_len(EngineConfig(), 2048, 11) == 160
    assert [choose_max_model_len(EngineConfig(), 2048, 11, image_pages) for image_pages in (1, 5, 6)] == [144, 80, 160]
    assert choose_max_model_len(EngineConfig(), 2048, 1000, image_pages=5) == 2048
    with pytest.raises(ConfigError, match="max_model_len 4096 is above the model's 2048 positions"):
        choose_max_model_len(EngineConfig(max_model_len=4096), 2048, 1000)
    with pytest.raises(ConfigError, match="max_model_len 200 is above the 160 tokens that a pool of 11 pages holds"):
        choose_max_model_len(EngineConfig(max_model_len=200), 2048, 11)


def test_an_attention_backend_that_cannot_run_here_fails_at_the_start() -> None:
    assert make_llm(attention_backend="reference").engine.runner.attention_backend == "reference"
    with pytest.raises(BackendError, match="attention backend 'cutlass' is unknown; use 'auto' or one of gluon_sm90, triton, reference"):
        make_llm(attention_backend="cutlass")


@pytest.mark.parametrize("name", ["cuda:x", "cuda:", "cuda:-1", "cpu:x", "meta", "", "cuda:¹"])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device '{name}' is unknown; use auto, cpu, cuda"):
        choose_device(name)
    with pytest.raises(ConfigError, match="device 'cuda:999999999999' has a number above 99"):
        choose_device("cuda:999999999999")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"page_size": "16"}, "page_size '16' is a str, not an integer; give an int$"),
        ({"page_size": 16.0}, "page_size 16.0 is a float, not an integer"),
        ({"prefix_caching": "no"}, "prefix_caching 'no' is a str, not a bool; give True or False"),
        ({"num_pages": 2.5}, "num_pages 2.5 is a float, not an integer; give an int or None"),
        ({"max_num_seqs": None}, "max_num_seqs None is a NoneType"),
        ({"seed": "a"}, "seed 'a' is a str"),
        ({"state_checkpoint_interval_tokens": "64"}, "state_checkpoint_interval_tokens '64' is a str, not an integer; give an int or None"),
        ({"checkpoint_policy": 3}, "checkpoint_policy '3' is unknown"),
        ({"device": 0}, "device '0' is unknown"),
    ],
)
def test_an_option_of_another_type_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine_config(option)
