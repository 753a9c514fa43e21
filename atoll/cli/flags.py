"""Flags that several commands share, each declared once, and how a command takes a group of them as one parameter."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from atoll.config import EngineConfig


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer is to see it: where a parameter's type is a dataclass of flags, the flags stand in its place."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {name: parameter.annotation for name, parameter in signature.parameters.items() if is_dataclass(parameter.annotation)}
    parameters: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            hints = get_type_hints(groups[name], include_extras=True)
            parameters += [Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]) for field in fields(groups[name])]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        taken = {name: group(**{field.name: given.pop(field.name) for field in fields(group)}) for name, group in groups.items()}
        command(**given, **taken)

    del run.__wrapped__  # it has the other signature
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True)
class NumberFlags:
    """In which numbers an engine computes, and where."""

    kv_format: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, fp8_tensor, fp8_token.")] = EngineConfig.kv_format
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = EngineConfig.device
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = EngineConfig.dtype

    @property
    def options(self) -> dict[str, Any]:
        """As EngineConfig takes them."""
        return asdict(self)


@dataclass(frozen=True)
class EngineFlags(NumberFlags):
    """The flags of an engine, but its pool's fill and its seed, which commands name in their own ways."""

    page_size: Annotated[int, typer.Option(help="Tokens per page, a power of two.")] = EngineConfig.page_size
    num_pages: Annotated[int | None, typer.Option(help="Pages of the pool.", show_default="from the memory at hand")] = EngineConfig.num_pages
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together, at most.", show_default="what model and pool allow")] = (
        EngineConfig.max_model_len
    )
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = EngineConfig.max_num_seqs
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in one step.")] = EngineConfig.max_num_batched_tokens
    prefix_caching: Annotated[bool, typer.Option(help="Reuse what prompts have in common.")] = EngineConfig.prefix_caching
    state_checkpoint_interval_tokens: Annotated[
        int | None, typer.Option(help="Of a hybrid model: tokens between kept states; 0: keep none, -1: no ladder.", show_default="from the state's size")
    ] = EngineConfig.state_checkpoint_interval_tokens
    checkpoint_policy: Annotated[str, typer.Option(help="Where states are kept: all, or some of ladder,prompt,demand,end.")] = EngineConfig.checkpoint_policy
    attention_backend: Annotated[str, typer.Option(help="auto, gluon_sm90, triton, reference, flashinfer_xqa, flashinfer_tensor_cores, leaky.")] = (
        EngineConfig.attention_backend
    )
    guard: Annotated[str, typer.Option(help="Zero released pages: on, off, or auto, which is on where attention does not mask unowned rows.")] = (
        EngineConfig.guard
    )
    offload: Annotated[
        str | None,
        typer.Option(help="Where pages go that leave the pool: host:8GiB, disk:PATH:100GiB, or both, comma-separated.", show_default="nowhere"),
    ] = EngineConfig.offload
    offload_timeout_s: Annotated[
        float, typer.Option(help="Seconds that a request waits for its pages to come back, then computes them; nothing waits longer for a transfer.")
    ] = EngineConfig.offload_timeout_s
