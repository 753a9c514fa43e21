"""FlashInfer as an attention backend: what it refuses and why, and on a GPU the same numbers as ours and a guard that is on."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.errors import BackendError
from atoll.kv import PageLayout, PagePool
from atoll.models.llama import LlamaModel
from atoll.ops.attention import DecodeSpec, choose_backend, decode_attention, flashinfer_base, flashinfer_tensor_cores, flashinfer_xqa, plan_decode
from tests.engine.tiny import CONFIG, ByteTokenizer, RandomWeights, TinyLoaded, prompts

BACKENDS = ("flashinfer_xqa", "flashinfer_tensor_cores")
SPEC = DecodeSpec(8, 2, 64, 16, mask_unowned_kv=False)
CUDA = torch.device("cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cpu_is_refused(backend: str) -> None:
    with pytest.raises(BackendError, match=f"{backend}: FlashInfer needs an NVIDIA GPU, the device is cpu"):
        choose_backend(SPEC, torch.device("cpu"), backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_unowned_kv": True}, "it does not mask unowned rows, and the spec asks for that; set mask_unowned_kv=False"),
        ({"query_len": 2}, "query_len 2 is above 1"),
        ({"kv_format": "fp8_token"}, "FlashInfer has no scale per token"),
        ({"kv_format": "fp32", "q_dtype": torch.float32}, "FlashInfer has no fp32 cache"),
        ({"v_layout": "transposed"}, "FlashInfer takes plain V alone"),
        ({"causal": False}, "FlashInfer's decode kernels are causal"),
        ({"q_dtype": torch.float32}, "FlashInfer takes q in bf16 or fp16, not torch.float32"),
        ({"head_dim": 96}, "the decode wrapper takes head_dim 64, 128, 256, not 96"),
        ({"sinks": True}, "the decode wrapper's plain kernels have no sinks"),
    ],
)
def test_a_spec_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    """As on a GPU, though there is none here: a device is only looked at for its type until the spec has passed."""
    reason = flashinfer_tensor_cores.supports(replace(SPEC, **changes), CUDA)
    assert reason is not None and message in reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "XQA takes page_size 16, 32, 64 or 128, not 8"),
        ({"soft_cap": 30.0}, "XQA has no soft cap"),
        ({"head_dim": 72}, "XQA takes head_dim 16 to 256 in steps of 16, not 72"),
    ],
)
def test_xqa_refuses_with_the_reason(changes: dict[str, Any], message: str) -> None:
    assert flashinfer_xqa.refusal(replace(SPEC, **changes)) == message


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_tensor"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_pools_strides_are_taken(kv_format: str, num_heads: int) -> None:
    for head_dim in (64, 128, 256):
        pool = PagePool(PageLayout(3, num_heads, head_dim, 16, kv_format), 4, "cpu")  # type: ignore[arg-type]
        assert flashinfer_xqa.cache_refusal(pool.layer_kv(1)) is None


def test_strides_that_it_cannot_take_are_refused() -> None:
    kv = PagePool(PageLayout(1, 1, 64, 16), 4, "cpu").layer_kv(0)
    assert flashinfer_base.cache_refusal(replace(kv, v=kv.v[:, :, ::2].repeat(1, 1, 2, 1))) == "FlashInfer takes one set of strides for K and V"
    odd = torch.empty(4 * 1100, dtype=torch.bfloat16).as_strided((4, 1, 16, 64), (1100, 1024, 64, 1))
    assert flashinfer_base.cache_refusal(replace(kv, k=odd, v=odd)) is None
    assert flashinfer_xqa.cache_refusal(replace(kv, k=odd, v=odd)) == "XQA counts strides in rows, and 1100 elements are no multiple of head_dim 64"


class FakeWrapper:
    """Takes what the wrapper takes, and remembers it."""

    def plan(self, *args: Any, **options: Any) -> None:
        self.planned = args


def test_each_refill_plans_the_wrapper_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = FakeWrapper()
    monkeypatch.setattr(flashinfer_tensor_cores, "supports", lambda spec, device: None)
    monkeypatch.setattr(flashinfer_tensor_cores, "import_flashinfer", lambda: None)
    monkeypatch.setattr(flashinfer_tensor_cores, "shared_workspace", lambda device, kernels: None)
    monkeypatch.setattr(flashinfer_tensor_cores, "make_wrapper", lambda flashinfer, spec, workspace: wrapper)
    table = torch.tensor([[7, -1, 99], [3, 4, 5], [2**31 - 1, 0, 0]], dtype=torch.int32)
    plan = plan_decode(SPEC, [0, 0, 0], table, backend="flashinfer_tensor_cores", max_seq_len=48)
    assert not plan.prepared["any"] and not hasattr(wrapper, "planned")
    plan.refill([16, 33], table[:2])
    assert plan.prepared == {"any": True, "padded": True, "wrapper": wrapper}
    starts, page_ids, last_page_lens = (part.tolist() for part in wrapper.planned[:3])
    assert (starts, page_ids, last_page_lens) == ([0, 1, 4, 4], [7, 3, 4, 5], [16, 1, 0])


def test_xqas_table_names_page_0_past_a_sequences_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_xqa, "supports", lambda spec, device: None)
    table = torch.tensor([[7, -1, 99], [3, 4, 5], [2**31 - 1, 1, 1]], dtype=torch.int32)
    plan = plan_decode(SPEC, [16, 33, 0], table, backend="flashinfer_xqa")
    assert plan.prepared["table"].tolist() == [[7, 0, 0], [3, 4, 5], [0, 0, 0]]
    assert plan.prepared["lens"].view(torch.int32).tolist() == [16, 33, 1]
    plan.refill([5], table[1:2, :1])
    assert plan.prepared["table"].tolist() == [[3, 0, 0], [0, 0, 0], [0, 0, 0]]


# On a GPU


@pytest.fixture
def flashinfer() -> Any:
    return pytest.importorskip("flashinfer")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_tensor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_gives_the_numbers_of_ours(flashinfer: Any, backend: str, kv_format: str) -> None:
    """Page-major pages of two layers, padded rows and hostile lanes; page 0 and every unowned row hold zeros."""
    q_dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    spec = replace(SPEC, kv_format=kv_format, q_dtype=q_dtype)
    pool = PagePool(PageLayout(2, 2, 64, 16, kv_format), 20, "cuda")  # type: ignore[arg-type]
    kv = pool.layer_kv(1)
    lens = [1, 16, 17, 48, 0, 33]
    table = (torch.randperm(19, generator=torch.Generator().manual_seed(0)) + 1).int()[:18].view(6, 3)
    generator = torch.Generator("cuda").manual_seed(0)
    for rows in (kv.k, kv.v):
        values = torch.randn(rows.shape, generator=generator, device="cuda")
        for pages, length in zip(table.tolist(), lens, strict=True):
            for at in range(length):
                rows[pages[at // 16], :, at % 16] = values[pages[at // 16], :, at % 16].to(rows.dtype)
    for i, length in enumerate(lens):
        table[i, -(-length // 16) :] = -1
    q = torch.randn((6, 1, 8, 64), generator=generator, device="cuda").to(q_dtype)
    ours, ours_lse = decode_attention(q, kv, plan_decode(replace(spec, mask_unowned_kv=True), lens, table, device="cuda"))
    theirs, theirs_lse = decode_attention(q, kv, plan_decode(spec, lens, table, device="cuda", backend=backend))
    # XQA rounds Q and P to e4m3 beside an fp8 cache.
    tolerance = 0.15 if backend == "flashinfer_xqa" and kv_format == "fp8_tensor" else 0.02
    torch.testing.assert_close(theirs.float(), ours.float(), atol=tolerance, rtol=tolerance)
    assert not theirs[4].any()
    if backend == "flashinfer_xqa":
        assert bool(theirs_lse.isnan().all())
    else:
        torch.testing.assert_close(theirs_lse, ours_lse, atol=0.02, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_on_it_is_guarded_and_nan_in_released_pages_changes_no_token(flashinfer: Any, backend: str, kv_format: str) -> None:
    config = replace(CONFIG, head_dim=64)
    loaded = TinyLoaded(LlamaModel(config, RandomWeights(config), CUDA, torch.bfloat16), config, ByteTokenizer())
    results = []
    for fill in ("zero", "nan"):
        llm = LLM.from_loaded(
            loaded,  # type: ignore[arg-type]
            attention_backend=backend,
            kv_format=kv_format,
            kv_fill=fill,
            num_pages=60,
            max_num_seqs=5,
            max_model_len=256,
        )
        assert llm.engine.guard is not None and llm.engine.runner.captured_sizes == []
        ledger = llm.engine.pool.ledger
        pages = ledger.allocate(ledger.num_free)
        llm.engine.pool.poison(pages, fill)  # type: ignore[arg-type]
        ledger.release(pages)
        results.append([output.token_ids for output in llm.generate(prompts(6), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))])
        assert not llm.engine.pool.buffer[0].any()
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens in results[0]}) > 3
