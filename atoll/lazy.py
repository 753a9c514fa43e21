"""Names of a package that are imported on first use, so that whoever does not use them need not load torch."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def imported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562): each of the names comes from its module. Raises AttributeError for any other."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return find
