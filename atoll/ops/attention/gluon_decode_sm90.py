"""Decode attention for Hopper in Gluon: what it takes, its tuning and its launch; the kernel is in `gluon_kernel_sm90`.

A cache whose strides the copies' engine does not take (TMA: every stride a multiple of 16 bytes) goes to the Triton kernel, launch by launch, in plans that
"auto" made; in a plan that asked for this backend by name it is an error.

Source: as triton_decode.py.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atoll.errors import BackendError
from atoll.ops.attention import triton_decode
from atoll.ops.attention.combine import combine, has_dependent_launch, launch_options
from atoll.ops.attention.costs import kv_row_bytes
from atoll.ops.attention.gluon_balanced_sm90 import decode_balanced_kernel
from atoll.ops.attention.gluon_kernel_sm90 import decode_hopper_kernel
from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan, make_workspace, num_sms
from atoll.ops.attention.spec import DecodeSpec, PagedKV
from atoll.ops.quant.formats import is_fp8, storage_dtype

MASKS_UNOWNED = True
GRAPH_SAFE = True
COVERS_ALL = False  # what it refuses, "auto" gives to the next backend

HEAD_DIMS = (64, 128, 256)
MIN_PAGE_SIZE = 16
# More rows, or more of the accumulators, spill (ahead-of-time builds, tests/ops/test_build.py).
MAX_ROWS = 64
MAX_QUERY_VALUES = 32 * 256
# q stays in registers, in each warp whole, up to so many rows; more are multiplied from shared memory by a whole warpgroup (wgmma), whose 64 rows half of the
# head dimension must fill: below that too, 32 rows stay in registers.
MAX_REGISTER_ROWS = 16
MIN_WGMMA_HEAD_DIM = 128
MAX_NARROW_ROWS = 32
# TMA copies a tile of so many pages at most: it takes 1 to 10 % less time than the lanes where a tile is one page, and for each page all warps meet.
MAX_BULK_PAGES = 2
# What a thread may take. Shared memory, and not registers, is what decides how many programs a multiprocessor holds; left alone, the compiler may stop at 96
# (bf16, page 128, 16 x 1024 in 8.5 us, 7.7 with 128).
MAX_REGISTERS = 255
# Lengths that a program of the balanced kernel holds in registers.
MAX_BALANCED_BATCH = 1024
_TMA_ALIGN_BYTES = 16
_MAX_PAGE_ELEMENTS = 2**31 - 1  # a lane counts them in 32 bits
_L2_BYTES = 50 << 20


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Why this backend cannot run `spec` on `device`, or None if it can."""
    if not runs_on(device):
        return f"device {device} is not an NVIDIA GPU of compute capability 9.0"
    return refusal(spec)


