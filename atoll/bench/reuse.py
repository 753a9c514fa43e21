"""`bench reuse`: the share of prompt tokens that is not computed again, by checkpoint policy; and with a model, time to the first token, warm and cold."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.config import CHECKPOINT_POLICIES, SchedulerConfig
from atoll.engine.request import Request
from atoll.engine.sampling import SamplingParams
from atoll.engine.scheduler import Scheduler
from atoll.kv.ledger import PageLedger
from atoll.kv.slot_ledger import SlotLedger

if TYPE_CHECKING:
    from atoll.engine.llm import LLM

VOCAB = 50_000
# A Qwen3.5-35B-A3B in bf16 with pages of 16: 30 states of 2.1 MB and 49 KB over pages of 10 attention layers, 328 KB each.
IMAGE_PAGES = 197


@dataclass(frozen=True)
class ReuseOptions:
    """Whose prefixes, in what pool."""

    page_size: int = 16  # tokens
    image_pages: int = IMAGE_PAGES  # pages of one state; 0: a model without states
    num_pages: int = 50_000
    interval: int = 3200  # tokens between the ladder's checkpoints
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    seed: int = 0


@dataclass
class ReuseRow:
    """One workload under one policy. Tokens are of prompts."""

    workload: str
    policy: str
    shift: int  # tokens by which every prompt is longer
    num_tokens: int
    num_reused: int
    num_ideal: int  # in whole pages that an earlier request had computed, but for each prompt's last token
    misses: dict[str, int]
    num_saved: int  # checkpoints
    num_evicted: int
    page_size: int
    image_pages: int
    num_pages: int

    @property
    def of_ideal(self) -> float | None:
        return self.num_reused / self.num_ideal if self.num_ideal else None


@dataclass
class FirstTokenRow:
    """Seconds from the request to its first token, once per round."""

    model: str
    prompt_tokens: int
    reused_tokens: int  # of the warm prompt
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return statistics.median(self.cold_s) / statistics.median(self.warm_s)


@dataclass(frozen=True)
class Turn:
    """One request; those of one wave arrive together, and the next wave when all of them are done."""

    prompt: list[int]
    num_outputs: int


class Replay:
    """Runs requests through a scheduler and its prefix cache, with made-up tokens for a model's."""

    def __init__(self, options: ReuseOptions, policies: frozenset[str]) -> None:
        slots = SlotLedger(options.max_num_seqs) if options.image_pages else None
        config = SchedulerConfig(
            page_size=options.page_size,
            max_model_len=(options.num_pages - 1 - options.image_pages) * options.page_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_caching=True,
            image_pages=options.image_pages,
            checkpoint_interval=options.interval,
            checkpoint_policies=policies,
        )
        self.scheduler = Scheduler(config, PageLedger(options.num_pages), slots)
        self._random = random.Random(options.seed)
        self._next_id = 0

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    def serve(self, wave: list[Turn]) -> list[Request]:
        live: dict[int, Request] = {}
        for turn in wave:
            request = Request(self._next_id, turn.prompt, SamplingParams(max_tokens=turn.num_outputs), 0, turn.num_outputs)
            self._next_id += 1
            live[request.request_id] = request
            self.scheduler.add(request)
        served = list(live.values())
        while self.scheduler.has_work:
            step = self.scheduler.schedule()
            self.scheduler.commit(step, live)
            for row in step.rows:
                request = live[row.request_id]
                if row.sample is not None:
                    request.output_token_ids.append(self._random.randrange(VOCAB))
                    if len(request.output_token_ids) >= request.max_tokens:
                        self.scheduler.finish(request)
        return served


def chat(replay: Replay, shift: int) -> Iterator[list[Request]]:
    """8 turns of 60 tokens after a system prompt of 500, answers of 150."""
    tokens = replay.tokens(500 + shift)
    for _ in range(8):
        [request] = served = replay.serve([Turn(tokens + replay.tokens(60), 150)])
        yield served
        tokens = request.prompt_token_ids + request.output_token_ids


def shared_at_once(replay: Replay, shift: int) -> Iterator[list[Request]]:
    """64 requests of one prefix of 2,000 tokens and 100 of their own, all at the same time."""
    prefix = replay.tokens(2000 + shift)
    yield replay.serve([Turn(prefix + replay.tokens(100), 32) for _ in range(64)])


