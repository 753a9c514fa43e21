"""Attention and caches written a second time, per element and in fp64, sharing no code with the package's own definition."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atoll.ops.attention import DecodeSpec, PagedKV

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_tensor": torch.float8_e4m3fn,
    "fp8_token": torch.float8_e4m3fn,
}
FORMATS = tuple(DTYPES)


@dataclass(frozen=True)
class Cache:
    """A cache whose sequences lie on shuffled pages, and what their rows mean."""

    kv: PagedKV
    page_table: torch.Tensor  # [B, MP] int32; 0 past a sequence's pages
    k: list[np.ndarray]  # of each sequence, [len, HKV, D] fp64
    v: list[np.ndarray]

    def place(self, i_b: int, token: int) -> tuple[int, int]:
        """Page and offset of a sequence's token."""
        page_size = self.kv.k.shape[2]
        return int(self.page_table[i_b, token // page_size]), token % page_size


def make_cache(
    lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    kv_format: str = "bf16",
    v_layout: str = "plain",
    seed: int = 0,
    spare_lanes: int = 1,
) -> Cache:
    """Random rows for every sequence; zeros, with scale 1, in every row that nobody owns."""
    rng = torch.Generator().manual_seed(seed)
    dtype = DTYPES[kv_format]
    need = [-(-n // page_size) for n in lens]
    num_pages = 1 + sum(need) + 2
    ids = (torch.randperm(num_pages - 1, generator=rng) + 1).tolist()
    table = torch.zeros((len(lens), max(need, default=0) + spare_lanes), dtype=torch.int32)
    rows = (num_pages, num_kv_heads, page_size, head_dim)
    pages = {"k": torch.zeros(rows).to(dtype), "v": torch.zeros(rows).to(dtype)}
    scales = {name: {"fp8_tensor": torch.tensor([0.37]), "fp8_token": torch.ones(rows[:3])}.get(kv_format) for name in pages}
    meaning: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for i_b, n in enumerate(lens):
        table[i_b, : need[i_b]] = torch.tensor([ids.pop() for _ in range(need[i_b])], dtype=torch.int32)
        for name in pages:
            stored = torch.randn((n, num_kv_heads, head_dim), generator=rng).to(dtype)
            real = stored.to(torch.float64)
            for token in range(n):
                page, offset = int(table[i_b, token // page_size]), token % page_size
                _bytes(pages[name])[page, :, offset] = _bytes(stored)[token]
                scale = scales[name]
                if kv_format == "fp8_token":
                    assert scale is not None
                    scale[page, :, offset] = torch.rand(num_kv_heads, generator=rng) + 0.5
                    real[token] *= scale[page, :, offset, None].double()
            if kv_format == "fp8_tensor":
                real *= 0.37
            meaning[name].append(real.numpy())
    v = pages["v"] if v_layout == "plain" else _bytes(pages["v"]).transpose(2, 3).contiguous().view(dtype)
    return Cache(PagedKV(kv_format, pages["k"], v, scales["k"], scales["v"], v_layout), table, meaning["k"], meaning["v"])


def poison_unowned(cache: Cache, spec: DecodeSpec, lens: Sequence[int], fill: Callable[[torch.Tensor], torch.Tensor]) -> PagedKV:
    """A copy of the cache in which `fill` has rewritten every row, and every row's scale, that no sequence owns."""
    kv = cache.kv
    owned = torch.zeros((kv.num_pages, kv.k.shape[2]), dtype=torch.bool)
    for i_b, n in enumerate(lens):
        first_position = n - spec.query_len
        for token in range(n):
            if spec.window is None or token > first_position - spec.window:
                owned[cache.place(i_b, token)] = True
    row = owned[:, None, :, None]

    def poison(pages: torch.Tensor) -> torch.Tensor:
        keep = row.squeeze(-1) if pages.dim() == 3 else row
        filled = fill(pages)
        return torch.where(keep, _bits(pages), _bits(filled)).view(pages.dtype)

    v = poison(kv.v) if kv.v_layout == "plain" else poison(kv.v.transpose(2, 3)).transpose(2, 3).contiguous()
    scales = [poison(s) if s is not None and s.dim() == 3 else s for s in (kv.k_scale, kv.v_scale)]
    return PagedKV(kv.kv_format, poison(kv.k), v, scales[0], scales[1], kv.v_layout)


def _every_byte(byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.full((*x.shape[:-1], x.shape[-1] * x.itemsize), byte, dtype=torch.uint8).view(x.dtype)


def _random_bytes(x: torch.Tensor) -> torch.Tensor:
    rng = torch.Generator().manual_seed(9)
    return torch.randint(0, 256, (*x.shape[:-1], x.shape[-1] * x.itemsize), dtype=torch.uint8, generator=rng).view(x.dtype)


FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "0x7f": _every_byte(0x7F),
    "0xff": _every_byte(0xFF),
    "nan": lambda x: torch.full(x.shape, math.nan).to(x.dtype),
    "inf": lambda x: torch.full(x.shape, math.inf).to(x.dtype),
    "max": lambda x: torch.full(x.shape, torch.finfo(x.dtype).max).to(x.dtype),
    "random": _random_bytes,
}


def naive_decode(spec: DecodeSpec, q: np.ndarray, k: list[np.ndarray], v: list[np.ndarray], sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """`q [B, QL, HQ, D]` over each sequence's rows `[len, HKV, D]`, key by key as the spec's docstring says."""
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:3], -math.inf)
    scale = spec.sm_scale if spec.sm_scale is not None else 1 / math.sqrt(spec.head_dim)
    for i_b, i_q, i_h in np.ndindex(*q.shape[:3]):
        seq_len = len(k[i_b])
        position = seq_len - spec.query_len + i_q
        i_kv = i_h * spec.num_kv_heads // spec.num_q_heads
        scores, values = [], []
        for j in range(seq_len):
            if (spec.causal and j > position) or (spec.window is not None and j <= position - spec.window):
                continue
            score = scale * sum(a * b for a, b in zip(q[i_b, i_q, i_h].tolist(), k[i_b][j, i_kv].tolist(), strict=True))
            if spec.soft_cap is not None:
                score = spec.soft_cap * math.tanh(score / spec.soft_cap)
            scores.append(score)
            values.append(v[i_b][j, i_kv])
        if not scores:
            continue
        if sinks is not None:
            scores.append(float(sinks[i_h]))
            values.append(np.zeros(spec.head_dim))
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        out[i_b, i_q, i_h] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        lse[i_b, i_q, i_h] = top + math.log(sum(weights))
    return out, lse


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes, which can be indexed on every device; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a.contiguous()), _bits(b.contiguous()))
