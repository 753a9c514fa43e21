"""What is reused and what is kept: hit counts, reasons, placement and eviction, on the scheduler alone; needs no torch."""

from collections import Counter
from typing import Any

import pytest

from atoll.engine import scheduler
from atoll.engine.request import Request
from atoll.engine.step import Step
from atoll.errors import ConfigError, PoolError
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_stats import MissReason
from tests.engine.shadow import ShadowEngine, tokens_of

PLAIN: dict[str, Any] = {"num_slots": None, "image_pages": 0}


def engine(*policies: str, **options: Any) -> ShadowEngine:
    return ShadowEngine(**{"num_pages": 200, "checkpoint_policies": frozenset(policies), **options})


def cached(request: Request) -> int | None:
    return request.prefix.num_cached_tokens


def misses(request: Request) -> dict[str, int]:
    return {reason.value: count for reason, count in request.prefix.misses.items()}


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["plain", "hybrid"])
@pytest.mark.parametrize(
    ("length", "plain", "hybrid"), [(1, 0, 0), (3, 0, 0), (4, 0, 0), (5, 4, 0), (8, 4, 0), (9, 8, 8), (13, 12, 8), (40, 36, 32), (41, 40, 40)]
)
def test_the_same_prompt_again_computes_its_last_page_only(options: dict[str, Any], length: int, plain: int, hybrid: int) -> None:
    """A hybrid's last chunk: states are kept on the prefill grid, here of 8, two pages."""
    reused = plain if options is PLAIN else hybrid
    e = engine("prompt", **options)
    assert cached(e.serve(tokens_of(1, length))) == 0
    again = e.serve(tokens_of(1, length))
    assert cached(again) == reused
    assert sum(again.prefix.misses.values()) == length - reused


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["plain", "hybrid"])
def test_a_shift_of_the_prompts_length_loses_no_hits(options: dict[str, Any]) -> None:
    """A pool that rounded boundaries to some large unit would hit at some lengths and never at others."""
    sizes = {"page_size": 16, "max_model_len": 512, "max_num_batched_tokens": 160, "prefill_grid": 64, **options}
    e = engine("prompt", num_pages=700, **sizes)
    unit = 16 if options is PLAIN else 64
    rates = []
    for shift in range(0, 101, 4):
        prompt = [shift % 3] * 3 + tokens_of(shift, 180 + shift)
        e.serve(prompt, max_tokens=1)
        again = e.serve(prompt, max_tokens=1)
        rates.append((cached(again) or 0) / len(prompt))
        assert len(prompt) - (cached(again) or 0) <= unit
    assert max(rates) - min(rates) < unit / 180


def test_every_turn_of_a_chat_finds_the_turn_before() -> None:
    e = engine("prompt", "end", page_size=4, max_model_len=256, prefill_grid=8)
    tokens, found = tokens_of(1, 10), []
    for turn in range(8):
        request = e.serve(tokens, max_tokens=17)
        found.append(len(tokens) - (cached(request) or 0))
        tokens = request.prompt_token_ids + request.output_token_ids + tokens_of(100 + turn, 6)
    # The new words, and less than one step of the moving checkpoint.
    assert found[0] == 10 and all(count <= 6 + 16 + 1 for count in found[1:])


def test_the_second_to_share_a_prefix_leaves_a_state_for_the_third() -> None:
    e = engine("demand")
    first, second, third = (e.serve(tokens_of(1, 22) + [own] * 9) for own in range(3))
    assert (cached(first), misses(first)) == (0, {"not_indexed": 31})
    assert (cached(second), misses(second)) == (0, {"no_checkpoint": 20, "not_indexed": 11})
    assert (cached(third), misses(third)) == (16, {"no_checkpoint": 4, "not_indexed": 11})


def test_a_ladder_bounds_what_is_computed_again() -> None:
    e = engine("ladder", checkpoint_interval=16)
    e.serve(tokens_of(1, 50))
    for shared, reused in ((15, 0), (16, 16), (31, 16), (40, 32), (50, 48)):
        assert cached(e.serve(tokens_of(1, shared) + [2, 2, 2][: 60 - shared] + tokens_of(9, 3))) == reused


