"""Generated word problems in GSM8K's answer format: seeded, with held-out numbers and held-out templates.

A problem's key is its template and the quantities that its story gives. A deterministic hash of the key puts one key in sixteen on the held-out side: training
never draws those, whatever the seed. The test set draws only those, and problems of templates that training does not have.
"""

import argparse
import json
import random
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tools.demo_model.chains import CHAINS, DRILLS, Template
from tools.demo_model.draw import Draw, Retry
from tools.demo_model.held_out import HELD_OUT
from tools.demo_model.stories import STORIES
from tools.demo_model.variety import vary

# What a problem is drawn for: training; bare sums of training; held-out numbers in training's templates; held-out templates.
Side = Literal["training", "drills", "numbers", "templates"]

TRAINING: dict[str, Template] = CHAINS | STORIES
# One key in so many is held out.
HELD_OUT_KEYS = 16

TEST_SEED = 2718
NUM_TEST_NUMBERS = 1000
NUM_TEST_TEMPLATES = 319


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    template: str
    quantities: tuple[int, ...]

    @property
    def result(self) -> str:
        """What stands after `#### `."""
        return self.answer.rpartition("#### ")[2]


def is_held_out(template: str, quantities: tuple[int, ...]) -> bool:
    return zlib.crc32(f"{template}:{quantities}".encode()) % HELD_OUT_KEYS == 0


def draw_problem(rng: random.Random, side: Side) -> Problem:
    """One problem of a side of the split."""
    while True:
        templates = _TEMPLATES[side]
        name = _NAMES[side][int(rng.random() * len(_NAMES[side]))]
        # Retried within the template: otherwise those that often fail would be rare.
        for _ in range(100):
            d = Draw(rng)
            try:
                made = templates[name](d)
            except Retry:
                continue
            quantities = tuple(d.quantities)
            if side == "templates" or is_held_out(name, quantities) == (side == "numbers"):
                answer = "\n".join([*made.lines, f"#### {made.answer}"])
                # The test set keeps the templates' own words.
                question, answer = vary(made.question, answer, rng) if side == "training" else (made.question, answer)
                return Problem(question, answer, name, quantities)


_TEMPLATES: dict[Side, dict[str, Template]] = {"training": TRAINING, "drills": DRILLS, "numbers": TRAINING, "templates": HELD_OUT}
_NAMES = {side: list(templates) for side, templates in _TEMPLATES.items()}


@dataclass(frozen=True)
class ShippedProblem:
    """A line of the shipped test set."""

    question: str
    answer: str
    split: str


def make_test_set() -> list[ShippedProblem]:
    """The shipped test set: the same in every run."""
    rng = random.Random(TEST_SEED)
    sides: list[Side] = ["numbers"] * NUM_TEST_NUMBERS + ["templates"] * NUM_TEST_TEMPLATES
    seen: set[str] = set()
    made = []
    for side in sides:
        problem = draw_problem(rng, side)
        while problem.question in seen:
            problem = draw_problem(rng, side)
        seen.add(problem.question)
        made.append(ShippedProblem(problem.question, problem.answer, side))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the test set as JSON lines, or show problems.")
    parser.add_argument("--write", type=Path, help="file to write the test set to")
    parser.add_argument("--show", type=int, default=0, help="problems to print")
    parser.add_argument("--side", choices=tuple(_TEMPLATES), default="training")
    args = parser.parse_args()
    if args.write:
        write_test_set(args.write)
    rng = random.Random()
    for _ in range(args.show):
        problem = draw_problem(rng, args.side)
        print(f"[{problem.template}] {problem.question}\n{problem.answer}\n")


def write_test_set(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in make_test_set()))


if __name__ == "__main__":
    main()
