"""The house rules: each a function from modules to the faults found in them, empty when all is well."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from tests.tree.files import Module

MAX_LINES = 400
# A kernel may be longer: its one loop is read as a whole. Nothing else is listed here.
LONG_FILES = ("atoll/ops/attention/gluon_kernel_sm90.py", "atoll/ops/attention/triton_decode.py")

# Low to high: a part imports its own and lower ones only. What stands on one line may not import its neighbours there.
PART_ORDER: tuple[tuple[str, ...], ...] = (
    ("atoll.errors", "atoll.lazy"),
    ("atoll.config",),
    ("atoll.ops",),
    ("atoll.kv",),
    ("atoll.offload",),
    ("atoll.models",),
    ("atoll.engine",),
    ("atoll.server",),
    ("atoll.eval",),
    ("atoll.probe",),
    ("atoll.bench",),
    ("atoll",),
    ("atoll.cli",),
    ("atoll.__main__",),
)

# Pure parts: they run, and are tested, without torch.
NO_TORCH = (
    "atoll.errors",
    "atoll.lazy",
    "atoll.config",
    "atoll.kv.guard",
    "atoll.offload.base",
    "atoll.offload.connector",
    "atoll.offload.in_flight",
    "atoll.offload.suspicion",
    "atoll.offload.lru",
    "atoll.offload.moves",
    "atoll.offload.options",
    "atoll.kv.ledger",
    "atoll.kv.page_map",
    "atoll.kv.slot_ledger",
    "atoll.kv.eviction",
    "atoll.kv.checkpoint",
    "atoll.kv.prefix_tree",
    "atoll.kv.prefix_stats",
    "atoll.kv.prefix_match",
    "atoll.kv.prefix",
    "atoll.engine.constraint",
    "atoll.engine.sampling",
    "atoll.engine.request",
    "atoll.engine.step",
    "atoll.engine.placement",
    "atoll.engine.offloader",
    "atoll.engine.reuse",
    "atoll.engine.scheduler",
)

ENVIRONMENT_READER = "atoll/config.py"

# Another word is in use for each of these; others' interfaces keep theirs.
FOREIGN_WORDS = re.compile(r"block[_ -]?tables?\b|context_lens?\b|\bslot_mapping\b", re.IGNORECASE)
UNFINISHED_WORDS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_faults(modules: Iterable[Module]) -> list[str]:
    """The first docstring line says in one sentence what the module is."""
    return [f"{m.path}: first docstring line {m.first_line!r} is not a sentence" for m in modules if not re.fullmatch(r"[\w`].{15,}[.:]", m.first_line)]


def length_faults(modules: Iterable[Module], allowed: Iterable[str] = LONG_FILES) -> list[str]:
    """No file is longer than MAX_LINES, and none is excused without need."""
    lines = {m.path: len(m.source.splitlines()) for m in modules}
    long = [f"{path}: {n} lines, the limit is {MAX_LINES}; split it" for path, n in lines.items() if n > MAX_LINES and path not in allowed]
    idle = [f"{path}: excused from the length limit without need" for path in allowed if lines.get(path, 0) <= MAX_LINES]
    return long + idle


def name_faults(modules: Iterable[Module]) -> list[str]:
    """No module shadows the name of the library that it uses."""
    return [f"{m.path}: a module called triton.py hides the library" for m in modules if m.path.endswith("/triton.py")]


def import_faults(modules: Iterable[Module]) -> list[str]:
    """A lower part never imports a higher one, inside functions included."""
    faults = []
    for module in modules:
        own_rank, own_part = part_of(module.name)
        for line, target in imported_names(module):
            if target.split(".")[0] != "atoll":
                continue
            rank, part = part_of(target)
            if rank > own_rank or (rank == own_rank and part != own_part):
                faults.append(f"{module.path}:{line}: {own_part} imports {part}, which is not below it")
    return faults


def part_of(name: str) -> tuple[int, str]:
    """Rank and name of the part that a dotted name lies in. Names in `atoll` itself, such as `atoll.LLM`, are above all parts but the commands."""
    for rank, parts in enumerate(PART_ORDER):
        for part in parts:
            if name == part or (part != "atoll" and name.startswith(part + ".")):
                return rank, part
    if re.fullmatch(r"atoll\.(__version__|[A-Z]\w*)", name):
        return part_of("atoll")
    raise ValueError(f"{name} lies in no part; add its part to PART_ORDER")


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported: `from a import b` gives `a.b`. Strings like `"atoll.x:y"` count: they name lazy imports."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"atoll(\.\w+)+(:\w+)?", node.value):
            yield node.lineno, node.value.replace(":", ".")


def torch_faults(modules: Iterable[Module], pure: Iterable[str] = NO_TORCH) -> list[str]:
    """The pure parts import no torch, and nothing of Atoll that does: only other pure parts."""
    pure = tuple(pure)
    faults = []
    for module in modules:
        if module.name not in pure:
            continue
        for line, target in imported_names(module):
            top = target.split(".")[0]
            if top in ("torch", "triton", "numpy", "transformers") or (top == "atoll" and not any(target == p or target.startswith(p + ".") for p in pure)):
                faults.append(f"{module.path}:{line}: a pure part imports {target}")
    return faults


def all_faults(modules: Iterable[Module]) -> list[str]:
    """A package's `__all__` is exactly its public names, in order."""
    faults = []
    for module in modules:
        if not module.is_package:
            continue
        declared, names = declared_all(module), public_names(module)
        if declared is None:
            if names:
                faults.append(f"{module.path}: has the names {sorted(names)} but no __all__")
        elif set(declared) - {"__version__"} != names:
            faults.append(f"{module.path}: __all__ and the public names differ in {sorted((set(declared) - {'__version__'}) ^ names)}")
    return faults


def declared_all(module: Module) -> list[str] | None:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def public_names(module: Module) -> set[str]:
    """What the module's top level binds without an underscore. Of imports, only Atoll's own that the module itself does not use."""
    names: set[str] = set()
    used = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used -= set(declared_all(module) or [])
    for node in top_level(module.tree.body):
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "atoll"):
            names |= {alias.asname or alias.name for alias in node.names} - used
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under a top-level `if` (TYPE_CHECKING) included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from top_level(node.body + node.orelse)
        else:
            yield node


def environment_faults(modules: Iterable[Module]) -> list[str]:
    """Only config.py reads the environment."""
    faults = []
    for module in modules:
        if module.path == ENVIRONMENT_READER:
            continue
        for node in ast.walk(module.tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name) and node.value.id == "os"
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in ("environ", "getenv") for a in node.names)
            if attribute or imported:
                faults.append(f"{module.path}:{node.lineno}: reads the environment; make it a field of {ENVIRONMENT_READER}")
    return faults


def word_faults(texts: Mapping[str, str], pattern: re.Pattern[str], excused: Iterable[str] = ()) -> list[str]:
    """No line holds a word that the pattern names, but in files whose path starts with one that is excused."""
    return [
        f"{path}:{number}: {match.group()!r} is not a word of this project"
        for path, text in texts.items()
        if not path.startswith(tuple(excused))
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]
