"""Ten thousand random steps of scheduler, prefix cache and pool together, all books recounted after each, every read checked against whose it is."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from atoll.config import CHECKPOINT_POLICIES
from atoll.engine.request import Request
from atoll.engine.reuse import PrefixReuse
from atoll.engine.step import StateCopy, Step
from atoll.errors import PoolError
from atoll.kv.ledger import NULL_PAGE, PageLedger
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_tree import PrefixNode, root_digest
from tests.engine.shadow import Shadow, ShadowEngine, tokens_of

MIN_STEPS = 10_000
STEPS_PER_RUN = 60
RUNS = 260  # hypothesis ends some runs early, so more than MIN_STEPS / STEPS_PER_RUN


KINDS: list[dict[str, Any]] = [
    {"num_slots": None, "image_pages": 0, "num_pages": 18},
    {"image_pages": 1, "num_pages": 20},
    {"image_pages": 3, "num_pages": 30},
]
salts = st.sampled_from([None, None, None, "a"])


class PrefixMachine(RuleBasedStateMachine):
    """Arrivals that share prefixes, chats that go on, aborts at every point of a step, over pools that are always too small."""

    num_steps: ClassVar[int] = 0
    num_hits: ClassVar[int] = 0
    num_evictions: ClassVar[int] = 0
    num_resumed: ClassVar[int] = 0

    @initialize(
        kind=st.sampled_from(
            [{"num_slots": None, "image_pages": 0, "num_pages": 18}, {"image_pages": 1, "num_pages": 20}, {"image_pages": 3, "num_pages": 30}]
        ),
        policies=st.sets(st.sampled_from(CHECKPOINT_POLICIES), min_size=1),
        interval=st.sampled_from([-1, 8, 16]),
        page_size=st.sampled_from([2, 4]),
    )
    def begin(self, kind: dict[str, Any], policies: set[str], interval: int, page_size: int) -> None:
        sizes = kind | {"page_size": page_size, "max_model_len": 16 * page_size}
        self.engine = ShadowEngine(checkpoint_policies=frozenset(policies), checkpoint_interval=interval, **sizes)
        self.limit = 16 * page_size
        self.adds = 0

    @precondition(lambda self: len(self.engine.live) < 8)
    @rule(
        seed=st.integers(0, 2), shared=st.integers(0, 50), own=st.integers(1, 12), max_tokens=st.integers(1, 30), salt=st.sampled_from([None, None, None, "a"])
    )
    def add(self, seed: int, shared: int, own: int, max_tokens: int, salt: str | None) -> None:
        self.adds += 1
        self.engine.add((tokens_of(seed, shared) + tokens_of(self.adds, own))[: self.limit - 1], max_tokens, salt)

    @precondition(lambda self: self.engine.finished)
    @rule(which=st.integers(0, 1 << 16), own=st.integers(1, 10), max_tokens=st.integers(1, 30))
    def go_on(self, which: int, own: int, max_tokens: int) -> None:
        last = self.engine.finished[which % len(self.engine.finished)]
        self.engine.add((last.prompt_token_ids + last.output_token_ids + tokens_of(which, own))[: self.limit - 1], max_tokens)

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.scheduler.has_work:
                self.engine.step()

    @precondition(lambda self: self.engine.live)
    @rule(which=st.integers(0, 1 << 16), when=st.sampled_from(["between steps", "before the run", "before the commit"]))
    def abort(self, which: int, when: str) -> None:
        def end_one() -> None:
            live = list(self.engine.live.values())
            self.engine.end(live[which % len(live)], discard=which % 3 == 0)

        if when == "between steps":
            end_one()
        elif when == "before the run":
            self.engine.step(before_run=end_one)
        else:
            self.step_that_loses_one(which)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        """While the cache has something left to evict too: then the request may find its own checkpoint again."""
        self.engine.scheduler.preempt_latest()

    def step_that_loses_one(self, which: int) -> None:
        """A request ends after the step ran: its rows are withdrawn, so the commit does not name it."""
        live = list(self.engine.live.values())
        self.engine.step(before_commit=lambda: self.engine.end(live[which % len(live)]))

    @rule(reset=st.booleans())
    def drain(self, reset: bool) -> None:
        self.engine.run()
        assert not self.engine.live
        if reset:
            self.engine.check_nothing_is_held()

    @invariant()
    def books_agree(self) -> None:
        type(self).num_steps += 1
        engine = getattr(self, "engine", None)
        if engine is None:
            return
        engine.scheduler.check()
        for request in engine.scheduler.waiting:
            assert not request.pages and request.num_computed == 0 and request.state_slot is None
            assert request.prefix.reserved is None and request.prefix.restore is None and not request.prefix.wanted
        order = [request.request_id for request in [*engine.scheduler.running, *engine.scheduler.waiting]]
        assert order == sorted(order)
        stats = engine.scheduler.cache.stats
        assert stats.num_queries == stats.num_hits + stats.misses.total()

    def teardown(self) -> None:
        self.engine.run()
        self.engine.check_nothing_is_held()
        stats = self.engine.scheduler.cache.stats
        type(self).num_hits += stats.num_hits
        type(self).num_evictions += stats.num_evicted_checkpoints
        type(self).num_resumed += stats.num_resumed


def run_machine(machine: type[PrefixMachine]) -> None:
    # Not shrunk: that takes minutes, and a run is short enough to be read.
    quick = settings(
        max_examples=RUNS,
        stateful_step_count=STEPS_PER_RUN,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=quick)


@pytest.mark.slow
def test_ten_thousand_random_steps() -> None:
    class Counted(PrefixMachine):
        pass

    run_machine(Counted)
    assert Counted.num_steps >= MIN_STEPS
    assert Counted.num_hits > 5_000 and Counted.num_evictions > 100 and Counted.num_resumed > 1000, "what is to be tried hardly occurred"


# Negative controls: each brings one fault back, and the machine must find it.


def published_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    """A step's copies run after the next step's forward pass, though its commit has published them."""
    execute = Shadow.execute
    late: dict[int, list[StateCopy]] = {}

    def deferred(self: Shadow, step: Step, requests: dict[int, Request]) -> None:
        saves, step.saves[:] = list(step.saves), late.pop(id(self), [])
        late[id(self)] = saves
        execute(self, step, requests)

    patch.setattr(Shadow, "execute", deferred)


def one_chunk_late(patch: pytest.MonkeyPatch) -> None:
    """The state is named after the boundary before its own."""
    reserve = PrefixCache.reserve
    patch.setattr(PrefixCache, "reserve", lambda self, digests: reserve(self, digests[:-1] or digests))


def restored_into_the_wrong_slot(patch: pytest.MonkeyPatch) -> None:
    admit = PrefixReuse.admit

    def neighbour(self: PrefixReuse, request: Request, step: Step) -> None:
        known = len(step.restores)
        admit(self, request, step)
        step.restores[known:] = [StateCopy((copy.state_slot + 1) % 4, copy.pages) for copy in step.restores[known:]]

    patch.setattr(PrefixReuse, "admit", neighbour)


def not_cancelled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "cancel", lambda self, checkpoint: None)


def null_page_handed_out(patch: pytest.MonkeyPatch) -> None:
    allocate = PageLedger.allocate
    patch.setattr(PageLedger, "allocate", lambda self, count: [NULL_PAGE, *allocate(self, count)[1:]] if count == 3 else allocate(self, count))


def evicted_from_the_front(patch: pytest.MonkeyPatch) -> None:
    """Any page that no request holds may go, though others come after it."""

    def offer(self: PrefixCache, node: PrefixNode) -> None:
        if not (node.is_held or node.checkpoint):
            self._queue.put(node, node.stamp)

    patch.setattr(PrefixCache, "_offer", offer)


def unpinned_while_read(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose restore is scheduled may be evicted, and its pages written, before the restore runs."""
    patch.setattr(PrefixCache, "pin", lambda self, checkpoint: None)
    patch.setattr(PrefixCache, "unpin", lambda self, checkpoint, hit: None)
    patch.setattr(PrefixCache, "check", lambda self, pins, reserved: None)


def salt_forgotten(patch: pytest.MonkeyPatch) -> None:
    name_pages = PrefixReuse._name_pages

    def unsalted(self: PrefixReuse, request: Request, count: int) -> None:
        root, request.prefix.root = request.prefix.root, root_digest(None)
        name_pages(self, request, count)
        request.prefix.root = root

    patch.setattr(PrefixReuse, "_name_pages", unsalted)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    published_before_its_copy: "from a state that is not its own",
    one_chunk_late: "from a state that is not its own",
    restored_into_the_wrong_slot: "from a state that is not its own",
    not_cancelled: "one was neither published nor cancelled",
    null_page_handed_out: "the null page|page 0 has 0 references, its holders count 1",
    evicted_from_the_front: "is in the queue of what may be evicted",
    unpinned_while_read: "from a state that is not its own",
    salt_forgotten: "is not of its tokens|from a state that is not its own",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_control_the_machine_finds(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(PrefixMachine):
        def teardown(self) -> None:
            """The steps themselves must find the fault."""

    fault(monkeypatch)
    with pytest.raises((PoolError, AssertionError), match=FAULTS[fault]):
        run_machine(Faulty)
