"""The answer of a decode problem by its definition in float64, and the plain computation in the input dtype that sets the error bound.

Written apart from the backends, the reference included: rows come from the problem's own books, not from its page table.
"""

import math
from dataclasses import dataclass

import torch

from atoll.ops.quant.formats import is_fp8
from atoll.probe.cases import DecodeProblem, row_values


@dataclass(frozen=True)
class ErrorReport:
    """How far an output is from the definition, over sequences: the worst ratio of error to bound, and the largest error itself."""

    ratio: float  # 1 or less: within the bound; NaN where the output holds one
    output: str  # that the worst ratio is of: out or lse
    max_error: float  # absolute, of that output
    relative: float  # root mean square of the error over that of the answer

    @property
    def within(self) -> bool:
        return self.ratio <= 1.0


def exact_attention(problem: DecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out [B, QL, HQ, D], lse [B, QL, HQ])` in float64."""
    return _attention(problem, torch.float64)


def low_precision_attention(problem: DecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The same computed in the query's dtype throughout."""
    return _attention(problem, problem.spec.q_dtype)


def compare(problem: DecodeProblem, out: torch.Tensor, lse: torch.Tensor | None) -> ErrorReport:
    """`|out - exact| <= 2 |lowprec - exact| + rounding`, by the largest difference of each sequence; for lse alike where there is one."""
    exact, exact_lse = exact_attention(problem)
    low, low_lse = low_precision_attention(problem)
    rounding = torch.finfo(problem.spec.q_dtype).eps
    outputs = {"out": (out, exact, low)}
    if lse is not None:
        outputs["lse"] = (lse, exact_lse, low_lse)
    found: list[tuple[float, str, float]] = []
    for name, (got, want, lowprec) in outputs.items():
        error = _worst(got, want)
        bound = 2 * _worst(lowprec, want) + 2 * rounding * torch.where(want.isfinite(), want.abs(), 0.0).flatten(1).amax(1) + 1e-6
        # amax keeps NaN, so that a NaN output is never within the bound.
        found.append((float((error / bound).amax()), name, float(error.amax())))
    difference = out.double() - exact
    scale = exact.square().mean().sqrt().clamp_min(1e-12)
    ratio, output, max_error = max(found, key=lambda entry: math.inf if math.isnan(entry[0]) else entry[0])
    return ErrorReport(ratio, output, max_error, float(difference.square().mean().sqrt() / scale))


def _worst(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Largest difference within each sequence, `[B]`; equal infinities differ by 0."""
    got = got.double()
    return torch.where(got == want, 0.0, (got - want).abs()).flatten(1).amax(1)


def _attention(problem: DecodeProblem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    spec = problem.spec
    shape = tuple(problem.q.shape)
    out = torch.zeros(shape, dtype=torch.float64, device=problem.device)
    lse = torch.full(shape[:3], -torch.inf, dtype=torch.float64, device=problem.device)
    for i_b, seq_len in enumerate(problem.seq_lens.tolist()):
        if seq_len == 0:
            continue
        k, v = dequantized_rows(problem, i_b)  # [n, HKV, D] float64
        group = (spec.query_len, spec.num_kv_heads, spec.group_size, spec.head_dim)
        q = problem.q[i_b].view(group).to(dtype)
        scores = torch.einsum("thgd,nhd->thgn", q, k.to(dtype)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        seen = problem.seen(i_b)  # [QL, n]
        scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
        if problem.sinks is not None:
            sink = problem.sinks.to(dtype).view(1, spec.num_kv_heads, spec.group_size, 1).expand(spec.query_len, -1, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        weights = torch.softmax(scores, dim=-1)
        any_key = seen.any(-1)
        answer = torch.einsum("thgn,nhd->thgd", weights, v.to(dtype)).reshape(shape[1:]).double()
        out[i_b] = torch.where(any_key[:, None, None], answer, 0.0)
        lse[i_b] = torch.where(any_key[:, None], torch.logsumexp(scores.double(), -1).reshape(shape[1:3]), -torch.inf)
    return out, lse


def dequantized_rows(problem: DecodeProblem, i_b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that a sequence's tokens stand for, `[seq_len, HKV, D]` float64; rows left of the window included, as they lie."""
    kv, size = problem.kv, problem.spec.page_size
    rows = problem.row_ids(i_b)
    values = []
    for field, scale, transposed in ((kv.k, kv.k_scale, False), (kv.v, kv.v_scale, kv.v_layout == "transposed")):
        bits = row_values(field, rows, size, transposed=transposed)
        value = bits.view(field.dtype).to(torch.float64)
        if is_fp8(kv.kv_format) and scale is not None:
            factor = row_values(scale, rows, size).view(torch.float32)[..., None] if kv.kv_format == "fp8_token" else scale
            value = value * factor.double()
        values.append(value)
    return values[0], values[1]
