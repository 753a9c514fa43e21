"""A weight matrix in the layout that its device multiplies fastest; knows no model."""

import torch
import torch.nn.functional as F

# oneDNN's blocked layout. Thirty layers of SmolLM2-135M and its output matrix on 2 cores of an AMD EPYC (Zen 5), torch 2.13, packed against F.linear:
# fp32 24 against 44 ms at 1 row, 49 against 77 at 16; bf16 13 against 22 ms and 17 against 32; at 512 rows 7 to 20 % faster.
_BATCH_HINT = 16  # rows; a hint of 1 measured the same


class Linear:
    """`x [T, in] -> x @ weight.T [T, out]`, without bias."""

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in], on its final device, in its final dtype
        self._packed = is_packable(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return F.linear(x, self._weight)


def is_packable(weight: torch.Tensor) -> bool:
    """Whether this torch and this CPU can multiply from the packed layout."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # Only x86 was measured; elsewhere torch has other paths of its own.
    return weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability().startswith("AVX")
