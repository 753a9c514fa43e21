"""Questions with known answers, in GSM8K's form: a JSONL file, each answer ending in `#### ` and its number. Knows no model."""

import json
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError, counted
from atoll.eval.numbers import normal_form, strict_number

DEMO_PROBLEMS = Path(__file__).parents[1] / "models" / "demo" / "problems.jsonl"


@dataclass(frozen=True)
class Question:
    """One problem."""

    text: str
    answer: str  # the whole worked answer, as it is shown in a few-shot prompt
    split: str | None = None  # part of the file, where it names one, with a score of its own

    @property
    def number(self) -> str:
        """The answer's number in its normal form; read_questions has seen to it that there is one."""
        return normal_form(strict_number(self.answer) or "")


def read_questions(path: Path, count: int | None = None) -> list[Question]:
    """The first `count` lines of a JSONL file with "question" and "answer", and maybe "split"; None: all. Empty lines do not count.

    Raises ConfigError for a file that is not there or not of that form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"questions {str(path)!r} cannot be read: {error}; give a JSONL file with 'question' and 'answer' in each line") from error
    found: list[Question] = []
    for number, line in enumerate(lines, 1):
        if count is not None and len(found) == count:
            break
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = Question(str(entry["question"]), str(entry["answer"]), None if entry.get("split") is None else str(entry["split"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is not a JSON object with 'question' and 'answer': {error!r}; mend that line") from error
        if strict_number(question.answer) is None:
            raise ConfigError(f"{path}:{number} has an answer without a number; end it with a line like '#### 24'")
        found.append(question)
    if not found or (count is not None and len(found) < count):
        raise ConfigError(f"{path} holds {counted(len(found), 'question')}, {count or 1} asked for; ask for fewer, or give another file")
    return found
