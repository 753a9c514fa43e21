"""The Hopper kernel as it is compiled, run through its PTX on a CPU: right, without a race or a stray access; and what breaks it is seen."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch

from atoll.ops.attention import DecodeConfig, DecodeSpec
from atoll.probe import Case
from tests.kit.ptx.judge import Cut, Verdict, judge, judge_all
from tests.kit.workers import compiling_pool

ONE_SPLIT = DecodeConfig(tile=64, num_stages=3)
TWO_SPLITS = DecodeConfig(tile=64, num_splits=2, num_stages=3, prefetch=True)
ONE_LAUNCH = DecodeConfig(tile=64, num_stages=3, num_programs=9)


def spec(kv_format: str, page_size: int, head_dim: int, num_q_heads: int = 2, query_len: int = 1, **options: object) -> DecodeSpec:
    shape = {"num_kv_heads": 1, "q_dtype": torch.bfloat16} | options
    return DecodeSpec(num_q_heads, head_dim=head_dim, page_size=page_size, query_len=query_len, kv_format=kv_format, **shape)  # type: ignore[arg-type]


# Tiles of one page and of four, with scales left of a window; rows that a warpgroup multiplies; splits that a second kernel merges; sequences cut over programs
# of one launch. In some the ring of copies goes round.
CASES: dict[str, tuple[Case, DecodeConfig]] = {
    "whole tiles": (Case(spec("fp8_tensor", 64, 64), (0, 1, 64, 290)), ONE_SPLIT),
    "small pages": (Case(spec("fp8_tensor", 16, 64), (17, 200), layout="hnd", own_page0=True), ONE_SPLIT),
    "scales and a window": (Case(spec("fp8_token", 16, 64, window=70), (5, 200), layout="nhd"), ONE_SPLIT),
    "drafts by wgmma": (Case(spec("bf16", 64, 128, 5, 4), (5, 200)), ONE_SPLIT),
    "two splits": (Case(spec("fp8_token", 64, 64, sinks=True), (40, 200)), TWO_SPLITS),
    "one launch": (Case(spec("fp8_tensor", 64, 64, 4, num_kv_heads=2), (150, 17, 290)), ONE_LAUNCH),
}

# A barrier after which what others stored is read: no store comes between.
MEETING = r"^\s*bar\.sync.*;(?=(?:(?!.*\b(?:bar|st|stmatrix)\.).*\n)*?.*\b(?:ld\.shared|ldmatrix))"
WAIT = r"^.*mbarrier\.try_wait[^\n]*\n.*bra.*;"
FENCE = r"^\s*fence\.proxy\.async.*;"


@dataclass(frozen=True)
class Control:
    """What is done to a case's PTX, and what is then said."""

    case: str
    cut: Cut
    said: str


CONTROLS = {
    "barriers not fenced": Control("whole tiles", Cut(FENCE), "the asynchronous proxy reads"),
    "q not fenced": Control("drafts by wgmma", Cut(FENCE, 1), "the asynchronous proxy reads"),
    "P not fenced": Control("drafts by wgmma", Cut(FENCE, -1), "the asynchronous proxy reads"),
    "products not waited for": Control("drafts by wgmma", Cut(r"wgmma\.wait_group.*;"), "wgmma.wait_group is missing"),
    "P overwritten while it is multiplied": Control("drafts by wgmma", Cut(r"wgmma\.wait_group.*;", -1), "which a product of warp"),
    "registers not ordered": Control("drafts by wgmma", Cut(r"wgmma\.fence.*;"), "no wgmma.fence between"),
    "an output out of bounds": Control("whole tiles", Cut(r"(st\.global\.b16\s*\[[^\]+]*)(\+ *0 *)?\]", new=r"\1+1048576]"), "out of bounds of every"),
    "an input out of bounds": Control("whole tiles", Cut(r"(ld\.global\.\S+\s[^\[]*\[[^\]+]*)(\+ *0 *)?\]", new=r"\1+1048576]"), "out of bounds of every"),
    "a page that does not exist": Control("whole tiles", Cut(r"(cp\.async\.bulk\.tensor.*), %r\d+\}", new=r"\1, 100000}"), "out of bounds of a tensor"),
    "a tile out of bounds": Control("whole tiles", Cut(r"(ldmatrix[^\[]*\[[^\]+]*)\]", new=r"\1+65536]"), "out of bounds of its"),
    "an arrival too few": Control("whole tiles", Cut(r"(mbarrier\.init.*), 1;", new=r"\1, 2;"), "would hang"),
    "an arrival too many": Control("whole tiles", Cut(r"@\S+ mbarrier\.arrive.*;", new=r"\g<0> \g<0>"), "at which all 1 have arrived"),
    "twice the bytes": Control("whole tiles", Cut(r"(mbarrier\.arrive.*), 4096;", new=r"\1, 8192;"), "would hang"),
    "an instruction that is not known": Control("whole tiles", Cut(r"ex2\.approx\.ftz\.f32", new="tanh.approx.f32"), "tanh.approx.f32"),
}  # fmt: skip


@dataclass(frozen=True)
class Verdicts:
    """Those of all tests here."""

    clean: dict[str, Future[Verdict]]
    controls: dict[str, Future[Verdict]]
    each: dict[str, Future[list[Verdict]]]
    wrong: Future[Verdict]


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """From one process, in which Triton compiles and does not interpret; each kernel once."""
    pool = compiling_pool(workers=1)
    yield Verdicts(
        clean={name: pool.submit(judge, *case) for name, case in CASES.items()},
        controls={name: pool.submit(judge, *CASES[control.case], control.cut) for name, control in CONTROLS.items()},
        each={pattern: pool.submit(judge_all, *CASES["whole tiles"], pattern) for pattern in (MEETING, WAIT)},
        wrong=pool.submit(judge, *CASES["whole tiles"], Cut(r"ex2\.approx", -1, "lg2.approx")),
    )
    pool.close()


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_is_right_and_clean(name: str, verdicts: Verdicts) -> None:
    verdict = verdicts.clean[name].result()
    assert verdict.clean, verdict


@pytest.mark.parametrize("pattern", [MEETING, WAIT], ids=["bar.sync", "mbarrier.try_wait"])
def test_each_that_is_left_out_is_a_race(pattern: str, verdicts: Verdicts) -> None:
    each = verdicts.each[pattern].result()
    assert len(each) >= 4
    assert [verdict for verdict in each if not verdict.race] == []


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_done_to_it_is_seen(name: str, verdicts: Verdicts) -> None:
    verdict = verdicts.controls[name].result()
    assert CONTROLS[name].said in (verdict.fault or ""), verdict


def test_a_wrong_answer_is_seen(verdicts: Verdicts) -> None:
    verdict = verdicts.wrong.result()
    assert verdict.fault is None and not verdict.clean