def runs_on(device: torch.device) -> bool:
    """Whether a launch for tensors on `device` runs; the probe's interpreter, where it stands in for the GPU, replaces this."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def refusal(spec: DecodeSpec) -> str | None:
    """Why this backend cannot run `spec` on any device."""
    if spec.kv_format == "fp32":
        return "kv_format 'fp32' has no tensor-core path"
    if not is_fp8(spec.kv_format) and spec.q_dtype != storage_dtype(spec.kv_format):
        return f"q_dtype {spec.q_dtype} differs from kv_format {spec.kv_format!r}"
    if not is_fp8(spec.kv_format) and spec.head_dim < 128:
        return f"head_dim {spec.head_dim} of kv_format {spec.kv_format!r} is below 128, whose halves are whole panels of swizzled memory"
    if spec.v_layout != "plain":
        return f"v_layout {spec.v_layout!r} is not 'plain'"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if spec.page_size < MIN_PAGE_SIZE:
        return f"page_size {spec.page_size} is below {MIN_PAGE_SIZE}"
    if not is_fp8(spec.kv_format) and row_blocks(spec) > 1:
        return f"{spec.query_len * spec.group_size} query rows of {spec.head_dim} are too many for a program's registers, and 16-bit pages are not read twice"
    return None


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """Tuning for one batch shape: a pure function of its arguments. Measured on an H200 with D 256, HKV 2, GQA 8, page 64 (LOG.md, 2026-11-30)."""
    # 1 x 65536 of bf16 in 35.6 us, 36.4 without; where L2 held the rows already 0.2 us more (16 x 1024 of fp8 7.9 us, 7.8 without).
    num_rows = min(shape.max_seq_len, spec.window + spec.query_len) if spec.window is not None else shape.max_seq_len
    prefetch = shape.batch * num_rows * kv_row_bytes(spec) > _L2_BYTES
    return replace(_tiles_and_splits(spec, shape), prefetch=prefetch)


def _tiles_and_splits(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    if spec.batch_invariant:
        # A fixed share per program, and two splits at least, as in triton_decode.
        return DecodeConfig(64, max(2, -(-triton_decode.max_tiles(spec, shape, 64) // 16)), 16, 4, 3)
    if _prefers_half_tiles(spec, shape):
        return DecodeConfig(32, 1, 0, 2, 3)
    if spec.head_dim * (1 if is_fp8(spec.kv_format) else 2) > 256:
        # Rows of 512 bytes: three tiles of 64 fill an SM's shared memory, and are no slower than smaller ones for two programs (1 x 65536 37.0 us, 40.1).
        return DecodeConfig(64, triton_decode.choose_num_splits(spec, shape, 64, shape.num_sms // row_blocks(spec)), 0, 4, 3)
    programs = max(1, shape.batch * spec.num_kv_heads * row_blocks(spec))
    tiles_per_sm = programs * triton_decode.max_tiles(spec, shape, 64) / shape.num_sms
    if 0.9 * shape.num_sms <= programs <= shape.num_sms:
        # One program an SM takes a whole sequence, and nothing is merged.
        if _shares_long_tiles(spec, tiles_per_sm):
            return DecodeConfig(128, 1, 0, 8, 3)
        if _has_usual_heads(spec) and spec.page_size >= 32:
            # 64 x 1024 in 17.0 us, 17.3 on tiles of 128; 64 x 4096 62.4, 64.6; 64 x 16384 236, 241, and 238 in two splits.
            return DecodeConfig(64, 1, 0, 4, 3)
    if spec.head_dim == 64 and is_fp8(spec.kv_format) and block_rows(spec) <= MAX_REGISTER_ROWS and tiles_per_sm > 16:
        # 32 rows of V's pairs are those of two warps: 64 x 4096 with 8 KV heads in 65.2 us, 74.3 with four warps of which two compute the same twice. Of more
        # query rows two warps spill.
        return DecodeConfig(64, triton_decode.choose_num_splits(spec, shape, 64, 4 * shape.num_sms), 0, 2, 3)
    # Two programs an SM hide each other's barriers (256 x 16384 in 956 us, 968 for one; 16 x 65536 239.2, 239.9), but twice the splits cost more to merge where
    # each has few tiles: 1 x 65536 in 20.2 us for one, 21.6 for two; 16 x 1024 6.4, 7.0; of fp8_tensor and larger pages 16 x 16384 64.2 to 64.4 and 64.8 to
    # 65.1, of page 16 68.1 and 67.4.
    few = 64 if spec.kv_format == "fp8_tensor" and spec.page_size >= 32 and _has_usual_heads(spec) else 16
    slots = (2 if tiles_per_sm > few else 1) * shape.num_sms // row_blocks(spec)
    return DecodeConfig(64, triton_decode.choose_num_splits(spec, shape, 64, slots), 0, 4, 3)


def _has_usual_heads(spec: DecodeSpec) -> bool:
    """Those of the models that were measured, without drafts."""
    return spec.head_dim == 256 and block_rows(spec) == 8


def _prefers_half_tiles(spec: DecodeSpec, shape: BatchShape) -> bool:
    """Whether programs of two warps are quicker, each on half a tile, which take half the shared memory: programs of the next call find room beside them."""
    if not _has_usual_heads(spec):
        return False
    programs = shape.batch * spec.num_kv_heads
    num_tiles = triton_decode.max_tiles(spec, shape, 64)
    if is_fp8(spec.kv_format):
        # 256 x 1024 in 60.0 us, 61.5; 256 x 4096 in 237.1 and 236.4; with one KV head, 256 programs, 256 x 16384 of large pages in 483.7 and 490.6.
        if num_tiles <= 16:
            return programs > 2 * shape.num_sms
        return spec.page_size >= 64 and 1.5 * shape.num_sms < programs <= 2 * shape.num_sms
    # 64 x 4096 in 118.3 us, 119.3; 256 x 1024 111.2, 114.4; but up to 23 % more where sequences are split.
    return 0.9 * shape.num_sms <= programs and (programs <= shape.num_sms or num_tiles <= 64)


def _shares_long_tiles(spec: DecodeSpec, tiles_per_sm: float) -> bool:
    """Whether eight warps on tiles of 128 are as quick as two programs of four on tiles of 64."""
    if uses_wgmma(spec):
        # Four drafts 64 x 1024 in 24.1 us, 24.7 for two programs; 64 x 4096 74.9, 76.3, but with a scale per token 85.7, 78.9; 64 x 16384 301, 260.
        return spec.head_dim == 256 and tiles_per_sm <= (64 if spec.kv_format == "fp8_tensor" and spec.page_size >= 32 else 16)
    # Page 16: 64 x 4096 in 65.8 us, 66.7; 64 x 16384 247, 242.
    return block_rows(spec) == 8 and (tiles_per_sm <= 64 if spec.page_size < 32 else spec.head_dim < 256)


def candidates(spec: DecodeSpec, shape: BatchShape) -> list[DecodeConfig]:
    """Tunings that may beat `config`'s at a batch shape, for `bench decode --tune`: prefetching or not, other splits, one balanced launch, and the last
    two in each tiling too.
    """
    base = config(spec, shape)
    found = [replace(base, prefetch=not base.prefetch)]
    for usual in _tilings(spec, base):
        tiles = max(1, shape.batch * spec.num_kv_heads * row_blocks(spec)) * triton_decode.max_tiles(spec, shape, usual.tile)
        slots = [int(shape.num_sms * waves) for waves in (0.25, 0.5, 1, 2, *((4,) if usual.tile < 64 else ()))]
        splits = {triton_decode.choose_num_splits(spec, shape, usual.tile, n) for n in slots}
        programs = {min(n, tiles) for n in slots} if can_balance(spec, shape.batch) and not uses_wgmma(spec) else set()
        found += [replace(usual, num_splits=n) for n in sorted(splits)]
        found += [one_launch(spec, usual, n) for n in sorted(programs)]
    return found


def _tilings(spec: DecodeSpec, base: DecodeConfig) -> list[DecodeConfig]:
    """`base`, and with the tiles, warps and stages that may be better than its own."""
    found = [base]
    if not spec.batch_invariant:
        found.append(replace(base, tile=64, num_warps=4, num_stages=3))
        if block_rows(spec) == 8:
            # Half a tile starts sooner, and two warps of one are half as long at their meetings.
            found += [replace(base, tile=32, num_warps=2, num_stages=stages) for stages in (3, 4)]
    if is_fp8(spec.kv_format) and spec.head_dim == 256:
        # Eight warps share a tile twice as long, if half of the head dimension fills them.
        found.append(replace(base, tile=128, num_warps=8, num_stages=3))
    return found


def one_launch(spec: DecodeSpec, usual: DecodeConfig, num_programs: int) -> DecodeConfig:
    """A tuning of the split kernel for the balanced one, whose loop over segments takes more registers than the compiler finds by itself (Triton 3.7)."""
    roomy = usual.num_warps <= 4 and is_fp8(spec.kv_format) and block_rows(spec) * spec.head_dim <= 8 * 256
    return replace(usual, num_splits=1, num_programs=num_programs, prefetch=False, max_registers=224 if roomy else None)


def can_balance(spec: DecodeSpec, batch: int) -> bool:
    """Whether the balanced kernel takes a batch: a sequence's splits depend on the others', and every program reads all lengths at once."""
    return not spec.batch_invariant and batch <= MAX_BALANCED_BATCH


def uses_wgmma(spec: DecodeSpec) -> bool:
    """Whether a warpgroup multiplies, q and P in shared memory, and not each warp by itself, both in its registers."""
    return spec.query_len * spec.group_size > MAX_REGISTER_ROWS and spec.head_dim >= MIN_WGMMA_HEAD_DIM


def _shares_memory(spec: DecodeSpec, cfg: DecodeConfig, batch: int, device: torch.device) -> bool:
    """Whether scales of tokens in shared memory would keep a call's second program off a multiprocessor.

    Four drafts, page 16: 256 x 16384 in 1421 us with them there and 1249 without, but 1 x 65536, one program each, in 30.5 and 38.1.
    """
    return uses_wgmma(spec) and spec.head_dim == 256 and cfg.tile == 64 and not has_sm_each(spec, cfg, batch, device)


def has_sm_each(spec: DecodeSpec, cfg: DecodeConfig, batch: int, device: torch.device) -> bool:
    """Whether there is a multiprocessor for each of a call's programs: the kernel is compiled apart for that."""
    return (cfg.num_programs or batch * spec.num_kv_heads * row_blocks(spec) * cfg.num_splits) <= num_sms(device)


