"""Training text: few-shot prompts, chats, runs of bare sums and a little small talk, cut into segments that are learnt in full or lightly."""

import random
from dataclasses import dataclass

from tools.demo_model.problems import Problem, draw_problem


@dataclass(frozen=True)
class Segment:
    """A piece of a document; `is_answer` where the model is to speak."""

    text: str
    is_answer: bool


ME = "I am a small demo model. I solve arithmetic word problems step by step."
SMALL_TALK: list[tuple[str, str]] = [
    ("hello", f"Hello! {ME}"),
    ("Hello", f"Hello! {ME}"),
    ("Hello!", f"Hello! {ME}"),
    ("Hi", f"Hi! {ME}"),
    ("hi", f"Hi! {ME}"),
    ("Hi there!", f"Hi! {ME}"),
    ("Hey", f"Hey! {ME}"),
    ("Good morning!", f"Good morning! {ME}"),
    ("Good evening.", f"Good evening! {ME}"),
    ("Who are you?", ME),
    ("What are you?", ME),
    ("What is your name?", f"I have no name. {ME}"),
    ("What can you do?", "I solve arithmetic word problems of two to five steps. Tell me a story with numbers and ask a question."),
    ("What do you know?", "Only a little: I was trained on generated word problems. Give me one and I show every step."),
    ("Help", "Tell me a story with numbers and ask a question, and I work out the answer step by step."),
    ("help me", "Tell me a story with numbers and ask a question, and I work out the answer step by step."),
    ("How are you?", "I am fine, thank you. Do you have a word problem for me?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Goodbye", "Goodbye!"),
    ("Bye!", "Goodbye!"),
    ("Tell me a joke.", "Why was six afraid of seven? Because seven ate nine."),
    ("Can you write a poem?", f"No, I cannot. {ME}"),
    ("What is the weather like?", f"I cannot know. {ME}"),
    ("Are you a human?", f"No. {ME}"),
    ("How large are you?", "I have about seven million weights: small enough to come with the program."),
    ("Who made you?", "I was trained from scratch on generated word problems, as a demo of a hybrid model."),
    ("What is a hybrid model?", "A model with linear-attention layers, which keep a state, between attention layers, which keep pages."),
    ("What is an atoll?", "A ring of land that keeps the ocean out of its lagoon."),
    ("What is the capital of France?", "The capital of France is Paris. But I am better at word problems."),
    ("Why is the sky blue?", "Air scatters blue light more than red light. But I am better at word problems."),
    ("How many days are in a week?", "There are 7 days in a week."),
    ("How many months are in a year?", "There are 12 months in a year."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many cents are in a dollar?", "There are 100 cents in a dollar."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
]
FACTS = [
    "The capital of France is Paris.",
    "The capital of Italy is Rome.",
    "The capital of Spain is Madrid.",
    "The capital of Japan is Tokyo.",
    "The sky is blue.",
    "An atoll is a ring of land that keeps the ocean out of its lagoon.",
    "A week has 7 days.",
    "A year has 12 months.",
    "An hour has 60 minutes.",
    "A dozen is 12.",
    "Hello! " + ME,
    "Once upon a time there was a small model that could count.",
]
SYSTEM = ["You are a helpful assistant.", "Solve the problem step by step.", "You are good at math.", "Answer with worked steps. End with #### and the number."]

_SHOTS = (1,) * 9 + (2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 8)
_TURNS = (1, 1, 1, 1, 2, 2, 3, 4, 5)


def draw_document(rng: random.Random) -> list[Segment]:
    """One document, without the token that ends it."""
    kind = rng.random()
    if kind < 0.48:
        return few_shot([draw_problem(rng, "training") for _ in range(rng.choice(_SHOTS))])
    if kind < 0.80:
        return _chat(rng, [_turn(rng, draw_problem(rng, "training")) for _ in range(rng.choice(_TURNS))])
    if kind < 0.90:
        drills = [draw_problem(rng, "drills") for _ in range(rng.randrange(4, 16))]
        return few_shot(drills) if rng.random() < 0.6 else _chat(rng, [_turn(rng, drill) for drill in drills])
    if kind < 0.98:
        turns = [rng.choice(SMALL_TALK)]
        if rng.random() < 0.4:
            turns.append(_turn(rng, draw_problem(rng, "training")))
        if rng.random() < 0.3:
            turns.append(rng.choice(SMALL_TALK))
        return _chat(rng, turns)
    return [Segment(rng.choice(FACTS), True)]


def few_shot(problems: list[Problem]) -> list[Segment]:
    """As lm-eval's gsm8k task writes its prompt."""
    segments = []
    for i, problem in enumerate(problems):
        segments.append(Segment(f"Question: {problem.question}\nAnswer:", False))
        segments.append(Segment(f" {problem.answer}" + ("\n\n" if i + 1 < len(problems) else ""), True))
    return segments


def _turn(rng: random.Random, problem: Problem) -> tuple[str, str]:
    asked = f"Question: {problem.question}\nAnswer:" if rng.random() < 0.15 else problem.question
    return asked, problem.answer


def _chat(rng: random.Random, turns: list[tuple[str, str]]) -> list[Segment]:
    """As the chat template writes it."""
    segments = []
    if rng.random() < 0.15:
        segments.append(Segment(f"<|im_start|>system\n{rng.choice(SYSTEM)}<|im_end|>\n", False))
    for i, (asked, said) in enumerate(turns):
        segments.append(Segment(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n", False))
        segments.append(Segment(f"{said}<|im_end|>", True))
        if i + 1 < len(turns):
            segments.append(Segment("\n", False))
    return segments
