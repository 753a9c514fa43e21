"""Adapters by name and by path, and what those for others' kernels say where they cannot run."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.errors import BackendError
from atoll.ops.attention import DecodeSpec
from atoll.probe import ADAPTERS, BackendAdapter, Case, DecodeProblem, get_adapter, load_adapter, probe_case, summary_rows
from atoll.probe import flashinfer as flashinfer_adapters
from atoll.probe.adapters import Result, leaky_control

SPEC = DecodeSpec(4, 2, 64, 16)
CASE = Case(SPEC, (1, 17, 40))


def plain_adapter(problem: DecodeProblem):  # type: ignore[no-untyped-def]
    """What somebody else would write: a plain callable, no lse."""
    run = BackendAdapter("reference")(problem)

    def call() -> Result:
        return run()[0], None

    return call


def test_names_resolve() -> None:
    assert get_adapter("reference") == BackendAdapter("reference")
    assert get_adapter("leaky_control") is leaky_control
    assert get_adapter("flashinfer_xqa") is flashinfer_adapters.xqa
    for path in ADAPTERS.values():
        assert callable(load_adapter(path))


def test_a_plain_callable_can_be_probed() -> None:
    assert probe_case(load_adapter("tests.ops.test_adapters:plain_adapter"), CASE, fills=("nan",)).status == "clean"


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (None, r"TypeError: the adapter's call returned NoneType; return \(out, lse\)"),
        ((torch.zeros(1), None), r"TypeError: the adapter's out is torch.float32 of shape \(1,\); return a floating tensor of shape"),
        ((None, None), "TypeError: the adapter's out is NoneType"),
        (ZeroDivisionError("by design"), "ZeroDivisionError: by design"),
    ],
)
def test_a_kernel_that_breaks_the_contract_fails_its_case(result: object, failure: str) -> None:
    def call() -> object:
        if isinstance(result, Exception):
            raise result
        return result

    report = probe_case(lambda problem: call, CASE, fills=("nan",))  # type: ignore[arg-type,return-value]
    assert report.status == "failed"
    assert re.match(failure, report.failure or "")
    [row] = summary_rows([report])
    assert row["status"] == "failed"


def test_a_module_that_raises_at_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_adapter.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match="adapter 'broken_adapter:run' cannot be imported: ZeroDivisionError"):
        load_adapter("broken_adapter:run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("xqa", "adapter 'xqa' is unknown; use one of gluon_sm90, triton, reference, leaky_control"),
        ("no_such_package.kernels:adapter", "adapter 'no_such_package.kernels:adapter' cannot be imported: "),
        ("atoll.probe.adapters:nothing", "module atoll.probe.adapters has no function 'nothing'; check"),
        (".kernels:adapter", "adapter '.kernels:adapter' is not of the form module:function; pass"),
        (":adapter", "adapter ':adapter' is not of the form module:function; pass"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(BackendError, match=re.escape(message)):
        get_adapter(name)


@pytest.mark.parametrize("name", ["flashinfer_xqa", "flashinfer_tensor_cores"])
def test_flashinfer_refuses_a_cpu_with_the_reason(name: str) -> None:
    report = probe_case(get_adapter(name), CASE)
    assert report.status == "refused"
    [row] = summary_rows([report])
    assert row["detail"] == "FlashInfer needs an NVIDIA GPU, the problem is on cpu"


@pytest.mark.parametrize(
    ("options", "lens", "message"),
    [
        ({"page_size": 8}, (5,), "XQA takes page_size 16, 32, 64 or 128, not 8"),
        ({"soft_cap": 20.0}, (5,), "XQA has no soft cap"),
        ({"query_len": 4}, (3, 9), "XQA is not given sequences shorter than query_len 4"),
        ({"kv_format": "fp8_token"}, (5,), "FlashInfer has no scale per token"),
        ({"v_layout": "transposed"}, (5,), "FlashInfer takes plain V alone"),
        ({"causal": False}, (5,), "FlashInfer's decode kernels are causal"),
    ],
)
def test_xqa_refuses_what_it_cannot(options: dict[str, object], lens: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_adapters, "_import", lambda problem: SimpleNamespace())
    spec = DecodeSpec(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16} | options))  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=re.escape(message)):
        flashinfer_adapters.xqa(Case(spec, lens, layout="hnd").make())


def test_the_table_for_others_names_page_0_where_no_row_is_owned() -> None:
    problem = Case(DecodeSpec(4, 2, 64, 16, window=20), (1, 60)).make()
    table = problem.safe_page_table()
    assert (table >= 0).all()
    assert table[0].tolist() == [problem.pages[0][0], 0, 0, 0, 0, 0]
    # Row 40 is the first in the window: pages 0 and 1 of the sequence are left of it.
    assert table[1].tolist() == [0, 0, *problem.pages[1][2:], 0, 0]
    assert torch.equal(problem.page_table[1, 2:4], table[1, 2:4])


def test_a_finite_lse_of_an_empty_sequence_is_wrong_and_named() -> None:
    def finite_lse(problem: DecodeProblem):  # type: ignore[no-untyped-def]
        run = BackendAdapter("reference")(problem)

        def call() -> Result:
            out, lse = run()
            assert lse is not None
            return out, lse.clamp_min(-50000.0)

        return call

    report = probe_case(finite_lse, Case(SPEC, (17, 0)), fills=("nan",))
    wrong = next(row for row in summary_rows([report]) if row["status"] == "wrong")
    assert wrong["place"] == "lse"
