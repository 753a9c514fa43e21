"""Rules for the tests themselves: every one asserts, and none is skipped."""

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.tree.files import Module, read_modules
from tests.tree.rules import FUNCTION

# A test may wait for what it cannot bring: file, and why.
SKIPS_EXCUSED: dict[str, str] = {
    "tests/ops/test_delta_fla.py": "flash-linear-attention is an extra, which a GPU machine may lack",
    "tests/engine/test_flashinfer.py": "FlashInfer is no dependency; where a GPU is without it, its tests wait",
    "tests/server/test_browser.py": "Chromium and chromedriver are no Python packages; where they are missing, the tests of the page wait",
    "tests/offload/test_lmcache.py": "without scripts/test there is no .venv-lmcache; where LMCache is missing, its cases wait",
    "tests/server/programs.py": "without scripts/test there is no .venv-clients, and curl is no Python package; where they are missing, their tests wait",
}

ASSERTING_PREFIXES = ("assert", "check", "raises", "fail", "run_state_machine")


def silent_tests(modules: Iterable[Module]) -> list[str]:
    """Tests in which nothing can fail: no assert, no pytest.raises, no call of a function named for checking."""
    return [
        f"{m.path}:{test.lineno}: {test.name} asserts nothing"
        for m in modules
        for test in ast.walk(m.tree)
        if isinstance(test, FUNCTION) and test.name.startswith("test") and not any(asserts(node) for node in ast.walk(test))
    ]


def asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return called_name(node).lstrip("_").startswith(ASSERTING_PREFIXES) or any(k.arg == "check" and ast.unparse(k.value) == "True" for k in node.keywords)
    return isinstance(node, ast.Assert)


def called_name(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def skips(modules: Iterable[Module]) -> list[str]:
    """Calls and marks that let a test not run."""
    return [f"{m.path}:{line}: {name} lets a test not run; mark it gpu, or make it run" for m in modules for line, name in skipping_names(m)]


def skipping_names(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "importorskip", "xfail", "SkipTest", "skipTest", "skipUnless", "skipIf"):
            yield node.lineno, node.attr


def test_every_test_asserts() -> None:
    assert silent_tests(read_modules("tests")) == []


def test_no_test_is_skipped() -> None:
    assert skips(m for m in read_modules("tests") if m.path not in SKIPS_EXCUSED) == []


@pytest.mark.parametrize(
    "source",
    ["def test_a():\n    run()\n", "class TestA:\n    def test_a(self):\n        x = 1\n"],
)
def test_silent_test_is_found(source: str) -> None:
    assert len(silent_tests([Module("tests/a.py", source)])) == 1


@pytest.mark.parametrize(
    "body",
    [
        "assert x",
        "with pytest.raises(ValueError):\n        f()",
        "pool.check()",
        "check_same(a, b)",
        "torch.testing.assert_close(a, b)",
        "_check(a)",
        "run(x, check=True)",
    ],
)
def test_asserting_test_passes(body: str) -> None:
    assert silent_tests([Module("tests/a.py", f"def test_a():\n    {body}\n")]) == []


@pytest.mark.parametrize(
    "line", ["pytest.skip('x')", "@pytest.mark.skipif(True)\ndef test(): assert 1", "pytest.importorskip('x')", "@pytest.mark.xfail\ndef f(): 0"]
)
def test_skip_is_found(line: str) -> None:
    assert len(skips([Module("tests/a.py", line)])) == 1
