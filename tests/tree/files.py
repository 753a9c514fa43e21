"""Finds and parses the files that the house rules speak of."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One Python file: its path from the repository's root, its text, its tree."""

    path: str
    source: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def name(self) -> str:
        """The dotted name; a package's is that of its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def first_line(self) -> str:
        """The first line of the docstring, empty without one."""
        return (ast.get_docstring(self.tree, clean=False) or "").partition("\n")[0]


def read_modules(*folders: str, root: Path = ROOT) -> list[Module]:
    """Every Python file under the folders, packages before their modules."""
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    paths.sort(key=lambda path: (path.parent.as_posix(), path.name != "__init__.py", path.name))
    return [Module(path.relative_to(root).as_posix(), path.read_text()) for path in paths]
