"""Makes the README's map of modules from their first docstring lines; `python -m tests.tree.readme_map` writes it."""

from collections.abc import Iterable
from pathlib import Path

from tests.tree.files import ROOT, Module, read_modules

BEGIN = "<!-- map: made from the first docstring lines by scripts/fix -->\n"
END = "<!-- end of map -->\n"


def render_map(modules: Iterable[Module]) -> str:
    """One table for the package: folders in bold, then their files."""
    rows = ["| module | what it is |", "|---|---|"]
    for module in modules:
        folder, _, file = module.path.rpartition("/")
        label = f"**[{folder}/]({module.path})**" if module.is_package else f"[{file}]({module.path})"
        rows.append(f"| {label} | {module.first_line.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def replace_map(readme: str, new_map: str) -> str:
    """The README's text with another map between the two marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks the line {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n{new_map}\n{END}{after}"


def main(root: Path = ROOT) -> None:
    path = root / "README.md"
    path.write_text(replace_map(path.read_text(), render_map(read_modules("atoll", root=root))))


if __name__ == "__main__":
    main()