def block_rows(spec: DecodeSpec) -> int:
    """Query rows of a program: those of a KV head, padded to the columns of a multiply, up to the most that do not spill."""
    most = min(MAX_ROWS, MAX_QUERY_VALUES // spec.head_dim) if uses_wgmma(spec) else MAX_NARROW_ROWS
    return min(most, max(8, triton.next_power_of_2(spec.query_len * spec.group_size)))


def row_blocks(spec: DecodeSpec) -> int:
    """Programs that share out a KV head's query rows, and each read all its tiles."""
    return -(-spec.query_len * spec.group_size // block_rows(spec))


def cache_refusal(kv: PagedKV) -> str | None:
    """Why the copies' engine cannot read these pages, or None if it can."""
    for name, pages in (("k", kv.k), ("v", kv.v)):
        if pages.data_ptr() % _TMA_ALIGN_BYTES or any(stride * pages.element_size() % _TMA_ALIGN_BYTES for stride in pages.stride()[:-1]):
            return f"{name} pages of strides {pages.stride()} do not lie on multiples of {_TMA_ALIGN_BYTES} bytes"
        if pages.shape[2] * pages.stride(2) > _MAX_PAGE_ELEMENTS:
            return f"the rows of a page in {name} pages of strides {pages.stride()} lie over more than {_MAX_PAGE_ELEMENTS} elements"
        if prod(pages.shape) == 0:
            return f"{name} pages of shape {tuple(pages.shape)} are empty"
    return None


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Launch the balanced kernel, or the split kernel and, where there is more than one split, the combine kernel."""
    spec, cfg = plan.spec, plan.config
    descriptors = _descriptors(kv, min(cfg.tile, spec.page_size))
    if isinstance(descriptors, str):
        if plan.by_name:
            raise BackendError(f"gluon_sm90 cannot read this cache: {descriptors}; align its rows and pages, or make the plan with backend='auto'")
        triton_decode.decode(q, kv, _portable(plan), out, lse, sinks)
        return
    cache = _cache_words(kv)
    per_token = spec.kv_format == "fp8_token"
    inputs = (
        q,
        *descriptors,
        kv.k_scale,
        kv.v_scale,
        sinks,
        plan.seq_lens,
        plan.page_table,
        spec.scale,
        spec.soft_cap or 1.0,
        spec.window or 0,
        spec.query_len,
    )
    strides = (
        *q.stride()[:3],
        *out.stride()[:3],
        *lse.stride(),
        *(kv.k_scale.stride() if per_token and kv.k_scale is not None else (0, 0, 0)),
        *(kv.v_scale.stride() if per_token and kv.v_scale is not None else (0, 0, 0)),
        plan.page_table.stride(0),
    )
    variant = {
        "GROUP": spec.group_size,
        "M": block_rows(spec),
        "ROW_BLOCKS": row_blocks(spec),
        "D": spec.head_dim,
        "TILE": cfg.tile,
        "S": spec.page_size,
        "K_ROW": 2 * cache.k.stride(2),
        "V_ROW": 2 * cache.v.stride(2),
        "FP8": is_fp8(spec.kv_format),
        "PER_TOKEN": per_token,
        "SCALES": per_token and not _shares_memory(spec, cfg, plan.batch, q.device),
        "CAUSAL": spec.causal,
        "WINDOW": spec.window is not None,
        "SOFT_CAP": spec.soft_cap is not None,
        "SINKS": spec.sinks,
        "PARTLY": triton.next_power_of_2(spec.query_len - 1),
        "MASK_KV": spec.mask_unowned_kv,
        "STAGES": cfg.num_stages,
        "NUM_WARPS": cfg.num_warps,
        "WGMMA": uses_wgmma(spec),
        "BULK": cfg.tile <= MAX_BULK_PAGES * spec.page_size,
        "PDL": has_dependent_launch(q.device),
        "num_warps": cfg.num_warps,
        **launch_options(q.device, cfg.max_registers or MAX_REGISTERS),
    }
    if cfg.num_programs:
        decode_balanced_kernel[(cfg.num_programs,)](
            out, lse, plan.partial_o, plan.partial_lse, plan.arrivals, *inputs, plan.batch, spec.num_kv_heads,
            cache.k, cache.v, *cache.k_strides, *cache.v_strides, *strides, BATCH=max(32, triton.next_power_of_2(plan.batch)), **variant,
        )  # fmt: skip
        return
    split = cfg.num_splits > 1
    # Else two of them may come to share a multiprocessor while another idles, where they find the room that the call before has left, and so the next call's:
    # fp8_token 16 x 1024 in 7.6 us, and in 8.2 to 9.0 with room for two.
    alone = split and has_sm_each(spec, cfg, plan.batch, q.device)
    grid = (spec.num_kv_heads * row_blocks(spec), plan.batch, cfg.num_splits)
    decode_hopper_kernel[grid](
        out, lse, plan.partial_o, plan.partial_lse, *inputs, cfg.num_splits, cfg.tiles_per_split,
        cache.k, cache.v, kv.num_pages, plan.page_table.shape[1], *cache.k_strides, *cache.v_strides, *strides,
        SPLIT=split, ALONE=alone, PREFETCH=cfg.prefetch and cache.dense and variant["PDL"], **variant,
    )  # fmt: skip
    if split:
        combine(out, lse, plan, sinks)


def _portable(plan: DecodePlan) -> DecodePlan:
    """The same work for the Triton kernel, with the plan's own splits and workspace, or with some made once for a plan of one launch."""
    if not plan.config.num_programs:
        # 3 stages of any tile here fit, and registers are its own.
        return replace(plan, config=replace(plan.config, num_stages=3, max_registers=None))
    if "portable" not in plan.prepared:
        device = plan.seq_lens.device
        config = triton_decode.config(plan.spec, BatchShape(plan.batch, plan.max_seq_len, num_sms(device)))
        # A dict of its own: in the plan's it would hold itself, and its workspace until the garbage collector comes by.
        plan.prepared["portable"] = replace(plan, config=config, prepared={}, **make_workspace(plan.spec, plan.batch, config, device))
    return plan.prepared["portable"]


class _CacheWords(NamedTuple):
    """K and V pages as int32, where the kernel reads them itself."""

    k: torch.Tensor  # [P, HKV, S, words of a row]
    v: torch.Tensor
    k_strides: tuple[int, ...]  # of a page and a head
    v_strides: tuple[int, ...]
    dense: bool  # the rows of a page and head lie one after another


def _cache_words(kv: PagedKV) -> _CacheWords:
    """Made once for a layer's cache."""
    if "gluon_sm90 words" not in kv.prepared:
        k, v = kv.k.view(torch.int32), kv.v.view(torch.int32)
        dense = all(pages.stride(2) == pages.shape[3] for pages in (k, v))
        kv.prepared["gluon_sm90 words"] = _CacheWords(k, v, k.stride()[:2], v.stride()[:2], dense)
    return kv.prepared["gluon_sm90 words"]


def _descriptors(kv: PagedKV, rows: int) -> tuple[TensorDescriptor, TensorDescriptor] | str:
    """How the copies' engine reads K and V, boxes of so many rows of one page and head; or why it cannot. Made once for a layer's cache."""
    key = ("gluon_sm90", rows)
    if key not in kv.prepared:
        reason = cache_refusal(kv)
        kv.prepared[key] = reason if reason is not None else (_descriptor(kv.k, rows), _descriptor(kv.v, rows))
    return kv.prepared[key]


def _descriptor(pages: torch.Tensor, rows: int) -> TensorDescriptor:
    """Pages [P, HKV, S, D], bytes as pairs [P, HKV, S, D / 2]; swizzled, so that matrix loads of either direction meet no bank twice."""
    pairs = pages.view(torch.int16) if pages.element_size() == 1 else pages
    width = pairs.shape[3]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=4)
    return TensorDescriptor(pairs, list(pairs.shape), list(pairs.stride()), [1, 1, rows, width], layout)
