"""One batch's decode work: lengths and page table on the device, the backend chosen, its tuning and workspace."""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypedDict

import torch

from atoll.errors import BackendError, SpecError
from atoll.ops.attention.spec import DecodeSpec

# Each module has MASKS_UNOWNED (it keeps the promise), GRAPH_SAFE (a CUDA graph may hold it), supports(), config() and decode(). One whose kernel plans on the
# host also has prepare(), which each new plan and each refill runs; one with num_programs has can_balance(); one with its own idea of tuning, candidates().
# In order of preference.
BACKENDS: dict[str, str] = {
    "gluon_sm90": "atoll.ops.attention.gluon_decode_sm90",
    "triton": "atoll.ops.attention.triton_decode",
    "reference": "atoll.ops.attention.reference",
}
# Never chosen by "auto": none of them masks.
NAMED_BACKENDS: dict[str, str] = {
    "flashinfer_xqa": "atoll.ops.attention.flashinfer_xqa",
    "flashinfer_tensor_cores": "atoll.ops.attention.flashinfer_tensor_cores",
    "leaky": "atoll.ops.attention.leaky",
}


@dataclass(frozen=True)
class BatchShape:
    """What a backend's `config` may know of a batch besides the spec."""

    batch: int
    max_seq_len: int  # tokens; an upper bound that holds for every refill
    num_sms: int  # multiprocessors of the device, 1 on a CPU
    amd: bool = False


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of one launch; results stay within the error bound for any choice."""

    tile: int = 64  # tokens per kernel step
    num_splits: int = 1  # programs per sequence and KV head
    tiles_per_split: int = 0  # 0: a sequence's tiles divided evenly over num_splits; else fixed, so bits do not depend on the batch
    num_warps: int = 4
    num_stages: int = 3
    peel_above: int = 0  # tiles per split above which tiles without a mask get a loop of their own
    max_registers: int | None = None  # per thread; None: the compiler's choice
    prefetch: bool = False  # L2 fetches each program's first tile while the kernel before still runs (gluon_sm90)
    num_programs: int = 0  # above 0: one launch of so many programs, which share out all tiles of the batch and merge among themselves (gluon_sm90)


@dataclass(frozen=True)
class DecodePlan:
    """Frozen, but for the contents of `seq_lens` and `page_table`, which `refill` rewrites in place under a captured CUDA graph.

    Its launches share one workspace: they follow each other in one stream, or wait for each other by events. Two at a time are wrong, and with
    `config.num_programs` so is every launch after them, whose counts of arrivals begin where those two left them.
    """

    spec: DecodeSpec
    backend: str
    refusals: dict[str, str]  # backend -> why it was not chosen
    config: DecodeConfig
    seq_lens: torch.Tensor  # [B] int32; this step's tokens counted; 0 for a padded sequence
    page_table: torch.Tensor  # [B, MP] int32; entries past a sequence's pages may hold anything
    max_seq_len: int
    partial_o: torch.Tensor  # workspace [B, HKV, NS, QL * G, D] fp32, empty when NS is 1; with num_programs what gluon_balanced_sm90 says
    partial_lse: torch.Tensor  # workspace [B, HKV, NS, QL * G] fp32
    arrivals: torch.Tensor  # [2, num_programs, 2] int32, 0 between launches
    by_name: bool = False  # the backend was asked for by name: it may not hand a launch to another
    prepared: dict[str, Any] = field(default_factory=dict)  # what the backend's prepare() left for its decode()

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]

    def refill(self, seq_lens: torch.Tensor | Sequence[int], page_table: torch.Tensor) -> None:
        """Rewrite lengths and table in place for the next step.

        Fewer sequences than the plan holds leave the rest with seq_len 0 and the null page; a narrower table leaves the further lanes as they are.
        Raises SpecError when the batch, table or a length is larger than the plan was made for (lengths are checked when given on the host).
        """
        lens, max_len = _seq_lens_tensor(seq_lens)
        batch, lanes = _check_table(lens, page_table)
        if batch > self.batch or lanes > self.page_table.shape[1]:
            raise SpecError(f"refill with table [{batch}, {lanes}] does not fit the plan's {list(self.page_table.shape)}; make a larger plan")
        if max_len is not None and max_len > self.max_seq_len:
            raise SpecError(f"seq_len {max_len} is above the plan's max_seq_len {self.max_seq_len}; make a larger plan")
        if max_len is not None and max_len > lanes * self.spec.page_size:
            raise SpecError(_table_too_narrow(max_len, lanes, self.spec.page_size))
        self.seq_lens[:batch].copy_(lens, non_blocking=True)
        self.seq_lens[batch:].zero_()
        self.page_table[:batch, :lanes].copy_(page_table, non_blocking=True)
        self.page_table[batch:].zero_()
        self._prepare(lens, page_table)

    def _prepare(self, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        module = load_backend(self.backend)
        if hasattr(module, "prepare"):
            module.prepare(self, seq_lens, page_table)


def plan_decode(
    spec: DecodeSpec,
    seq_lens: torch.Tensor | Sequence[int],  # [B] int32, host or device
    page_table: torch.Tensor,  # [B, MP] int32, host or device
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    max_seq_len: int | None = None,
    config: DecodeConfig | None = None,
) -> DecodePlan:
    """Plan one batch: choose the backend, its tuning and workspace, and put lengths and table on the device.

    `device` defaults to the page table's. `max_seq_len` bounds every later `refill`; it defaults to the longest sequence given on the host, else to
    what the table can hold. Lengths given on the device are not read back (no sync): the caller then promises `0 <= seq_len <= MP * page_size`.
    `config` overrides the backend's own tuning.

    Raises SpecError for a bad table or length, BackendError when `backend` (or, for "auto", every backend) refuses, with the reasons.
    """
    target = torch.device(device) if device is not None else page_table.device
    lens, longest = _seq_lens_tensor(seq_lens)
    batch, lanes = _check_table(lens, page_table)
    capacity = lanes * spec.page_size
    if longest is not None and longest > capacity:
        raise SpecError(_table_too_narrow(longest, lanes, spec.page_size))
    if max_seq_len is None:
        max_seq_len = longest if longest is not None else capacity
    elif longest is not None and longest > max_seq_len:
        raise SpecError(f"seq_len {longest} is above max_seq_len {max_seq_len}; raise max_seq_len")
    name, module, refusals = choose_backend(spec, target, backend)
    shape = BatchShape(batch, max_seq_len, num_sms(target), amd=target.type == "cuda" and torch.version.hip is not None)
    config = config or module.config(spec, shape)
    if config.num_programs and not (hasattr(module, "can_balance") and module.can_balance(spec, batch)):
        raise BackendError(f"{name} cannot run a batch of {batch} in one launch of num_programs {config.num_programs} for this spec; use num_splits")
    plan = DecodePlan(
        spec=spec,
        backend=name,
        refusals=refusals,
        config=config,
        seq_lens=_own_copy(lens, target),
        page_table=_own_copy(page_table, target),
        max_seq_len=max_seq_len,
        by_name=backend != "auto",
        **make_workspace(spec, batch, config, target),
    )
    plan._prepare(lens, page_table)
    return plan


class Workspace(TypedDict):
    """The fields of a plan that kernels write. They may hold anything before a launch, but for `arrivals`."""

    partial_o: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor


def make_workspace(spec: DecodeSpec, batch: int, config: DecodeConfig, device: torch.device) -> Workspace:
    """What a plan of this tuning needs."""
    rows = spec.query_len * spec.group_size
    partial: tuple[int, ...] = (batch, spec.num_kv_heads, config.num_splits if config.num_splits > 1 else 0, rows)
    if config.num_programs:
        # Two parts a program; a kernel works on 8 rows at least, and on a power of two.
        partial = (config.num_programs, 2, max(8, 1 << (rows - 1).bit_length()))
    return {
        "partial_o": torch.empty((*partial, spec.head_dim), dtype=torch.float32, device=device),
        "partial_lse": torch.empty(partial, dtype=torch.float32, device=device),
        "arrivals": torch.zeros((2, config.num_programs, 2), dtype=torch.int32, device=device),
    }


def choose_backend(spec: DecodeSpec, device: torch.device, backend: str = "auto") -> tuple[str, ModuleType, dict[str, str]]:
    """The backend's name and module, and why each one before it in the order of preference was refused."""
    if backend != "auto":
        _check_name(backend)
    refusals: dict[str, str] = {}
    for name in BACKENDS if backend == "auto" else (backend,):
        try:
            module = load_backend(name)
        except ImportError as error:
            refusals[name] = f"cannot be imported: {error}"
            continue
        reason = module.supports(spec, device)
        if reason is None:
            return name, module, refusals
        refusals[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendError(f"no attention backend can run this spec on {device} ({reasons}); change the spec, the device, or use backend='auto'")


def load_backend(name: str) -> ModuleType:
    """Import a backend's module by its name in BACKENDS or NAMED_BACKENDS. Raises BackendError for another name."""
    _check_name(name)
    return importlib.import_module(BACKENDS.get(name) or NAMED_BACKENDS[name])


def backend_masks_unowned(name: str) -> bool:
    """Whether a backend keeps unowned rows out of its arithmetic; "auto" chooses among those that do. Raises BackendError for an unknown name."""
    return name == "auto" or bool(load_backend(name).MASKS_UNOWNED)


def _check_name(name: str) -> None:
    if name not in BACKENDS and name not in NAMED_BACKENDS:
        raise BackendError(f"attention backend {name!r} is unknown; use 'auto' or one of {', '.join([*BACKENDS, *NAMED_BACKENDS])}")


def _seq_lens_tensor(seq_lens: torch.Tensor | Sequence[int]) -> tuple[torch.Tensor, int | None]:
    """As an int32 tensor, and the longest one where that can be known without a device sync."""
    lens = seq_lens if isinstance(seq_lens, torch.Tensor) else torch.tensor(seq_lens, dtype=torch.int32)
    if lens.dim() != 1 or lens.dtype != torch.int32:
        raise SpecError(f"seq_lens is {lens.dtype} of shape {tuple(lens.shape)}; pass int32 of shape [B]")
    if lens.device.type != "cpu":
        return lens, None
    if lens.numel() == 0:
        return lens, 0
    low, high = (int(x) for x in torch.aminmax(lens))
    if low < 0:
        raise SpecError(f"seq_len {low} is below 0; use 0 for a padded sequence")
    return lens, high


def _check_table(lens: torch.Tensor, page_table: torch.Tensor) -> tuple[int, int]:
    if page_table.dim() != 2 or page_table.dtype != torch.int32:
        raise SpecError(f"page_table is {page_table.dtype} of shape {tuple(page_table.shape)}; pass int32 of shape [B, MP]")
    if page_table.shape[0] != lens.shape[0]:
        raise SpecError(f"page_table has {page_table.shape[0]} rows, seq_lens {lens.shape[0]}; give one row per sequence")
    return page_table.shape[0], page_table.shape[1]


def _table_too_narrow(seq_len: int, lanes: int, page_size: int) -> str:
    need = -(-seq_len // page_size)
    return f"seq_len {seq_len} needs {need} pages of {page_size} tokens, page_table has {lanes} columns; pass at least {need} columns"


def _own_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
