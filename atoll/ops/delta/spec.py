"""What a gated delta rule layer computes: head counts, dims and dtype, and the shapes of the state that a running sequence keeps for it."""

from dataclasses import dataclass

import torch

from atoll.errors import SpecError

MAX_HEAD_DIM = 256
MAX_CONV_WIDTH = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class DeltaSpec:
    """The fixed part of a delta layer; hashable, so it can key a cache of compiled kernels.

    Value head `h` is served by q and k of key head `h // group_size`. The channels of `mixed_qkv` are q of all key heads, k of all key heads, then v of all
    value heads.

    Raises SpecError for a value that no implementation takes.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_width: int = 4  # tokens that one output of the causal conv sees, its own included
    dtype: torch.dtype = torch.bfloat16  # of mixed_qkv, the conv state and the output; the recurrent state is fp32
    l2_eps: float = 1e-6  # added to the squared norm of q and k

    def __post_init__(self) -> None:
        if self.num_k_heads < 1:
            raise SpecError(f"num_k_heads {self.num_k_heads} is below 1; give the model's count of key heads")
        if self.num_v_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise SpecError(
                f"num_v_heads {self.num_v_heads} is not a multiple of num_k_heads {self.num_k_heads}; each key head must serve the same number of value heads"
            )
        for name, value in (("k_head_dim", self.k_head_dim), ("v_head_dim", self.v_head_dim)):
            if not 1 <= value <= MAX_HEAD_DIM:
                raise SpecError(f"{name} {value} is outside 1 to {MAX_HEAD_DIM}; give the model's head dimension")
        if not 2 <= self.conv_width <= MAX_CONV_WIDTH:
            raise SpecError(f"conv_width {self.conv_width} is outside 2 to {MAX_CONV_WIDTH}; give the width of the model's causal conv")
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype {self.dtype} is not supported; use torch.bfloat16, torch.float16 or torch.float32")
        if not 0 < self.l2_eps < 1:
            raise SpecError(f"l2_eps {self.l2_eps} is outside 0 to 1; use 1e-6")

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def key_dim(self) -> int:
        """Channels of q of all heads, and of k of all heads."""
        return self.num_k_heads * self.k_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of v of all heads."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of `mixed_qkv`, and of the conv."""
        return 2 * self.key_dim + self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """One sequence's recurrent state, fp32: `[HV, DK, DV]`."""
        return self.num_v_heads, self.k_head_dim, self.v_head_dim

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """One sequence's conv state, in `dtype`: `[conv_dim, W - 1]`, the last inputs of the conv, oldest first."""
        return self.conv_dim, self.conv_width - 1

    @property
    def scale(self) -> float:
        """The factor on q."""
        return float(self.k_head_dim**-0.5)


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise SpecError unless the tensor has that shape and dtype and lies on that device. No device sync."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SpecError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, the call asks for {dtype} of shape {shape}; pass that")
    if tensor.device != device:
        raise SpecError(f"{name} is on {tensor.device}, the states are on {device}; put both on one device")


def check_states(spec: DeltaSpec, conv_states: torch.Tensor, states: torch.Tensor) -> None:
    """Raise SpecError unless these are slots that a layer of `spec` can keep its state in. No device sync."""
    if states.dim() != 4:
        raise SpecError(f"states has shape {tuple(states.shape)} with {states.dim()} dimensions; pass [R, {', '.join(map(str, spec.state_shape))}]")
    num_slots = states.shape[0]
    check_tensor("states", states, (num_slots, *spec.state_shape), torch.float32, states.device)
    check_tensor("conv_states", conv_states, (num_slots, *spec.conv_state_shape), spec.dtype, states.device)
    if states.stride(-1) != 1 and states.shape[-1] > 1:
        raise SpecError(f"states has innermost stride {states.stride(-1)}, it must be 1; keep rows of DV contiguous")


def check_weight(spec: DeltaSpec, conv_weight: torch.Tensor, device: torch.device) -> None:
    """Raise SpecError unless this is the depthwise conv's weight `[conv_dim, W]`. No device sync."""
    shape = (spec.conv_dim, spec.conv_width)
    if tuple(conv_weight.shape) != shape or not conv_weight.is_floating_point():
        raise SpecError(f"conv_weight is {conv_weight.dtype} of shape {tuple(conv_weight.shape)}, the spec asks for floating {shape}; squeeze it")
    if conv_weight.device != device:
        raise SpecError(f"conv_weight is on {conv_weight.device}, the states are on {device}; put both on one device")
