"""The chunked delta rule by the kernels of flash-linear-attention, where they are installed and fit; imported only when they run."""

import functools
import importlib.metadata
import importlib.util
import re

import torch

# The first version whose arguments and state layout were read: states [N, HV, K, V] unless state_v_first, value heads in groups.
MIN_VERSION = (0, 6)


@functools.cache
def refuse_fla(device_type: str, dtype: torch.dtype) -> str | None:
    """Why flash-linear-attention does not run on tensors of that dtype there; None where it runs. Imports nothing: on a CPU the import alone would fail."""
    if device_type != "cuda":
        return f"its kernels need a GPU, the tensors are on {device_type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its products are in 16 bits, the model is in {dtype}"
    if importlib.util.find_spec("fla") is None:
        return "fla is not installed; pip install 'atoll[fla]'"
    version = _installed_version()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MIN_VERSION:
        return f"fla-core {version or 'of unknown version'} is below {'.'.join(map(str, MIN_VERSION))}; pip install --upgrade 'atoll[fla]'"
    return None


def delta_chunked_fla(
    q: torch.Tensor,  # [T, HK, DK] fp32, normalized
    k: torch.Tensor,  # [T, HK, DK] fp32, normalized
    v: torch.Tensor,  # [T, HV, DV] bf16 or fp16
    g: torch.Tensor,  # [T, HV] fp32
    beta: torch.Tensor,  # [T, HV] fp32
    initial_state: torch.Tensor,  # [HV, DK, DV] fp32
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_chunked` with products in `v`'s dtype; returns `out [T, HV, DV]` in it and the final state `[HV, DK, DV]` in fp32. T is at least 1.

    Its chunks are ours, 64 tokens, and between them its state stays in fp32, so that calls which meet on a chunk's edge give the bits of one. That holds
    within a process: the kernels are tuned by timing, and another process may choose other tiles.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, state = chunk_gated_delta_rule(
        *(x.to(v.dtype)[None] for x in (q, k, v)),
        g=g[None],
        beta=beta[None],
        scale=q.shape[-1] ** -0.5,
        initial_state=initial_state[None].contiguous(),
        output_final_state=True,
    )
    return out[0], state[0]


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
