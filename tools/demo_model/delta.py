"""The chunked gated delta rule for training, in plain PyTorch: the inverse within a chunk, and the recurrence over chunks with its own backward.

Source: Yang et al. 2024, Gated Delta Networks; the chunk form is that of Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule.
"""

from typing import Any

import torch

# Smallest blocks, inverted by products of powers. For 64 those powers would reach binomials of 10^18; for 8 they stay below 20.
BASE = 8


def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """`(I + a)^-1` of strictly lower triangular `[..., C, C]`, fp32; C is 8 times a power of two."""
    return _UnitLowerInverse.apply(a)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        inverse = _invert(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _invert(a: torch.Tensor) -> torch.Tensor:
    size = a.shape[-1]
    x = -_blocks(a, BASE, 0)  # [..., C / 8, 8, 8]
    eye = torch.eye(BASE, dtype=a.dtype, device=a.device)
    square = _small_product(x, x)
    inverse = _small_product(_small_product(eye + x, eye + square), eye + _small_product(square, square))
    width = BASE
    while width < size:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -(second @ _blocks(a, width, 1) @ first)
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        inverse = torch.cat((upper, torch.cat((below, second), -1)), -2)
        width *= 2
    return inverse[..., 0, :, :]


def _small_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A matrix product in true fp32, whatever precision the device's matrix units are set to."""
    return (x[..., :, :, None] * y[..., None, :, :]).sum(-2)


def _blocks(a: torch.Tensor, width: int, below: int) -> torch.Tensor:
    """`below` 0: the diagonal blocks `[..., C / width, width, width]`. 1: of each pair of them, the block under the first and left of the second."""
    count = a.shape[-1] // width
    grid = a.unflatten(-1, (count, width)).unflatten(-3, (count, width))  # [..., count, width, count, width]
    if below:
        grid = grid[..., 1::2, :, 0::2, :]
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@torch.compiler.disable
def scan_chunks(u: torch.Tensor, w: torch.Tensor, k: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`v[i] = u[i] - w[i] S[i]`, `S[i + 1] = gamma[i] S[i] + k[i]^T v[i]`, `S[0] = 0`.

    u `[N, M, C, DV]`, w and k `[N, M, C, DK]`, gamma `[N, M]`, all fp32. Returns v `[N, M, C, DV]` and S `[N, M, DK, DV]`, the states before each chunk.
    Not compiled: three launches a chunk, where unrolling would take minutes of compiling.
    """
    return _ScanChunks.apply(u, w, k, gamma)


class _ScanChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, w: torch.Tensor, k: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, w, k = u.contiguous(), w.contiguous(), k.contiguous()
        v = torch.empty_like(u)
        states = u.new_zeros(u.shape[0], u.shape[1], k.shape[-1], u.shape[-1])
        factors = gamma[..., None, None]
        for i in range(len(u)):
            torch.baddbmm(u[i], w[i], states[i], alpha=-1, out=v[i])
            if i + 1 < len(u):
                torch.baddbmm(states[i] * factors[i], k[i].transpose(1, 2), v[i], out=states[i + 1])
        ctx.save_for_backward(w, k, gamma, v, states)
        return v, states

    @staticmethod
    def backward(ctx: Any, grad_v: torch.Tensor, grad_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, k, gamma, v, states = ctx.saved_tensors
        grad_v, grad_states = grad_v.contiguous(), grad_states.contiguous()
        grad_u = torch.empty_like(grad_v)
        # Gradients of the state after each chunk; nothing reads the last one.
        after = torch.zeros_like(states)
        factors = gamma[..., None, None]
        for i in reversed(range(len(v))):
            torch.baddbmm(grad_v[i], k[i], after[i], out=grad_u[i])
            if i:
                torch.baddbmm(torch.addcmul(grad_states[i], after[i], factors[i]), w[i].transpose(1, 2), grad_u[i], alpha=-1, out=after[i - 1])
        grad_w = -(grad_u @ states.transpose(-1, -2))
        grad_k = v @ after.transpose(-1, -2)
        return grad_u, grad_w, grad_k, (states * after).sum((-1, -2))
