"""What the documentation tells a reader to run works, and says what the pages say that it says."""

from pathlib import Path

import pytest

from tests.docs.blocks import EXCUSES, ROOT, Block, find_blocks, is_said, make_command, run_block
from tests.server.running import Running, running_server

PAGES = {path.stem: find_blocks(path.read_text()) for path in sorted((ROOT / "docs").glob("*.md"))}


@pytest.fixture(scope="module")
def server() -> Running:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_command(tmp_path_factory.mktemp("path") / "bin")


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_blocks_of_a_page(page: str, tmp_path: Path, path: Path, server: Running) -> None:
    assert any(block.excuse is None and block.file is None for block in PAGES[page]), "nothing of the page is run"
    for block in PAGES[page]:
        run_block(block, tmp_path, path, server.url)


def test_every_page_but_the_made_ones_has_blocks() -> None:
    assert [name for name, blocks in PAGES.items() if not blocks] == ["commands", "decode-h200"]


# Negative controls.
BROKEN = [
    ("```sh\nfalse\n```\n", "ended with 1, not 0"),
    ("```sh\ntrue  # exits with 1\n```\n", "ended with 0, not 1"),
    ("```sh\necho one\n```\n\n```text\ntwo\n```\n", "did not say 'two'"),
    ("```python\nprint(1 / 0)\n```\n", "ZeroDivisionError"),
    ("```python\nimport warnings\nwarnings.warn('old')\n```\n", "UserWarning: old"),
    ("```sh\natoll generate --model no-such-model x\n```\n", "model 'no-such-model' does not exist"),
]


@pytest.mark.parametrize(("page", "says"), BROKEN)
def test_control_a_block_that_fails_is_found(page: str, says: str, tmp_path: Path, path: Path) -> None:
    [block] = find_blocks(page)
    with pytest.raises(AssertionError, match=says):
        run_block(block, tmp_path, path, "http://127.0.0.1:1")


@pytest.mark.parametrize("page", ["```bash\ntrue\n```\n", "```\ntrue\n```\n", "<!-- not run: it is late -->\n```sh\ntrue\n```\n"])
def test_control_a_block_that_would_not_be_run_is_found(page: str) -> None:
    with pytest.raises(ValueError, match="line"):
        find_blocks(page)


def test_what_is_not_run(tmp_path: Path, path: Path) -> None:
    page = f"<!-- not run: {EXCUSES[0]} -->\n```sh\nfalse\n```\n\n<!-- file: a.py -->\n```python\nx = 1\n```\n"
    blocks = find_blocks(page)
    assert blocks == [Block("sh", "false\n", 2, excuse=EXCUSES[0]), Block("python", "x = 1\n", 7, file="a.py")]
    for block in blocks:
        run_block(block, tmp_path, path, "")
    assert (tmp_path / "a.py").read_text() == "x = 1\n"


def test_what_counts_as_said() -> None:
    assert is_said("a ... c", "x\n  a  b   c d\n") and is_said("a", "ba")
    assert not is_said("a ... c", "c a\n") and not is_said("a c", "a b c") and not is_said("a.c", "abc")
