"""How questions are read, prompts are made and answers are graded: lm-eval's regular expressions, characters that are garbage, refusals."""

import json
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.eval.numbers import flexible_number, is_number, normal_form, strict_number
from atoll.eval.prompts import make_form, prompt_text
from atoll.eval.questions import DEMO_PROBLEMS, Question, read_questions
from atoll.eval.rows import make_row
from atoll.eval.scripts import foreign_characters
from atoll.eval.target import Answer


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 24", "24", "24"),
        ("#### 1,234", "1,234", "1,234"),
        ("#### -3.50", "-3.50", "-3.50"),
        ("first #### 5, then #### 6", "5,", "6"),
        ("The answer is 17.", None, "17."),
        ("It costs $18", None, "$18"),
        ("#### $18", None, "$18"),
        ("####24", None, "24"),
        ("", None, None),
        ("no digits", None, None),
        ("well ...", None, "..."),
    ],
)
def test_numbers_are_found_as_lm_eval_finds_them(text: str, strict: str | None, flexible: str | None) -> None:
    assert (strict_number(text), flexible_number(text)) == (strict, flexible)


@pytest.mark.parametrize(
    ("written", "compared"), [("1,234", "1234"), ("$18.", "18"), ("7.0", "7.0"), ("5,", "5"), ("7.,", "7"), ("-3.50", "-3.50"), ("#### 9", "9")]
)
def test_numbers_are_compared_as_lm_eval_compares_them(written: str, compared: str) -> None:
    assert normal_form(written) == compared
    assert is_number(written, compared)
    assert not is_number(written, compared + "1")
    assert not is_number(None, compared)


@pytest.mark.parametrize(
    ("text", "prompt", "found"),
    [
        ("Tom has 42 + 50 = <<92>>92 shells, é ½ µ² → 3\n\t#### 92", "Tom", "µ"),
        ("So 不 it is 不好", "Tom", "不好"),
        ("So 不", "Tom 好", ""),
        ("Да", "Tom", "Да"),
        ("odd \ufffd bytes \x00 \ue000", "Tom", "\ufffd\x00\ue000"),
        ("odd \ufffd", "odd \ufffd", ""),
        ("\uff34\uff4f\uff4d fullwidth Latin", "Tom", ""),
        ("hello", "Привет", ""),
        ("", "", ""),
    ],
)
def test_characters_of_other_scripts_are_garbage(text: str, prompt: str, found: str) -> None:
    assert foreign_characters(text, prompt) == found


def test_questions_are_read_from_the_first_on(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", *(json.dumps({"question": f"q{i}", "answer": f"so\n#### 1,00{i}"}) for i in range(4)))
    assert read_questions(file, 2) == [Question("q0", "so\n#### 1,000"), Question("q1", "so\n#### 1,001")]
    assert [question.number for question in read_questions(file)] == ["1000", "1001", "1002", "1003"]


def test_the_shipped_questions_are_all_of_them() -> None:
    assert len(read_questions(DEMO_PROBLEMS)) == 1319


@pytest.mark.parametrize(
    ("lines", "count", "message"),
    [
        (["{}"], None, r"q.jsonl:1 is not a JSON object with 'question' and 'answer': KeyError"),
        (["nonsense"], None, r"q.jsonl:1 is not a JSON object"),
        (["[]"], None, r"q.jsonl:1 is not a JSON object"),
        (['{"question": "a", "answer": "7"}'], None, r"q.jsonl:1 has an answer without a number"),
        (['{"question": "a", "answer": "#### 1"}'], 3, r"q.jsonl holds 1 question, 3 asked for"),
        ([""], None, r"q.jsonl holds 0 questions, 1 asked for"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, lines: list[str], count: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_questions(write(tmp_path / "q.jsonl", *lines), count)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


QUESTIONS = [Question(f"q{i}?", f"a{i}\n#### {i}") for i in range(4)]


def test_the_prompt_is_lm_evals() -> None:
    form = make_form(QUESTIONS[1:], 2, chat=False)
    assert form.prompt(QUESTIONS[0]) == "Question: q1?\nAnswer: a1\n#### 1\n\nQuestion: q2?\nAnswer: a2\n#### 2\n\nQuestion: q0?\nAnswer:"
    assert make_form([], 0, chat=False).prompt(QUESTIONS[0]) == "Question: q0?\nAnswer:"


def test_no_prompt_shows_the_answer_that_it_asks_for() -> None:
    form = make_form(QUESTIONS, 3, chat=False)
    for question in QUESTIONS:
        text = prompt_text(form.prompt(question))
        assert question.answer not in text and text.count("Question: ") == 4


def test_a_conversation_has_a_turn_for_each_shot() -> None:
    prompt = make_form(QUESTIONS, 1, chat=True).prompt(QUESTIONS[0])
    assert [(message["role"], message["content"]) for message in prompt] == [("user", "q1?"), ("assistant", "a1\n#### 1"), ("user", "q0?")]  # type: ignore[index]


def test_own_shots_begin_elsewhere_for_each_question() -> None:
    some = [Question(f"q{i}?", f"a{i}\n#### {i}") for i in range(50)]
    form = make_form(some, 2, chat=False, own_shots=True)
    prompts = [prompt_text(form.prompt(question)) for question in some]
    beginnings = {prompt.partition("\n")[0] for prompt in prompts}
    assert len(beginnings) > 20 and prompts == [prompt_text(form.prompt(question)) for question in some]
    assert all(prompt.count("Question: ") == 3 and question.answer not in prompt for prompt, question in zip(prompts, some, strict=True))
    common = make_form(some, 2, chat=False)
    assert len({prompt_text(common.prompt(question)).partition("\n")[0] for question in some}) == 2, "all but the first question begin with it"


def test_more_shots_than_there_are_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 worked questions asked for out of 4, of which one may be asked; ask for 3 at most"):
        make_form(QUESTIONS, 4, chat=False)


@pytest.mark.parametrize(
    ("answer", "strict", "flexible", "counted"),
    [
        (Answer(0, " so\n#### 7", "stop"), True, True, set()),
        (Answer(0, "it is 7.", "length"), False, True, {"truncated"}),
        (Answer(0, "#### 8, no 7", "stop"), False, True, set()),
        (Answer(0, "#### 7", "error", error="NaN"), False, False, {"failed"}),
        (Answer(0, " \n", "stop"), False, False, {"empty"}),
        (Answer(0, "\ufffd 7", "stop"), False, True, {"garbled"}),
    ],
)
def test_a_graded_answer(answer: Answer, strict: bool, flexible: bool, counted: set[str]) -> None:
    row = make_row(0, 3, Question("q", "#### 7"), "Question: q\nAnswer:", 5, answer)
    assert (row.strict, row.flexible, row.key, row.seed) == (strict, flexible, (0, 3), 5)
    assert {name for name in ("empty", "truncated", "garbled", "failed") if getattr(row, name)} == counted
