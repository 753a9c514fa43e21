"""A runner without a model: it knows which tokens each page row, state slot and image is of, and fails where a step reads what is of others."""

from collections.abc import Callable
from typing import Any

from atoll.config import SchedulerConfig
from atoll.engine.request import Request
from atoll.engine.reuse import PrefixUse
from atoll.engine.sampling import SamplingParams
from atoll.engine.scheduler import Scheduler
from atoll.engine.step import Step, StepRow
from atoll.kv.guard import ReleaseGuard
from atoll.kv.ledger import NULL_PAGE, PageLedger
from atoll.kv.slot_ledger import SlotLedger

ALPHABET = 3  # tokens: few, so that prompts share beginnings of every length


def contents(request: Request) -> list[int]:
    """What stands for the state after each number of the request's tokens, 0 included; two differ where a token or the salt before them does."""
    found = [hash((-1, int.from_bytes(request.prefix.root)))]
    for token in request.prompt_token_ids + request.output_token_ids:
        found.append(hash((found[-1], token)))
    return found


class Shadow:
    """Runs steps on contents instead of tensors: the row of token `t` and the state after it are `contents[t + 1]`."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.rows: dict[int, Any] = {}  # token slot -> content; the pages of an image: its whole content and which part it is
        self.states: dict[int, int | None] = {}

    def execute(self, step: Step, requests: dict[int, Request]) -> None:
        for page in step.metadata.clears:
            self._write_page(page, None)
        for row in step.rows:
            if row.start == 0 and row.state_slot is not None:
                self.states[row.state_slot] = contents(requests[row.request_id])[0]
        for copy in step.restores:
            parts = [self.rows.get(page * self.page_size) for page in copy.pages]
            # Parts of two images, or of an image and of rows, are no state.
            whole = {part[0] for part in parts if isinstance(part, tuple)}
            right = len(whole) == 1 and [part[1] for part in parts if isinstance(part, tuple)] == [*range(len(parts))]
            self.states[copy.state_slot] = whole.pop() if right else None
        for row in step.rows:
            self._run(row, contents(requests[row.request_id]))
        for copy in step.saves:
            for part, page in enumerate(copy.pages):
                self._write_page(page, (self.states.get(copy.state_slot), part))

    def _run(self, row: StepRow, wanted: list[int]) -> None:
        end = row.start + len(row.token_ids)
        assert NULL_PAGE not in row.pages, f"request {row.request_id} was given the null page"
        assert len(row.pages) == -(-end // self.page_size)
        for position in range(row.start):
            found = self.rows.get(row.pages[position // self.page_size] * self.page_size + position % self.page_size)
            assert found == wanted[position + 1], f"request {row.request_id} reads a row at {position} that is not of its tokens"
        if row.state_slot is not None:
            assert self.states.get(row.state_slot) == wanted[row.start], f"request {row.request_id} goes on at {row.start} from a state that is not its own"
            self.states[row.state_slot] = wanted[end]
        for position in range(row.start, end):
            self.rows[row.pages[position // self.page_size] * self.page_size + position % self.page_size] = wanted[position + 1]

    def _write_page(self, page: int, content: object) -> None:
        assert page != NULL_PAGE, "the null page was written"
        for offset in range(self.page_size):
            self.rows[page * self.page_size + offset] = content


class ShadowEngine:
    """A scheduler, its books and a shadow, driven as the engine drives them; checks everything after everything.

    The guard is on: whoever still counts on a page that was given back reads zeros.
    """

    def __init__(self, num_pages: int = 40, *, num_slots: int | None = 4, image_pages: int = 2, **options: Any) -> None:
        defaults: dict[str, Any] = {"page_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "prefill_grid": 8}
        config = SchedulerConfig(**{**defaults, "prefix_caching": True, "image_pages": image_pages, **options})
        guard = ReleaseGuard()
        self.scheduler = Scheduler(config, PageLedger(num_pages, guard.released), SlotLedger(num_slots) if num_slots is not None else None, guard)
        self.shadow = Shadow(config.page_size)
        self.live: dict[int, Request] = {}
        self.finished: list[Request] = []
        self._next_id = 0

    def add(self, prompt: list[int], max_tokens: int = 4, salt: str | None = None) -> Request:
        max_tokens = min(max_tokens, self.scheduler.config.max_model_len - len(prompt))
        request = Request(self._next_id, prompt, SamplingParams(max_tokens=max_tokens), 0, max_tokens, prefix=PrefixUse.of_salt(salt))
        self._next_id += 1
        self.live[request.request_id] = request
        self.scheduler.add(request)
        return request

    def step(self, before_run: Callable[[], None] = lambda: None, before_commit: Callable[[], None] = lambda: None) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.check()
        assert step.rows, "a step without rows while there is work"
        assert step.num_tokens <= self.scheduler.config.max_num_batched_tokens
        before_run()
        self.shadow.execute(step, self.live)
        before_commit()
        self.scheduler.commit(step, self.live)
        self.scheduler.check()
        for row in step.rows:
            request = self.live[row.request_id]
            if row.sample is not None:
                request.output_token_ids.append(contents(request)[-1] % ALPHABET)
                if len(request.output_token_ids) >= request.max_tokens:
                    self.end(request)
        return step

    def end(self, request: Request, *, discard: bool = False) -> None:
        """Finish or abort a request, or fail it."""
        self.scheduler.finish(request, discard=discard)
        self.scheduler.check()
        assert not request.pages and request.state_slot is None and request.num_computed == 0
        del self.live[request.request_id]
        self.finished.append(request)

    def run(self) -> None:
        num_steps = 0
        while self.scheduler.has_work:
            self.step()
            num_steps += 1
            assert num_steps < 1000, "no progress"

    def serve(self, prompt: list[int], max_tokens: int = 4, salt: str | None = None) -> Request:
        request = self.add(prompt, max_tokens, salt)
        self.run()
        return request

    def check_nothing_is_held(self) -> None:
        self.scheduler.check()
        self.scheduler.reset_prefix_cache()
        self.scheduler.ledger.check(held=())
        if self.scheduler.slots is not None:
            self.scheduler.slots.check(held=())
        assert not self.scheduler.cache._expected, "a checkpoint is expected of nobody"


def tokens_of(seed: int, count: int) -> list[int]:
    """A fixed random sequence, the same beginning for every count."""
    found = []
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append((seed >> 33) % ALPHABET)
    return found
