"""README, CONTRIBUTING and the scripts say what is so: the map, the dependencies, the links."""

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tree.files import ROOT, Module, read_modules
from tests.tree.readme_map import BEGIN, END, main, render_map, replace_map

PROSE = ("README.md", "CONTRIBUTING.md", "GLOSSARY.md", "LOG.md")
SCRIPTS = ("scripts/setup", "scripts/run", "scripts/test", "scripts/check", "scripts/fix", ".ci/run")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared_dependencies(pyproject: dict) -> set[str]:
    project = pyproject["project"]
    requirements = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    return {re.match(r"[\w.-]+", requirement).group() for requirement in requirements}


def explained_dependencies(contributing: str) -> set[str]:
    """The first column of the table under the heading Dependencies."""
    section = contributing.partition("## Dependencies\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([\w.-]+)` \| [^\s|]", section, re.MULTILINE))


def broken_links(name: str, text: str, root: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    return [f"{name}: {target}" for target in targets if "://" not in target and not (root / target).exists()]


def script_faults(paths: Iterable[Path]) -> list[str]:
    faults = []
    for path in paths:
        text = path.read_text()
        if not os.access(path, os.X_OK):
            faults.append(f"{path.name} is not executable")
        if not text.startswith("#!/usr/bin/env bash\n# ") or "\nset -euo pipefail\n" not in text:
            faults.append(f"{path.name} lacks the shell's line, its sentence or set -euo pipefail")
    return faults


def test_readme_map_is_current() -> None:
    readme = (ROOT / "README.md").read_text()
    assert replace_map(readme, render_map(read_modules("atoll"))) == readme, "scripts/fix makes the map anew"


def test_stale_map_is_found_and_mended(tmp_path: Path) -> None:
    (tmp_path / "atoll").mkdir()
    (tmp_path / "atoll" / "__init__.py").write_text('"""A package | of one."""\n')
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nstale\n{END}after\n")
    main(tmp_path)
    mended = (tmp_path / "README.md").read_text()
    assert mended.startswith("before\n")
    assert mended.endswith("after\n")
    assert "| **[atoll/](atoll/__init__.py)** | A package \\| of one. |" in mended
    assert "stale" not in mended
    assert replace_map(mended, render_map([Module("atoll/__init__.py", '"""Something else."""')])) != mended


def test_readme_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the line"):
        replace_map("no marks", "map")


def test_every_dependency_is_explained() -> None:
    assert explained_dependencies((ROOT / "CONTRIBUTING.md").read_text()) == declared_dependencies(PYPROJECT)


def test_unexplained_dependency_is_found() -> None:
    text = "## Dependencies\n| package | why |\n|---|---|\n| `numpy` | arrays |\n| `torch` | |\n\n## Next\n| `rich` | no |\n"
    assert explained_dependencies(text) == {"numpy"}
    assert declared_dependencies({"project": {"dependencies": ["a-b>=1"], "optional-dependencies": {"x": ["c; y == 'z'"]}}}) == {"a-b", "c"}


def test_links_lead_somewhere() -> None:
    assert [fault for name in PROSE for fault in broken_links(name, (ROOT / name).read_text(), ROOT)] == []


def test_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.md").touch()
    assert broken_links("a.md", "[x](here.md#part) [y](gone.md) [z](https://example.org/a)", tmp_path) == ["a.md: gone.md"]


def test_scripts_are_well_formed() -> None:
    assert script_faults(ROOT / name for name in SCRIPTS) == []


def test_malformed_script_is_found(tmp_path: Path) -> None:
    script = tmp_path / "run"
    script.write_text("echo\n")
    assert len(script_faults([script])) == 2


def test_version_is_said_once() -> None:
    init = next(m for m in read_modules("atoll") if m.path == "atoll/__init__.py")
    assert f'__version__ = "{PYPROJECT["project"]["version"]}"\n' in init.source