def shared_in_turn(replay: Replay, shift: int) -> Iterator[list[Request]]:
    """The same 64, one after the other."""
    prefix = replay.tokens(2000 + shift)
    for _ in range(64):
        yield replay.serve([Turn(prefix + replay.tokens(100), 32)])


def same_prompt(replay: Replay, shift: int) -> Iterator[list[Request]]:
    """One prompt of 2,000 tokens, 8 times."""
    prompt = replay.tokens(2000 + shift)
    for _ in range(8):
        yield replay.serve([Turn(prompt, 32)])


WORKLOADS = {"chat": chat, "shared at once": shared_at_once, "shared in turn": shared_in_turn, "same prompt": same_prompt}


def policies_of(name: str) -> frozenset[str]:
    return frozenset(CHECKPOINT_POLICIES) if name == "all" else frozenset([name])


def run_reuse(options: ReuseOptions, policies: tuple[str, ...] = ("all", *CHECKPOINT_POLICIES), shifts: tuple[int, ...] = (0,)) -> Iterator[ReuseRow]:
    """Every workload under every policy at every shift of the prompts' length, each in a fresh pool."""
    for workload in WORKLOADS:
        for policy in policies:
            for shift in shifts:
                yield measure(options, workload, policy, shift)


def measure(options: ReuseOptions, workload: str, policy: str, shift: int = 0) -> ReuseRow:
    """One workload under one policy in a fresh pool."""
    replay = Replay(options, policies_of(policy))
    served = [request for wave in WORKLOADS[workload](replay, shift) for request in wave]
    stats = replay.scheduler.cache.stats
    return ReuseRow(
        workload,
        policy,
        shift,
        num_tokens=stats.num_queries,
        num_reused=stats.num_hits,
        num_ideal=ideal_tokens(served, options.page_size),
        misses={reason.value: count for reason, count in sorted(stats.misses.items())},
        num_saved=stats.num_saved_checkpoints,
        num_evicted=stats.num_evicted_checkpoints,
        page_size=options.page_size,
        image_pages=options.image_pages,
        num_pages=options.num_pages,
    )


def ideal_tokens(served: list[Request], page_size: int) -> int:
    """Prompt tokens in whole pages that an earlier request had, each prompt's last token excepted."""
    total, known = 0, set[tuple[int, ...]]()
    for request in served:
        prompt = request.prompt_token_ids
        shared = 0
        while shared + page_size < len(prompt) and tuple(prompt[: shared + page_size]) in known:
            shared += page_size
        total += shared
        computed = (prompt + request.output_token_ids)[:-1]
        known.update(tuple(computed[:end]) for end in range(page_size, len(computed) + 1, page_size))
    return total


def time_first_token(llm: "LLM", model: str, prompt: list[int], rounds: int) -> FirstTokenRow:
    """A prompt without anything to reuse and again at once, interleaved, after one round that warms the kernels up."""
    row = FirstTokenRow(model, len(prompt), 0)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for i_round in range(rounds + 1):
        llm.reset_prefix_cache()
        for times in (row.cold_s, row.warm_s):
            begin = time.perf_counter()
            [output] = llm.generate([prompt], params)
            if i_round:
                times.append(time.perf_counter() - begin)
        row.reused_tokens = output.num_cached_tokens
    return row


def report_lines(rows: list[ReuseRow]) -> list[str]:
    """One line per workload and policy; over several shifts the least and the largest share of the ideal."""
    lines = []
    for workload, policy in dict.fromkeys((row.workload, row.policy) for row in rows):
        group = [row for row in rows if (row.workload, row.policy) == (workload, policy)]
        first, shares = group[0], [row.of_ideal for row in group if row.of_ideal is not None]
        missed = ", ".join(f"{reason} {count}" for reason, count in first.misses.items())
        line = f"{workload:<15} {policy:<7} {first.num_reused:>7} of {first.num_tokens} prompt tokens reused, {first.of_ideal or 0:7.1%} of the ideal"
        if len(group) > 1:
            line += f" ({min(shares):.1%} to {max(shares):.1%} over {len(group)} lengths)"
        lines.append(f"{line}; {first.num_saved} states kept, {first.num_evicted} evicted; missed: {missed or 'none'}")
    return lines
