"""From questions to prompts: a few worked ones before the one that is asked, as plain text or as a conversation. Knows no model."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError, counted
from atoll.eval.questions import Question

Message = dict[str, str]
Prompt = str | list[Message]

# What ends an answer, beside the model's own end of text: the prompt's form going on, and the ends of text that models spell out.
STOP = ("Question:", "</s>", "<|im_end|>")


@dataclass(frozen=True)
class PromptForm:
    """How a question is put. The text is that of lm-eval's gsm8k; in a conversation each worked question is a user's turn with its answer."""

    shots: tuple[Question, ...]  # one more than num_fewshot, where they could contain the question that is asked; all, for own_shots
    num_fewshot: int
    chat: bool
    own_shots: bool = False  # each question begins elsewhere among `shots`, by its text, so that prompts have little in common

    def prompt(self, question: Question) -> Prompt:
        """The first `num_fewshot` shots, the question itself left out of them, and the question."""
        first = zlib.crc32(question.text.encode()) % len(self.shots) if self.own_shots and self.shots else 0
        turned = self.shots[first:] + self.shots[:first]
        shots = [shot for shot in turned if shot.text != question.text][: self.num_fewshot]
        if self.chat:
            turns = [turn for shot in shots for turn in (_said("user", shot.text), _said("assistant", shot.answer))]
            return [*turns, _said("user", question.text)]
        return "".join(f"Question: {shot.text}\nAnswer: {shot.answer}\n\n" for shot in shots) + f"Question: {question.text}\nAnswer:"


def make_form(shots: Sequence[Question], num_fewshot: int, *, chat: bool, own_shots: bool = False) -> PromptForm:
    """Raises ConfigError where `shots` may leave too few when a question is left out of them."""
    if num_fewshot and len(shots) <= num_fewshot:
        asked = counted(num_fewshot, "worked question")
        raise ConfigError(f"{asked} asked for out of {len(shots)}, of which one may be asked; ask for {len(shots) - 1} at most")
    some = shots if own_shots else shots[: num_fewshot + 1]
    return PromptForm(tuple(some) if num_fewshot else (), num_fewshot, chat, own_shots)


def prompt_text(prompt: Prompt) -> str:
    """All that the prompt says."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
