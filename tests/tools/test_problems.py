"""Generated word problems: the arithmetic is right, and what is held out stays out of training."""

import random
import re

import pytest

from tools.demo_model.draw import Draw, Retry
from tools.demo_model.held_out import HELD_OUT
from tools.demo_model.problems import TRAINING, Problem, Side, draw_problem, is_held_out, make_test_set

SIDES: tuple[Side, ...] = ("training", "drills", "numbers", "templates")
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def value_of(terms: str) -> float:
    """Left to right; a story never mixes signs of two ranks but in `a*b/100`."""
    first, *rest = re.split(r"([-+*/])", terms)
    value = float(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = OPERATIONS[sign](value, float(term))
    return value


def faults(problem: Problem) -> list[str]:
    """What is wrong with the answer: an equation, the number after it, the last line."""
    found = []
    for spelled, terms, result, after in re.findall(r"([\d $*/+-]*=) ?\$?<<([^=]*)=(\d+)>>(\d+)", problem.answer):
        if value_of(terms) != int(result) or after != result:
            found.append(f"{terms} is not {result}, {after}")
        if re.sub(r"[ $=]", "", spelled) != terms:
            found.append(f"{spelled!r} is not {terms}")
    results = re.findall(r"=(\d+)>>", problem.answer)
    if problem.answer.count("<<") != len(results) or problem.result not in results:
        found.append("the result comes from no equation")
    if "{" in problem.question + problem.answer or "  " in problem.question:
        found.append("the text is not filled in")
    return found


def draws(side: Side, count: int, seed: int = 0) -> list[Problem]:
    rng = random.Random(seed)
    return [draw_problem(rng, side) for _ in range(count)]


@pytest.mark.parametrize("side", SIDES)
def test_every_equation_is_right(side: Side) -> None:
    assert [(problem, found) for problem in draws(side, 1500) if (found := faults(problem))] == []


def test_a_wrong_answer_is_found() -> None:
    good = Problem("How many?", "It is 4 + 4 = <<4+4=8>>8.\n#### 8", "", ())
    assert faults(good) == []
    wrong = (
        "It is 4 + 4 = <<4+4=9>>9.\n#### 9",
        "It is 4 + 4 = <<4+4=8>>9.\n#### 8",
        "It is 4 + 5 = <<4+4=8>>8.\n#### 8",
        "It is 4 + 4 = <<4+4=8>>8.\n#### 7",
    )
    for answer in wrong:
        assert faults(Problem("How many?", answer, "", ()))


def test_held_out_numbers_are_never_drawn_for_training() -> None:
    assert not any(is_held_out(problem.template, problem.quantities) for side in ("training", "drills") for problem in draws(side, 3000))
    assert all(is_held_out(problem.template, problem.quantities) for problem in draws("numbers", 500))


def test_without_the_hash_training_would_draw_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one in sixteen."""
    monkeypatch.setattr("tools.demo_model.problems.is_held_out", lambda template, quantities: False)
    share = sum(is_held_out(problem.template, problem.quantities) for problem in draws("training", 3000)) / 3000
    assert 0.04 < share < 0.09


def test_templates_are_many_and_held_out_ones_apart() -> None:
    assert len(TRAINING) >= 60 and len(HELD_OUT) == 12
    assert not TRAINING.keys() & HELD_OUT.keys()
    seen = {problem.template for problem in draws("training", 3000)}
    assert seen == set(TRAINING)
    assert {problem.template for problem in draws("templates", 300)} == set(HELD_OUT)


def test_a_seed_gives_the_same_problems() -> None:
    assert draws("training", 50) == draws("training", 50) != draws("training", 50, seed=1)


def test_the_test_set_has_its_sizes_and_no_problem_twice() -> None:
    problems = make_test_set()
    assert [sum(problem.split == split for problem in problems) for split in ("numbers", "templates")] == [1000, 319]
    assert len({problem.question for problem in problems}) == 1319
    assert problems == make_test_set()


def test_what_cannot_be_told_in_whole_numbers_is_drawn_anew() -> None:
    d = Draw(random.Random(0))
    for make in (lambda: d.div(7, 2), lambda: d.sub(3, 3), lambda: d.percent(7, 10), lambda: d.mul(99_999, 2), lambda: d.mul(123, 456)):
        with pytest.raises(Retry):
            make()


def test_an_equation_spells_itself() -> None:
    d = Draw(random.Random(0))
    d.is_tight = False
    assert f"{d.div(48, 2)} and {d.mul(3, 4):$}" == "48 / 2 = <<48/2=24>>24 and 3 * 4 = $<<3*4=12>>12"
    d.is_tight = True
    assert f"{d.add(1, 2, 3)}" == "1+2+3=<<1+2+3=6>>6"
