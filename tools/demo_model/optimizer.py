"""Muon for the matrices, Adam for all else; learning rates follow the clock."""

from collections import defaultdict

import torch

# Jordan et al. 2024: coefficients of the quintic iteration that takes singular values near 1 within five rounds.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Stacked `[K, rows, columns]`, rows <= columns, in bf16: singular values pulled to about 1."""
    a, b, c = QUINTIC
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Momentum, orthogonalized, over matrices of any shapes; those of one shape are worked on together."""

    def __init__(self, matrices: list[torch.Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        groups = defaultdict(list)
        for matrix in matrices:
            groups[tuple(matrix.shape)].append(matrix)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer.lerp_(grads, 1 - self.momentum)
            update = grads.lerp(buffer, self.momentum)
            rows, columns = update.shape[1:]
            turned = orthogonalize(update.mT).mT if rows > columns else orthogonalize(update)
            scale = max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(group, list(turned.to(update.dtype).unbind()), alpha=-lr * scale)


def rate(progress: float, *, decay_from: float = 0.45) -> float:
    """Factor of the learning rates at a share of the time: constant, then down to zero along a line."""
    return 1.0 if progress < decay_from else max(0.0, (1.0 - progress) / (1.0 - decay_from))
