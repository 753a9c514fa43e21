"""The eviction queue: lowest priority first, least recently used among equals, ageing, and the same as a plain list under random use."""

import random

from atoll.kv.eviction import EvictionQueue, Stamp


def test_of_equal_worth_the_least_recently_used_goes_first() -> None:
    queue: EvictionQueue[str] = EvictionQueue()
    for item in "abc":
        queue.put(item, queue.stamp(1))
    queue.put("a", queue.stamp(1))
    assert [queue.pop() for _ in range(4)] == ["b", "c", "a", None]


def test_what_is_worth_more_stays_until_the_floor_has_passed_it() -> None:
    queue: EvictionQueue[str] = EvictionQueue()
    queue.put("dear", queue.stamp(3.5))
    gone = []
    for number in range(6):
        queue.put(f"cheap {number}", queue.stamp(1))
        gone.append(queue.pop())
    assert gone == ["cheap 0", "cheap 1", "cheap 2", "dear", "cheap 3", "cheap 4"]


def test_a_limit_keeps_what_is_above_it() -> None:
    queue: EvictionQueue[str] = EvictionQueue()
    queue.put("a", queue.stamp(2))
    assert queue.pop(limit=1.9) is None and "a" in queue and queue.floor == 0
    assert queue.pop(limit=2) == "a" and queue.floor == 2


def test_a_discarded_item_is_not_found_and_may_come_back() -> None:
    queue: EvictionQueue[str] = EvictionQueue()
    stamp = queue.stamp(1)
    queue.put("a", stamp)
    queue.discard("a")
    queue.discard("a")
    assert len(queue) == 0 and queue.pop() is None
    queue.put("a", stamp)
    queue.put("a", stamp)
    assert (queue.pop(), queue.pop()) == ("a", None)


def test_random_use_equals_a_plain_list() -> None:
    rng, queue = random.Random(0), EvictionQueue[int]()
    plain: dict[int, Stamp] = {}
    for _ in range(5000):
        item, action = rng.randrange(30), rng.random()
        if action < 0.6:
            plain[item] = queue.stamp(rng.choice([0, 1, 5]))
            queue.put(item, plain[item])
        elif action < 0.8:
            plain.pop(item, None)
            queue.discard(item)
        else:
            wanted = min(plain, key=plain.__getitem__, default=None)
            assert queue.pop() == wanted
            if wanted is not None:
                del plain[wanted]
        assert len(queue) == len(plain) and len(queue._heap) <= 2 * 30 + 64
