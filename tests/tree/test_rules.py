"""The tree keeps the house rules, and each rule finds the fault that it is made for."""

import re
from collections.abc import Callable

import pytest

from tests.tree import rules
from tests.tree.files import ROOT, Module, read_modules

PACKAGE = read_modules("atoll")
TESTS = [m for m in read_modules("tests") if m.source]  # a folder of tests has nothing to say for itself
PROSE = ("README.md", "CONTRIBUTING.md", "LOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

# The rules themselves name the words.
FOREIGN_WORDS_EXCUSED = ("tests/tree/",)


def texts() -> dict[str, str]:
    return {m.path: m.source for m in PACKAGE + TESTS} | {name: (ROOT / name).read_text() for name in PROSE}


def test_there_is_a_package_to_check() -> None:
    assert len(PACKAGE) > 10
    assert len(TESTS) > 10


@pytest.mark.parametrize(
    "rule",
    [rules.docstring_faults, rules.length_faults, rules.name_faults],
)
def test_all_modules(rule: Callable[[list[Module]], list[str]]) -> None:
    assert rule(PACKAGE + TESTS) == []


@pytest.mark.parametrize("rule", [rules.import_faults, rules.torch_faults, rules.all_faults, rules.environment_faults])
def test_package_modules(rule: Callable[[list[Module]], list[str]]) -> None:
    assert rule(PACKAGE) == []


def test_words() -> None:
    assert rules.word_faults(texts(), rules.FOREIGN_WORDS, FOREIGN_WORDS_EXCUSED) == []
    assert rules.word_faults(texts(), rules.UNFINISHED_WORDS, ("tests/tree/",)) == []


def test_pure_parts_exist() -> None:
    names = {m.name for m in PACKAGE}
    assert [name for name in rules.NO_TORCH if name not in names] == []


# Negative controls: (rule, path, source that breaks it).
BROKEN: list[tuple[Callable[[list[Module]], list[str]], str, str]] = [
    (rules.docstring_faults, "atoll/ops/a.py", "import math\n"),
    (rules.docstring_faults, "atoll/ops/a.py", '"""Stuff"""\n'),
    (rules.docstring_faults, "atoll/ops/a.py", '"""\nA sentence on the second line.\n"""\n'),
    (rules.name_faults, "atoll/ops/triton.py", ""),
    (rules.import_faults, "atoll/ops/a.py", "from atoll.kv import pool\n"),
    (rules.import_faults, "atoll/ops/a.py", "from atoll import LLM\n"),
    (rules.import_faults, "atoll/ops/a.py", "def f():\n    import atoll.engine.llm\n"),
    (rules.import_faults, "atoll/kv/pool.py", "from ..engine import llm\n"),
    (rules.import_faults, "atoll/kv/pool.py", "from .. import models\n"),
    (rules.import_faults, "atoll/ops/a.py", 'BACKENDS = {"x": "atoll.engine.x:run"}\n'),
    (rules.import_faults, "atoll/eval/a.py", "from atoll.probe import fault\n"),
    (rules.import_faults, "atoll/probe/a.py", "from atoll import LLM\n"),
    (rules.import_faults, "atoll/__init__.py", "from atoll.cli import app\n"),
    (rules.import_faults, "atoll/errors.py", "from atoll.config import Config\n"),
    (rules.torch_faults, "atoll/engine/scheduler.py", "import torch\n"),
    (rules.torch_faults, "atoll/engine/scheduler.py", "from atoll.kv.pool import PagePool\n"),
    (rules.all_faults, "atoll/kv/__init__.py", "from atoll.kv.pool import PagePool\n"),
    (rules.all_faults, "atoll/kv/__init__.py", 'from atoll.kv.pool import PagePool\n__all__ = ["PagePool", "Gone"]\n'),
    (rules.all_faults, "atoll/kv/__init__.py", 'from atoll.kv.pool import A, B\n__all__ = ["A"]\n'),
    (rules.environment_faults, "atoll/ops/a.py", 'import os\nx = os.environ["X"]\n'),
    (rules.environment_faults, "atoll/ops/a.py", 'import os\nx = os.getenv("X")\n'),
    (rules.environment_faults, "atoll/ops/a.py", "from os import environ\n"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN)
def test_rule_finds_its_fault(rule: Callable[[list[Module]], list[str]], path: str, source: str) -> None:
    assert len(rule([Module(path, source)])) == 1


# And what looks alike but is right.
RIGHT: list[tuple[Callable[[list[Module]], list[str]], str, str]] = [
    (rules.docstring_faults, "atoll/ops/a.py", '"""One sentence that says what it is."""\n'),
    (rules.import_faults, "atoll/engine/a.py", "import torch\nfrom atoll.kv.pool import PagePool\nfrom .step import Step\n"),
    (rules.import_faults, "atoll/cli/a.py", "from atoll.engine.llm import LLM\n"),
    (rules.torch_faults, "atoll/kv/pool.py", "import torch\n"),
    (rules.all_faults, "atoll/kv/__init__.py", 'import math\nfrom atoll.kv.pool import PagePool\n_x = 1\n__all__ = ["PagePool"]\n'),
    (rules.all_faults, "atoll/cli/__init__.py", 'from atoll.cli.info import info\napp = make(info)\n__all__ = ["app"]\n'),
    (rules.import_faults, "atoll/cli/a.py", "from atoll import LLM\n"),
    (rules.environment_faults, "atoll/config.py", 'import os\nx = os.environ["X"]\n'),
]


@pytest.mark.parametrize(("rule", "path", "source"), RIGHT)
def test_rule_lets_the_right_pass(rule: Callable[[list[Module]], list[str]], path: str, source: str) -> None:
    assert rule([Module(path, source)]) == []


@pytest.mark.parametrize("line", ["the block_table", "a Block Table", "block-tables", "context_lens = x", "context_len", "slot_mapping"])
def test_foreign_words_are_found(line: str) -> None:
    assert len(rules.word_faults({"a.py": line}, rules.FOREIGN_WORDS)) == 1
    assert rules.word_faults({"tests/tree/a.py": line}, rules.FOREIGN_WORDS, FOREIGN_WORDS_EXCUSED) == []


@pytest.mark.parametrize("line", ["page_table", "# block size of the grid", "context length", "slots"])
def test_other_words_are_not(line: str) -> None:
    assert rules.word_faults({"a.py": line}, rules.FOREIGN_WORDS) == []


@pytest.mark.parametrize("line", ["# TODO: later", "FIXME", "x = 1  # XXX"])
def test_unfinished_words_are_found(line: str) -> None:
    assert len(rules.word_faults({"a.py": line}, rules.UNFINISHED_WORDS)) == 1


def test_long_file_is_a_fault() -> None:
    long = Module("a.py", "x = 1\n" * (rules.MAX_LINES + 1))
    assert rules.length_faults([long], []) == [f"a.py: {rules.MAX_LINES + 1} lines, the limit is {rules.MAX_LINES}; split it"]
    assert rules.length_faults([long], ["a.py"]) == []


def test_idle_length_excuse_is_a_fault() -> None:
    assert rules.length_faults([Module("a.py", "x = 1\n")], ["a.py"]) == ["a.py: excused from the length limit without need"]


def test_unknown_part_is_an_error() -> None:
    with pytest.raises(ValueError, match=re.escape("atoll.new.thing lies in no part")):
        rules.part_of("atoll.new.thing")