def test_prefill_pauses_on_wanted_boundaries_and_on_the_grid() -> None:
    e = engine("prompt", "ladder", checkpoint_interval=16)
    request = e.add(tokens_of(1, 47), max_tokens=1)
    rows = []
    while e.scheduler.has_work:
        rows += [(row.start, row.start + len(row.token_ids), bool(step.saves)) for step in [e.step()] for row in step.rows]
    assert rows == [(0, 16, True), (16, 32, True), (32, 40, True), (40, 47, False)] and not request.pages


def test_no_policy_means_no_state_and_no_hit() -> None:
    e = engine("end")
    e.serve(tokens_of(1, 30), max_tokens=1)
    assert misses(e.serve(tokens_of(1, 30), max_tokens=1)) == {"no_checkpoint": 28, "not_indexed": 2}


def test_the_moving_checkpoint_leaves_one_behind_and_spares_what_others_use() -> None:
    e = engine("end", max_model_len=128)
    request = e.add(tokens_of(1, 10), max_tokens=60)
    while request.num_tokens < 50:
        e.step()
    assert e.scheduler.cache.stats.num_saved_checkpoints == 5 and e.scheduler.cache._num_unpinned == 1
    # Another one goes on from there, so it stays when the request moves on.
    beginning = request.prompt_token_ids + request.output_token_ids
    assert cached(e.add([*beginning[:49], 0, 1, 2], max_tokens=1)) is None
    e.run()
    assert cached(e.finished[0]) == 48 and e.scheduler.cache._num_unpinned == 2


def test_a_request_that_is_about_to_leave_a_state_is_a_reason() -> None:
    e = engine("prompt", max_num_batched_tokens=12, prefill_grid=8)
    e.serve(tokens_of(1, 40)[:29])
    # The first has passed 24 already, and goes on to 56 in several steps.
    slow = e.add(tokens_of(1, 60))
    e.step()
    assert cached(slow) == 24
    fast = e.serve([*tokens_of(1, 56), 0, 0])
    assert misses(fast).keys() <= {"not_indexed", "not_yet_copied"}


def test_what_was_evicted_is_a_reason() -> None:
    e = engine("prompt", num_pages=19)
    e.serve(tokens_of(1, 30))
    e.serve(tokens_of(2, 60))
    again = e.serve(tokens_of(1, 30))
    assert cached(again) == 0 and misses(again)["evicted"] == 28


def test_the_last_token_is_always_computed() -> None:
    e = engine(**PLAIN)
    e.serve(tokens_of(1, 16))
    again = e.serve(tokens_of(1, 16))
    assert (cached(again), misses(again)) == (12, {"last_token": 4})


def test_reasons_and_hits_add_up() -> None:
    e = engine("prompt", "end", "demand", "ladder", num_pages=40, checkpoint_interval=16)
    requests = [e.serve(tokens_of(seed % 4, 5 * seed % 50 + 1) + tokens_of(seed, 5)) for seed in range(60)]
    stats = e.scheduler.cache.stats
    total: Counter[MissReason] = Counter()
    for request in requests:
        total += request.prefix.misses
    assert stats.misses == total and stats.num_hits == sum(cached(request) or 0 for request in requests) > 0
    assert stats.num_queries == sum(len(request.prompt_token_ids) for request in requests) == stats.num_hits + total.total()


def test_salts_keep_prefixes_apart() -> None:
    e = engine("prompt")
    prompt = tokens_of(1, 30)
    assert [cached(e.serve(prompt, salt=salt)) for salt in (None, "a", "b", "a", None, "b")] == [0, 0, 0, 24, 24, 24]


