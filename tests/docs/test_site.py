"""The documentation's site is built without a fault, its links and anchors lead somewhere, and it loads nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build`, as CONTRIBUTING.md has it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of the site, to be broken."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == {path.stem for path in site.glob("*.html")} - {"404"} and len(pages) > 5
    assert "pool.svg" in (site / "promise.html").read_text() and (site / "pool.svg").is_file()
    assert "page.png" in (site / "index.html").read_text() and (site / "page.png").is_file()


def loaded(html: str) -> list[str]:
    """Addresses of scripts, styles and pictures."""
    return re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)", html) + re.findall(r"<link\b[^>]*\bhref=\"([^\"]+)", html)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = [address for page in site.glob("*.html") for address in loaded(page.read_text())]
    assert len(found) > 20
    assert [address for address in found if re.match(r"(https?:)?//", address)] == []
    assert loaded('<script async src="https://a.b/c.js"></script><link rel="x" href="//d.e/f.css">') == ["https://a.b/c.js", "//d.e/f.css"]


def test_the_picture_has_words_and_both_grounds() -> None:
    picture = (ROOT / "docs" / "pool.svg").read_text()
    assert "<title" in picture and "<desc" in picture and "prefers-color-scheme: dark" in picture
    for word in ("13 owned rows", "tail", "padded lane", "image", "the mask cuts here"):
        assert word in picture


def test_control_the_copy_is_built(copy: Path) -> None:
    assert build(copy, copy / "site").returncode == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[x](gone.md)", "gone.md"),
        ("[x](serving.md#gone)", "serving.md#gone"),
        ("[x](#gone)", "#gone"),
        ("![x](gone.png)", "gone.png"),
        ("[x](../README.md)", "README.md"),
        ("[x](/serving.md)", "/serving.md"),
    ],
)
def test_control_a_broken_link_is_found(copy: Path, text: str, says: str) -> None:
    page = copy / "docs" / "index.md"
    page.write_text(f"{page.read_text()}\n{text}\n")
    result = build(copy, copy / "site")
    assert result.returncode == 1 and says in result.stderr


def test_control_a_page_that_no_menu_has_is_found(copy: Path) -> None:
    (copy / "docs" / "lost.md").write_text("# Lost\n")
    result = build(copy, copy / "site")
    assert result.returncode == 1 and "lost.md" in result.stderr
