"""A run as JSON lines: first what it was, then one row per question and pass, with all that is needed to repeat it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, counted
from atoll.eval.numbers import flexible_number, is_number, strict_number
from atoll.eval.prompts import Prompt, prompt_text
from atoll.eval.questions import Question
from atoll.eval.scripts import foreign_characters
from atoll.eval.target import Answer


@dataclass(frozen=True)
class Row:
    """One question, asked once. What a server does not tell is None."""

    pass_index: int
    index: int  # of the question in its file, from 0
    question: str
    split: str | None  # part of the file that the question belongs to
    number: str  # asked for, in its normal form
    prompt_sha256: str  # of the prompt's text, or of its messages as JSON
    num_prompt_tokens: int | None
    num_cached_tokens: int | None  # of the prompt, read from the prefix cache
    seed: int
    text: str
    token_ids: list[int] | None
    num_output_tokens: int | None
    finish_reason: str
    error: str | None
    strict_number: str | None  # as written
    flexible_number: str | None
    strict: bool  # whether it is the number asked for
    flexible: bool
    foreign: str  # characters that are garbage after this prompt, each once
    num_fetched_tokens: int | None = None  # of num_cached_tokens, brought back from a tier; runs of before there were tiers have no such field

    @property
    def key(self) -> tuple[int, int]:
        return self.pass_index, self.index

    @property
    def empty(self) -> bool:
        return not self.text.strip()

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def garbled(self) -> bool:
        return bool(self.foreign)

    @property
    def failed(self) -> bool:
        return self.error is not None or self.finish_reason == "error"


@dataclass(frozen=True)
class Run:
    """What was read from a file."""

    path: Path
    header: dict[str, Any]
    rows: dict[tuple[int, int], Row]  # by pass and question

    @property
    def greedy(self) -> bool:
        return self.header.get("sampling", {}).get("temperature") == 0


def make_row(pass_index: int, index: int, question: Question, prompt: Prompt, seed: int, answer: Answer) -> Row:
    """Grade an answer; one that broke off in an error is wrong, whatever it had said."""
    strict, flexible = strict_number(answer.text), flexible_number(answer.text)
    sound = answer.error is None and answer.finish_reason != "error"
    return Row(
        pass_index=pass_index,
        index=index,
        question=question.text,
        split=question.split,
        number=question.number,
        prompt_sha256=prompt_sha256(prompt),
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        seed=seed,
        text=answer.text,
        token_ids=answer.token_ids,
        num_output_tokens=answer.num_output_tokens,
        finish_reason=answer.finish_reason,
        error=answer.error,
        strict_number=strict,
        flexible_number=flexible,
        strict=sound and is_number(strict, question.number),
        flexible=sound and is_number(flexible, question.number),
        foreign=foreign_characters(answer.text, prompt_text(prompt)),
        num_fetched_tokens=answer.num_fetched_tokens,
    )


def prompt_sha256(prompt: Prompt) -> str:
    return hashlib.sha256((prompt if isinstance(prompt, str) else json.dumps(prompt)).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def header_line(header: dict[str, Any]) -> str:
    return json.dumps({"run": header}) + "\n"


def row_line(row: Row) -> str:
    return json.dumps(asdict(row)) + "\n"


def read_run(path: Path) -> Run:
    """Raises ConfigError for a file that `atoll eval` did not write, or whose rows name one question twice."""
    remedy = "give a file that atoll eval gsm8k --out wrote"
    names = [field.name for field in fields(Row)]
    header: dict[str, Any] | None = None
    rows: dict[tuple[int, int], Row] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run {str(path)!r} cannot be read: {error}; {remedy}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if number == 1:
                header = entry["run"]
                continue
            row = Row(**{name: entry[name] for name in names if name in entry})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is no line of a run: {error!r}; {remedy}") from error
        if row.key in rows:
            raise ConfigError(f"{path}:{number} is question {row.index} of pass {row.pass_index} a second time; {remedy}, one run to a file")
        rows[row.key] = row
    if header is None or not rows:
        raise ConfigError(f"{path} holds {counted(len(rows), 'row')}, 1 is the least; {remedy}")
    return Run(path, header, rows)


def question_means(rows: Sequence[Row], score: str) -> dict[int, float]:
    """Per question the mean over its passes of "strict" or "flexible"."""
    found: dict[int, list[bool]] = {}
    for row in rows:
        found.setdefault(row.index, []).append(getattr(row, score))
    return {index: sum(scores) / len(scores) for index, scores in sorted(found.items())}