def test_twins_end_up_in_the_same_pages() -> None:
    e = engine("prompt", max_num_batched_tokens=64, **PLAIN)
    twins = [e.add(tokens_of(1, 21), max_tokens=8) for _ in range(3)]
    e.step()
    assert twins[0].pages[:5] == twins[1].pages[:5] == twins[2].pages[:5]
    assert len({twin.pages[5] for twin in twins}) == 3, "a page that is not full is its request's own"
    assert e.scheduler.ledger.num_free == 199 - 8


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["plain", "hybrid"])
def test_a_preempted_request_goes_on_from_its_best_checkpoint(options: dict[str, Any]) -> None:
    e = engine("prompt", "end", **options)
    request = e.add(tokens_of(1, 20), max_tokens=30)
    while request.num_tokens < 40:
        e.step()
    e.scheduler.preempt_latest()
    assert request.num_computed == 0 and not request.pages and request.state_slot is None
    [row] = e.step().rows
    # Computed up to 39: all full pages are here, and the moving checkpoint at 32.
    assert row.start == (32 if e.scheduler.slots else 36) == e.scheduler.cache.stats.num_resumed
    e.run()
    assert cached(request) == 0 and request.num_preemptions == 1
    e.check_nothing_is_held()


def test_running_requests_take_what_is_kept_before_anybody_is_preempted() -> None:
    e = engine("prompt", "end", num_pages=40)
    for seed in range(8):
        e.serve(tokens_of(seed, 40))
    assert e.scheduler.ledger.num_free < 20
    requests = [e.add(tokens_of(seed, 30), max_tokens=30) for seed in (20, 21)]
    e.run()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert e.scheduler.cache.stats.num_evicted_checkpoints > 0


def test_a_checkpoint_never_costs_a_running_request_its_pages() -> None:
    # 15 + 1 pages for the one sequence, images of 4: never room for both, but at the start.
    e = engine("prompt", "end", "ladder", checkpoint_interval=8, num_pages=21, image_pages=4)
    requests = [e.add(tokens_of(seed, 30), max_tokens=30) for seed in range(2)]
    e.run()
    stats = e.scheduler.cache.stats
    assert requests[0].num_preemptions == 0 and stats.num_refused_checkpoints + stats.num_evicted_checkpoints > 0


def test_a_full_pool_keeps_what_saves_most() -> None:
    """One long prefix against many short ones that nobody asks for again: the images are equally large, so the long one stays."""
    e = engine("prompt", num_pages=40, image_pages=8)
    e.serve(tokens_of(1, 60), max_tokens=1)
    for seed in range(10, 14):
        e.serve(tokens_of(seed, 9), max_tokens=1)
    assert cached(e.serve(tokens_of(1, 60), max_tokens=1)) == 56


def test_what_is_not_used_goes_in_time_however_much_it_saves() -> None:
    e = engine("prompt", num_pages=40, image_pages=8)
    e.serve(tokens_of(1, 60), max_tokens=1)
    for seed in range(10, 40):
        e.serve(tokens_of(seed, 33), max_tokens=1)
    assert cached(e.serve(tokens_of(1, 60), max_tokens=1)) == 0


def test_of_equal_pages_those_used_longest_ago_go_first() -> None:
    e = engine(num_pages=33, **PLAIN)
    for seed in (1, 2, 3):
        e.serve(tokens_of(seed, 37), max_tokens=1)
    e.serve(tokens_of(1, 37), max_tokens=1)
    e.serve(tokens_of(4, 37), max_tokens=1)
    assert [cached(e.serve(tokens_of(seed, 37), max_tokens=1)) for seed in (1, 3)] == [36, 36]
    assert cached(e.serve(tokens_of(2, 37), max_tokens=1)) != 36


def test_a_request_needs_no_free_pages_for_what_it_shares() -> None:
    # 12 pages of one prompt are held by the first request, and 7 are left for both.
    e = engine("prompt", num_pages=23, image_pages=2, max_model_len=60)
    first = e.add(tokens_of(1, 45), max_tokens=8)
    for _ in range(4):
        e.step()
    second = e.add([*tokens_of(1, 45), 1], max_tokens=4)
    e.step()
    assert second in e.scheduler.running and cached(second) == 40 and first.num_preemptions == 0
    e.run()


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["plain", "hybrid"])
def test_what_a_failed_request_computed_is_not_reused(options: dict[str, Any]) -> None:
    e = engine("prompt", "end", **options)
    e.serve(tokens_of(1, 20))
    other = e.add([*tokens_of(1, 20), 0, 0, 0, 0, 0], max_tokens=30)
    failed = e.add([*tokens_of(1, 20), 2, 2, 2, 2, 2], max_tokens=30)
    for _ in range(12):
        e.step()
    e.end(failed, discard=True)
    # What the other one holds stays, and is right as far as anybody knows.
    assert cached(e.serve([*tokens_of(1, 20), 2, 2, 2, 2, 2])) == (20 if e.scheduler.slots is None else 16) and not other.num_preemptions
    e.run()
    e.check_nothing_is_held()


