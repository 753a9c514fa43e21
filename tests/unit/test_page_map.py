"""The map of the pool says what the ledger and the prefix cache say, and their checks find a mark that is missing."""

from collections.abc import Callable

import pytest

from atoll.errors import PoolCorruptError
from atoll.kv.ledger import PageClass, PageLedger
from atoll.kv.page_map import LETTERS, PageMap, count_kinds
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_tree import page_digest, root_digest


def cached_prefix(num_pages: int = 8) -> tuple[PrefixCache, list[int]]:
    """A cache whose request holds three pages, the first two of them named."""
    cache = PrefixCache(PageLedger(num_pages), 16)
    root = root_digest(None)
    first = page_digest(root, [1] * 16)
    pages = cache.allocate(3)
    cache.index(root, [first, page_digest(first, [2] * 16)], pages, 0, 2)
    return cache, pages


def check(cache: PrefixCache, pages: list[int]) -> None:
    cache.ledger.check([*pages, *cache.held_pages()])
    cache.check({}, [])


def test_every_class_of_the_ledger_has_a_letter() -> None:
    assert set(LETTERS) == {*PageClass, "indexed"} and len(set(LETTERS.values())) == len(LETTERS)
    assert all(len(letter) == 1 and letter.isascii() and letter not in '"\\' for letter in LETTERS.values())


def test_a_page_from_allocation_to_eviction() -> None:
    cache, pages = cached_prefix()
    assert pages == [1, 2, 3] and cache.ledger.map.text() == "0xxk...."
    image = cache.ledger.allocate_image(2)
    assert cache.ledger.map.text() == "0xxkii.."
    cache.ledger.release_image(image)
    cache.release(pages)
    assert cache.ledger.map.text() == "0xx....."
    # Seven pages are wanted, five are free: both named ones must go.
    everything = cache.allocate(7)
    assert cache.ledger.map.text() == "0kkkkkkk"
    cache.release(everything)
    assert cache.ledger.map.text() == "0......."
    check(cache, [])


def test_a_reset_frees_what_was_named() -> None:
    cache, pages = cached_prefix()
    cache.release(pages)
    cache.reset()
    assert cache.ledger.map.text() == "0......."


def test_counts_add_up_to_the_pool() -> None:
    counts = count_kinds("0xxkii..")
    assert counts == {"null": 1, "indexed": 2, "kv": 1, "image": 2, "free": 2, "leased": 0} and set(counts) == set(LETTERS)


@pytest.mark.parametrize(("lost", "fault"), [("indexed", "0 pages are indexed on the map, 2 are in the tree"), ("kv", "of class kv and free on the map")])
def test_control_a_lost_mark_is_found(lost: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark: Callable[[PageMap, int, str], None] = PageMap.mark
    check(*cached_prefix())
    monkeypatch.setattr(PageMap, "mark", lambda self, page, kind: None if kind == lost else mark(self, page, kind))
    with pytest.raises(PoolCorruptError, match=fault):
        check(*cached_prefix())


def test_control_a_name_too_many_is_found() -> None:
    cache, pages = cached_prefix()
    cache.ledger.map.mark(pages[2], "indexed")
    with pytest.raises(PoolCorruptError, match="3 pages are indexed on the map, 2 are in the tree"):
        check(cache, pages)
