"""One request while it lives: its tokens, its pages and state slot, how far it has been computed; knows no text."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from atoll.engine.constraint import Constraint
from atoll.engine.reuse import PrefixUse
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import SampleTask, ScoreTask


@dataclass(eq=False)
class Request:
    """Prompt and output are one sequence of tokens; a preemption only sets `num_computed` back, to 0 until it is admitted again."""

    request_id: int  # also the order of arrival
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # params.max_tokens, cut to what the model and the pool can hold
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence tokens included, unless ignored
    output_token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    state_slot: int | None = None  # held while it runs, where the model keeps a state
    num_computed: int = 0  # tokens whose keys and values lie in `pages`, and which the state has seen
    num_preemptions: int = 0
    constraint: Constraint | None = None  # has accepted output_token_ids
    prefix: PrefixUse = field(default_factory=lambda: PrefixUse.of_salt(None))  # its part in the prefix cache

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def below_min_tokens(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens

    def tokens(self, start: int, count: int) -> list[int]:
        """The tokens at positions `start` to `start + count`."""
        past_prompt = start - len(self.prompt_token_ids)
        if past_prompt >= 0:
            return self.output_token_ids[past_prompt : past_prompt + count]
        return (self.prompt_token_ids[start : start + count] + self.output_token_ids[: max(0, past_prompt + count)])[:count]

    def sample_task(self) -> SampleTask:
        suppressed = tuple(sorted(self.stop_token_ids)) if self.below_min_tokens else ()
        allowed = self.constraint.mask() if self.constraint is not None else None
        counts = self._penalized_counts() if self.params.penalizes else ()
        return SampleTask(self.params, self.seed, len(self.output_token_ids), suppressed, allowed=allowed, counts=counts)

    def score_task(self, start: int, count: int) -> ScoreTask | None:
        """What is asked about the prompt's tokens that follow those at positions `start` to `start + count`."""
        num_top = self.params.prompt_logprobs
        targets = self.prompt_token_ids[start + 1 : start + count + 1] if num_top is not None else []
        return ScoreTask(targets, num_top) if num_top is not None and targets else None

    def _penalized_counts(self) -> tuple[tuple[int, int], ...]:
        counts = Counter(self.output_token_ids)
        if self.params.repetition_penalty != 1:
            return tuple({**self._prompt_counts, **counts}.items())
        return tuple(counts.items())

    @cached_property
    def _prompt_counts(self) -> dict[int, int]:
        return dict.fromkeys(self.prompt_token_ids, 0)
