"""Attention for model tests: keys and values of one sequence kept whole, plain PyTorch, no pool."""

import torch


class DenseAttention:
    """An `attend` for one sequence: remembers every layer's keys and values from call to call, and masks causally (and by `window`)."""

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self._kv:
            old_k, old_v = self._kv[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self._kv[layer] = (k, v)
        num_keys, num_queries = k.shape[0], q.shape[0]
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)  # [T, keys]
        seen = (distance >= 0) if self._window is None else (distance >= 0) & (distance < self._window)
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [keys, HQ, D]
        scores = torch.einsum("thd,shd->hts", q, keys) * q.shape[-1] ** -0.5
        weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1).to(q.dtype)
        return torch.einsum("hts,shd->thd", weights, values)
