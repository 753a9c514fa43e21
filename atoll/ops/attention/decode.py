"""Decode attention: the device half of a plan, once per layer, with every argument checked before any launch."""

import torch

from atoll.errors import SpecError
from atoll.ops.attention.plan import DecodePlan, load_backend
from atoll.ops.attention.spec import PagedKV, check_kv


def decode_attention(
    q: torch.Tensor,  # [B, QL, HQ, D] in spec.q_dtype
    kv: PagedKV,
    plan: DecodePlan,
    *,
    out: torch.Tensor | None = None,  # [B, QL, HQ, D]
    lse: torch.Tensor | None = None,  # [B, QL, HQ] fp32
    sinks: torch.Tensor | None = None,  # [HQ] fp32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each sequence's last `query_len` tokens to the rows it owns; returns `(out, lse)`.

    Reads no row that a sequence does not own (with `mask_unowned_kv`), writes every element of `out` and `lse`, and never waits for the device.
    `lse` is the natural log-sum-exp of the scaled, capped scores; with `sinks` the sink counts as one more key whose value is zero, so states still merge.

    Edge: seq_len 0, or a query row that sees no key, gives out 0 and lse -inf, whatever the sink.
    Error: `|out - ref| <= 2 |lowprec - ref| + rounding` (tests/ops/test_decode_numerics.py).
    Raises: SpecError for a shape, dtype or device that does not fit the plan, before any launch.
    """
    spec = plan.spec
    check_kv(spec, kv)
    q_shape = (plan.batch, spec.query_len, spec.num_q_heads, spec.head_dim)
    _check_tensor("q", q, q_shape, spec.q_dtype, plan)
    if q.stride(-1) != 1:
        raise SpecError(f"q has innermost stride {q.stride(-1)}, it must be 1; pass q.contiguous()")
    if kv.k.device != plan.seq_lens.device:
        raise SpecError(f"the cache is on {kv.k.device}, the plan on {plan.seq_lens.device}; make the plan with device={str(kv.k.device)!r}")
    if spec.sinks != (sinks is not None):
        raise SpecError(f"spec.sinks is {spec.sinks}, but sinks is {'given' if sinks is not None else 'None'}; pass [HQ] fp32 exactly when the spec says so")
    if sinks is not None:
        _check_tensor("sinks", sinks, (spec.num_q_heads,), torch.float32, plan)
    if out is None:
        out = torch.empty(q_shape, dtype=spec.q_dtype, device=q.device)
    else:
        _check_tensor("out", out, q_shape, spec.q_dtype, plan)
        if out.stride(-1) != 1:
            raise SpecError(f"out has innermost stride {out.stride(-1)}, it must be 1; pass a buffer with contiguous rows")
    if lse is None:
        lse = torch.empty(q_shape[:3], dtype=torch.float32, device=q.device)
    else:
        _check_tensor("lse", lse, q_shape[:3], torch.float32, plan)
    if plan.batch:
        load_backend(plan.backend).decode(q, kv, plan, out, lse, sinks)
    return out, lse


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, plan: DecodePlan) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SpecError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, the plan asks for {dtype} of shape {shape}; pass that")
    if tensor.device != plan.seq_lens.device:
        raise SpecError(f"{name} is on {tensor.device}, the plan on {plan.seq_lens.device}; put both on one device")