def test_a_reset_forgets_everything_and_waits_for_nobody() -> None:
    e = engine("prompt")
    request = e.add(tokens_of(1, 20))
    e.step()
    with pytest.raises(PoolError, match="of the prefix cache are in use, 0 is the limit for a reset; finish the requests first"):
        e.scheduler.reset_prefix_cache()
    e.run()
    e.check_nothing_is_held()
    assert cached(e.serve(tokens_of(1, 20))) == 0 == cached(request)


def test_images_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="image_pages 4 and max_model_len 64 do not fit in 19 pages of 4 together; use image_pages 0, or more pages"):
        engine(num_pages=20, image_pages=4)
    # The tightest pool: who restores an image, and fills a whole sequence, is served.
    e = engine("prompt", num_pages=20, image_pages=3)
    requests = [e.serve(tokens_of(1, 50), max_tokens=14) for _ in range(2)]
    assert [cached(request) for request in requests] == [0, 48]


def test_without_prefix_caching_nothing_is_kept() -> None:
    for e in (engine("prompt", prefix_caching=False), engine("prompt", image_pages=0)):
        assert [cached(e.serve(tokens_of(1, 20))) for _ in range(2)] == [None, None]
        e.scheduler.ledger.check(held=())


@pytest.mark.parametrize("moment", ["before_run", "before_commit"])
def test_an_abort_cancels_its_copy(moment: str) -> None:
    e = engine("demand", "prompt")
    e.serve([*tokens_of(1, 20), 0, 1, 2])
    request = e.add([*tokens_of(1, 20), 2, 1, 0])
    step = e.step(**{moment: lambda: e.end(request)})
    assert not step.rows and not step.saves and not step.restores
    assert e.scheduler.cache.stats.num_saved_checkpoints == 1
    e.check_nothing_is_held()


def abort_while_a_copy_is_queued() -> list[int | None]:
    """The second request leaves a state at 16 for the third, but is aborted before the step runs."""
    e = engine("demand")
    e.serve([*tokens_of(1, 20), 0, 1, 2])
    second = e.add([*tokens_of(1, 20), 2, 1, 0])
    e.step(before_run=lambda: e.end(second))
    return [cached(e.serve([*tokens_of(1, 20), 1, 1, last])) for last in (1, 2)]


def test_a_slot_is_freed_after_its_copy_is_cancelled() -> None:
    assert abort_while_a_copy_is_queued() == [0, 16]


def test_control_a_slot_freed_with_a_copy_queued_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def withdraw(step: Step, request: Request) -> None:
        step.prefills[:] = [row for row in step.prefills if row.request_id != request.request_id]

    monkeypatch.setattr(scheduler, "_withdraw", withdraw)
    monkeypatch.setattr(PrefixCache, "cancel", PrefixCache.publish)
    with pytest.raises(AssertionError, match="goes on at 16 from a state that is not its own"):
        abort_while_a_copy_is_queued()


def test_control_a_pin_that_stays_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "unpin", lambda self, checkpoint, hit: None)
    with pytest.raises(PoolError, match="has 1 pins, its readers count 0"):
        test_the_same_prompt_again_computes_its_last_page_only({}, 40, 36, 32)


def test_control_a_checkpoint_that_is_not_replaced_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "replace", lambda self, checkpoint: None)
    with pytest.raises(AssertionError, match="== 1"):
        test_the_moving_checkpoint_leaves_one_behind_and_spares_what_others_use()
