"""The leaky backend: the reference's numbers where every unowned row is finite, NaN where one is not; and who may choose it."""

from dataclasses import replace

import pytest
import torch

from atoll.errors import BackendError
from atoll.ops.attention import (
    BACKENDS,
    NAMED_BACKENDS,
    DecodeSpec,
    PagedKV,
    backend_masks_unowned,
    choose_backend,
    decode_attention,
    load_backend,
    plan_decode,
)
from atoll.ops.attention.leaky import TILE
from atoll.probe import BackendAdapter, Case, matrix, probe_case
from atoll.probe.cases import with_flags

CASES = [with_flags(case, mask_unowned_kv=False) for case in matrix("quick", short=True) if case.spec.page_size <= 32][::6]
SPEC = DecodeSpec(4, 2, 16, 4, q_dtype=torch.float32, kv_format="fp32", mask_unowned_kv=False)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_on_finite_rows_it_is_the_reference_and_on_nan_it_leaks(case: Case) -> None:
    problem = case.make()
    results = []
    for backend in ("reference", "leaky"):
        plan = plan_decode(problem.spec, problem.seq_lens, problem.page_table, backend=backend, max_seq_len=case.max_seq_len)
        results.append(decode_attention(problem.q, problem.kv, plan, sinks=problem.sinks))
    (out, lse), (leaky_out, leaky_lse) = results
    torch.testing.assert_close(leaky_out.float(), out.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(leaky_lse, lse, atol=1e-3, rtol=1e-4)
    assert probe_case(BackendAdapter("leaky"), case, fills=("nan",)).status == "leak"


def decode(pages: torch.Tensor, lens: list[int], table: list[list[int]], backend: str) -> torch.Tensor:
    plan = plan_decode(replace(SPEC, mask_unowned_kv=backend_masks_unowned(backend)), lens, torch.tensor(table, dtype=torch.int32), backend=backend)
    return decode_attention(torch.ones(len(lens), 1, 4, 16), PagedKV("fp32", pages, pages), plan)[0]


@pytest.mark.parametrize(("place", "page", "row"), [("tail", 3, 2), ("padded lane", 0, 1), ("a lane that the longer one owns", 2, 0)])
def test_each_place_leaks_alone(place: str, page: int, row: int) -> None:
    """One NaN row. Sequence 0 owns page 3 up to row 1; sequence 1 pages 1 and 2; the last lane of sequence 0 names the null page."""
    pages = torch.ones(4, 2, 4, 16)
    pages[page, :, row] = torch.nan
    lens, table = [2, 8], [[3, 0 if place != "a lane that the longer one owns" else 2], [1, 2]]
    out = decode(pages, lens, table, "leaky")
    assert bool(out[0].isnan().all())
    assert bool(decode(pages, lens, table, "reference")[0].eq(1).all())


def test_tokens_past_the_tile_of_the_longest_are_not_read() -> None:
    pages = torch.ones(2 + TILE // 4, 2, 4, 16)
    pages[-1] = torch.nan
    lanes = [*range(1, TILE // 4 + 1)]
    assert bool(decode(pages, [TILE], [[*lanes, len(pages) - 1]], "leaky").eq(1).all())
    assert bool(decode(pages, [TILE + 1], [[*lanes, len(pages) - 1]], "leaky").isnan().all())


def test_only_a_spec_without_the_promise_takes_it_and_auto_never_does() -> None:
    masked = DecodeSpec(4, 2, 64, 16)
    with pytest.raises(BackendError, match="leaky: it does not mask unowned rows, and the spec asks for that; set mask_unowned_kv=False"):
        choose_backend(masked, torch.device("cpu"), "leaky")
    for spec in (masked, SPEC):
        assert choose_backend(spec, torch.device("cpu"))[0] in BACKENDS
    assert all(backend_masks_unowned(name) for name in ("auto", *BACKENDS))
    assert not any(backend_masks_unowned(name) for name in NAMED_BACKENDS)
    assert not any(load_backend(name).GRAPH_SAFE for name in NAMED_BACKENDS)


@pytest.mark.parametrize("call", [load_backend, backend_masks_unowned])
def test_an_unknown_backend_is_refused(call: object) -> None:
    with pytest.raises(BackendError, match="attention backend 'xformers' is unknown; use 'auto' or one of gluon_sm90, triton, reference, flashinfer_xqa"):
        call("xformers")  # type: ignore[operator]
