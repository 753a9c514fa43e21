"""Engine configuration: frozen dataclasses, every field with its unit and default; knows no tensor and no model."""

import math
import os
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from typing import Any

from atoll.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_FORMAT_OPTIONS = ("auto", "fp32", "bf16", "fp16", "fp8_tensor", "fp8_token")  # "auto" and atoll.ops.quant.formats.KV_FORMATS, without its torch
KV_FILLS = ("zero", "nan", "0x7f", "inf", "max", "random")  # atoll.kv.FILLS, without its torch
CHECKPOINT_POLICIES = ("ladder", "prompt", "demand", "end")  # atoll.engine.placement says what each is
MAX_PAGE_SIZE = 1024  # tokens; as in atoll.ops.attention.spec
TOOL_CALL_PARSERS = ("auto", "qwen_json", "qwen_xml")  # "auto" and atoll.server.tool_formats.TOOL_FORMATS, without its torch
LOG_LEVELS = ("debug", "info", "warning", "error")
GUARDS = ("auto", "on", "off")
PREFILL_GRID = 64  # tokens; the chunk of the gated delta rule, so that one grid fits every layer


@dataclass(frozen=True)
class EngineConfig:
    """What a user may choose. "auto" and None are settled when the model and the device are known (atoll.engine.build)."""

    device: str = "auto"  # auto: cuda where torch sees a GPU, else cpu; "cuda:1" names one
    dtype: str = "auto"  # of weights and activations; auto: bfloat16 where the device computes in it, else float32
    page_size: int = 16  # tokens
    kv_format: str = "auto"  # auto: bf16
    num_pages: int | None = None  # pages, the null page included; None: from kv_memory_bytes
    # Bytes of pages alone; a hybrid model's state slots come on top. None: as many as max_num_seqs full sequences need, within a share of the device's memory
    # from which the slots have been taken.
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None  # tokens of one sequence, prompt and output; None: the model's limit, or the pool's where that is lower
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    kv_fill: str = "zero"  # the bytes of pages and state slots at start; nan and random show whether anything reads a row that no sequence owns
    # auto: the first of atoll.ops.attention.plan.BACKENDS that takes the spec; or one of them, or of NAMED_BACKENDS, by name
    attention_backend: str = "auto"
    guard: str = "auto"  # zero released pages before they are read again; auto: on where the attention backend does not mask unowned rows
    cuda_graphs: bool = True  # replay steps that only decode; no effect on cpu
    prefix_caching: bool = True  # keep the pages, and for a hybrid model the states, of prefixes for requests that begin alike
    # Tokens between the ladder's checkpoints, a multiple of page_size, rounded up to the prefill grid; 0: no checkpoints at all, so no reuse for a
    # hybrid model; -1: no ladder; None: as many as the rows that fill an image's pages, so that a ladder takes no more room than the rows it stands
    # on, and 1024 at least.
    state_checkpoint_interval_tokens: int | None = None
    checkpoint_policy: str = "all"  # where states are kept: all, or some of CHECKPOINT_POLICIES, comma-separated
    seed: int = 0  # for requests without a seed of their own
    # Tiers that keep pages and states that have left the pool, as atoll.offload.options reads them: "host:8GiB,disk:PATH:100GiB"; None: none
    offload: str | None = None
    offload_timeout_s: float = 30.0  # seconds that a request waits for what a tier brings, before it computes it, and that anything waits for a transfer

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choice("device", str(self.device).partition(":")[0], DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_format", self.kv_format, KV_FORMAT_OPTIONS)
        _check_choice("kv_fill", self.kv_fill, KV_FILLS)
        _check_choice("guard", self.guard, GUARDS)
        _check_page_size(self.page_size)
        for name, low in (("num_pages", 2), ("kv_memory_bytes", 1), ("max_model_len", 2), ("max_num_seqs", 1), ("max_num_batched_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                why = " (one page is never allocated, so that 2 hold one page of tokens)" if name == "num_pages" else ""
                remedy = "" if name.startswith("max_num") else ", or leave it out to have it chosen"
                raise ConfigError(f"{name} {value} is below {low}{why}; give {low} or more{remedy}")
        if self.num_pages is not None and self.kv_memory_bytes is not None:
            raise ConfigError(f"num_pages {self.num_pages} and kv_memory_bytes {self.kv_memory_bytes} are both given; give one of them")
        _check_step_budget(self.max_num_batched_tokens, self.max_num_seqs, PREFILL_GRID)
        interval = self.state_checkpoint_interval_tokens
        if interval is not None and interval < -1:
            raise ConfigError(f"state_checkpoint_interval_tokens {interval} is below -1; give a number of tokens, 0 for no checkpoints, or -1 for no ladder")
        if interval is not None and interval > 0 and interval % self.page_size:
            above = (interval // self.page_size + 1) * self.page_size
            raise ConfigError(f"state_checkpoint_interval_tokens {interval} is not a multiple of page_size {self.page_size}; use for example {above}")
        checkpoint_policies(self.checkpoint_policy)
        _check_offload(self)


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler must know, all of it settled."""

    page_size: int  # tokens
    max_model_len: int  # tokens of one sequence, prompt and output; the pool holds at least one such sequence
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    prefill_grid: int = PREFILL_GRID  # tokens; a chunk ends on a multiple of it, unless it ends the sequence
    prefix_caching: bool = False
    image_pages: int = 0  # pages of one checkpoint; 0: the model keeps no state, or no checkpoint of it
    checkpoint_interval: int = -1  # tokens between the ladder's checkpoints, a multiple of checkpoint_grid; -1: no ladder
    checkpoint_policies: frozenset[str] = frozenset(CHECKPOINT_POLICIES)
    offload_timeout_s: float = 30.0  # that a request waits for a load before it computes instead, and that anything waits for a transfer

    def __post_init__(self) -> None:
        _check_step_budget(self.max_num_batched_tokens, self.max_num_seqs, self.prefill_grid)

    @property
    def checkpoint_grid(self) -> int:
        """Tokens: a checkpoint stands on whole pages and on the prefill grid."""
        return math.lcm(self.page_size, self.prefill_grid)


@dataclass(frozen=True)
class ServerConfig:
    """What a server allows its clients, and where it listens."""

    host: str = "127.0.0.1"  # whoever can reach it can use it, unless there is a key
    port: int = 8000  # 0: a free one
    # Asked of every request but /health and the page's own files, as "Authorization: Bearer KEY". None: of nobody. Not in logs.
    api_key: str | None = dataclass_field(default_factory=lambda: os.environ.get("ATOLL_API_KEY") or None, repr=False)
    max_queued: int = 1024  # sequences accepted beyond those that fit in a step; more are refused with 429
    max_n: int = 16  # sequences for one prompt
    max_body_bytes: int = 16 * 2**20  # of a request
    shutdown_s: float = 30.0  # seconds that running requests have to finish after SIGTERM
    num_text_threads: int = 2  # threads that tokenize and fill in chat templates
    tool_call_parser: str = "auto"  # how the model spells calls of functions; auto: as its chat template does
    log_level: str = "warning"  # info: a line per request

    def __post_init__(self) -> None:
        for name, low, high in (("port", 0, 65535), ("max_queued", 0, None), ("max_n", 1, None), ("max_body_bytes", 1, None), ("num_text_threads", 1, 64)):
            value = getattr(self, name)
            if type(value) is not int or value < low or (high is not None and value > high):
                raise ConfigError(f"{name} {value!r} is no integer from {low}{'' if high is None else f' to {high}'}; give one in that range")
        if not math.isfinite(self.shutdown_s) or self.shutdown_s < 0:
            raise ConfigError(f"shutdown_s {self.shutdown_s} is not a number of seconds from 0; give for example 30")
        _check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip() == self.api_key and self.api_key):
            raise ConfigError("the API key is empty, or holds spaces around it or characters that a header cannot carry; give one of printable ASCII")


def make_engine_config(options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword options. Raises ConfigError for an unknown name."""
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"option {name!r} is unknown; use one of {', '.join(known)}")
    return EngineConfig(**options)


def checkpoint_policies(given: str) -> frozenset[str]:
    """The policies that an option names. Raises ConfigError for one that is unknown."""
    names = CHECKPOINT_POLICIES if given == "all" else tuple(name.strip() for name in str(given).split(","))
    for name in names:
        if name not in CHECKPOINT_POLICIES:
            raise ConfigError(f"checkpoint_policy {name!r} is unknown; use all, or some of {', '.join(CHECKPOINT_POLICIES)}, comma-separated")
    return frozenset(names)


def _check_types(config: EngineConfig) -> None:
    """A number as text, or 16.0, would fail much later, in the middle of a tensor's making; "no" would count as true."""
    for field in fields(config):
        value = getattr(config, field.name)
        if type(field.default) is bool and type(value) is not bool:
            raise ConfigError(f"{field.name} {value!r} is a {type(value).__name__}, not a bool; give True or False")
        optional = field.default is None
        if field.type == str | None:
            continue
        if (optional or type(field.default) is int) and type(value) is not int and not (optional and value is None):
            raise ConfigError(f"{field.name} {value!r} is a {type(value).__name__}, not an integer; give an int{' or None' if optional else ''}")


def _check_offload(config: EngineConfig) -> None:
    """Types and ranges alone; atoll.offload.options knows the tiers."""
    offload, timeout_s = config.offload, config.offload_timeout_s
    if offload is not None and (not isinstance(offload, str) or not offload.strip()):
        raise ConfigError(f"offload {offload!r} names no tier; give for example host:8GiB, or leave it out")
    if type(timeout_s) not in (int, float) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"offload_timeout_s {timeout_s!r} is not a number of seconds above 0; give for example 30")
    if offload is not None and not config.prefix_caching:
        raise ConfigError(f"offload {offload!r} is given and prefix_caching is off, through which pages come back; leave out one of the two")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is unknown; use one of {', '.join(choices)}")


def _check_page_size(page_size: int) -> None:
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ConfigError(f"page_size {page_size} is outside 1 to {MAX_PAGE_SIZE}; use a power of two in that range, such as 16")
    if page_size & (page_size - 1):
        below = 1 << (page_size.bit_length() - 1)
        raise ConfigError(f"page_size {page_size} is not a power of two; use {below} or {2 * below}")


def _check_step_budget(max_num_batched_tokens: int, max_num_seqs: int, prefill_grid: int) -> None:
    """A full set of decoding sequences must leave room for one chunk of a prompt, or that prompt would starve."""
    need = max_num_seqs - 1 + prefill_grid
    if max_num_batched_tokens < need:
        raise ConfigError(
            f"max_num_batched_tokens {max_num_batched_tokens} is below {need} (max_num_seqs {max_num_seqs} - 1 decoding, "
            f"and one prefill chunk of {prefill_grid}); raise it to {need} or lower max_num_seqs"
        )
