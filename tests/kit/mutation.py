"""Mutated copies of a module's source: one protection taken out, loaded beside the true module."""

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import atoll.ops.attention
from atoll.ops.attention import DecodeConfig
from atoll.probe import BackendAdapter, Case, CaseReport, probe_case

OPS = Path(atoll.ops.attention.__file__).parent

_TAG = re.compile(r"\S.*# owned: ([a-z ]+)$")


@dataclass(frozen=True)
class Edit:
    """One replacement, in the line tagged `# owned: tag`, or anywhere once if there is no tag; `old` may go over several lines."""

    old: str
    new: str
    tag: str | None = None


def tags(file: str) -> set[str]:
    """Names of all protections tagged in a source file; a docstring that explains the tags has no code before them."""
    return {found.group(1) for line in (OPS / file).read_text().splitlines() if (found := _TAG.search(line)) and not line.startswith("Lines")}


def mutated_source(file: str, edits: Iterable[Edit]) -> str:
    """The source with the edits made; each must fit exactly one line, or one place if it goes over several."""
    lines = (OPS / file).read_text().splitlines(keepends=True)
    for edit in edits:
        mark = f"# owned: {edit.tag}\n" if edit.tag is not None else ""
        num = len(edit.old.splitlines())
        places = ["".join(lines[i : i + num]) for i in range(len(lines))]
        at = [i for i, place in enumerate(places) if edit.old in place and place.endswith(mark)]
        assert len(at) == 1, f"{file}: {edit} fits {len(at)} lines; adapt the table to the source"
        lines[at[0] : at[0] + num] = places[at[0]].replace(edit.old, edit.new).splitlines(keepends=True)
    return "".join(lines)


def load_source(source: str, path: Path) -> ModuleType:
    """Write source to a file, which Triton reads a kernel's text from when it first runs, and import it under a name of its own."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOMES = {"gluon_sm90": "gluon_decode_sm90.py", "triton": "triton_decode.py", "reference": "reference.py"}
# Lower ones first.
HOPPER_FILES = ("gluon_copies_sm90.py", "gluon_kernel_sm90.py", "gluon_balanced_sm90.py", "gluon_decode_sm90.py")


def mutated_backend(backend: str, file: str, edits: Iterable[Edit], directory: Path) -> ModuleType:
    """A copy of a backend's module in which `file` (the backend's own, or one below it) is mutated, and copies of all that use it are between."""
    copies = {file: load_source(mutated_source(file, edits), directory / f"mutated_{file}")}
    above = HOPPER_FILES[HOPPER_FILES.index(file) + 1 :] if file in HOPPER_FILES else {HOMES[backend]} - {file}
    for name in above:
        copies[name] = load_source((OPS / name).read_text(), directory / f"copied_{name}")
        for lower in [copy for copy in copies if copy != name]:
            _use(copies[name], copies[lower], f"atoll.ops.attention.{Path(lower).stem}")
    return copies[HOMES[backend]]


def _use(module: ModuleType, copy: ModuleType, original: str) -> None:
    """What the module has from the original, it has from its copy instead."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) == original:
            setattr(module, name, getattr(copy, name))


def probe_mutation(
    backend: str,
    file: str,
    edits: tuple[Edit, ...],
    case: Case,
    config: DecodeConfig | None,
    fills: tuple[str, ...],
    directory: Path,
    device: str = "cpu",
) -> CaseReport:
    """The probe of a backend with a mutated source; `directory` must outlive the call."""
    module = mutated_backend(backend, file, edits, directory)
    return probe_case(BackendAdapter(backend, config, module.decode), case, device=device, fills=fills)
