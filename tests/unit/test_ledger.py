"""The books of the pool: what each call promises, and that every line of `check` has been seen to fail."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from atoll.errors import ConfigError, OutOfPagesError, PoolCorruptError, PoolError
from atoll.kv.ledger import NULL_PAGE, PageClass, PageLedger


def state(ledger: PageLedger) -> tuple[object, ...]:
    """Everything that the books say, to see that a refused call changed nothing."""
    pages = range(ledger.num_pages)
    return list(ledger._free), [ledger.page_class(page) for page in pages], [ledger.ref_count(page) for page in pages]


def test_importing_the_ledger_imports_no_torch() -> None:
    code = "import sys, atoll.kv.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_new_ledger_has_every_page_free_but_the_null_page() -> None:
    ledger = PageLedger(5)
    ledger.check(held=[])
    assert (ledger.num_pages, ledger.num_usable, ledger.num_free) == (5, 4, 4)
    assert [ledger.page_class(page) for page in range(5)] == ["null", "free", "free", "free", "free"]


def test_pages_live_from_allocate_to_the_last_release() -> None:
    ledger = PageLedger(6)
    pages = ledger.allocate(2)
    assert [ledger.page_class(page) for page in pages] == [PageClass.KV] * 2
    ledger.retain(pages)
    ledger.release(pages)
    assert [ledger.ref_count(page) for page in pages] == [1, 1]
    assert ledger.num_free == 3
    ledger.release(pages)
    assert [ledger.page_class(page) for page in pages] == [PageClass.FREE] * 2
    assert ledger.num_free == 5
    ledger.check(held=[])


def test_a_page_named_twice_counts_twice() -> None:
    ledger = PageLedger(3)
    (page,) = ledger.allocate(1)
    ledger.retain([page, page])
    assert ledger.ref_count(page) == 3
    ledger.release([page, page, page])
    assert ledger.page_class(page) is PageClass.FREE
    ledger.check(held=[])


def test_the_null_page_is_never_handed_out() -> None:
    ledger = PageLedger(8)
    for _ in range(3):
        pages = ledger.allocate(ledger.num_free)
        assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
        ledger.release(pages)


def test_order_is_deterministic_and_a_run_comes_back_as_it_was() -> None:
    ledger = PageLedger(10)
    first, second = ledger.allocate(3), ledger.allocate(2)
    assert (first, second) == ([1, 2, 3], [4, 5])
    ledger.release(first)
    assert ledger.allocate(4) == [1, 2, 3, 6]


def test_allocating_nothing_is_fine_even_when_nothing_is_free() -> None:
    ledger = PageLedger(2)
    ledger.allocate(1)
    assert ledger.allocate(0) == []


def test_too_large_a_request_takes_nothing() -> None:
    ledger = PageLedger(6)
    ledger.allocate(2)
    before = state(ledger)
    with pytest.raises(OutOfPagesError, match="4 pages were asked for, 3 of 5 are free; finish or preempt a sequence, or make a larger pool"):
        ledger.allocate(4)
    with pytest.raises(PoolError, match="-1 pages were asked for, which is below 0"):
        ledger.allocate(-1)
    assert state(ledger) == before


@pytest.mark.parametrize("method", ["retain", "release"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (NULL_PAGE, "page 0 is the null page and cannot be {method}"),
        (4, "page 4 is free and cannot be {method}"),
        (-1, "page -1 is outside 0 to 5"),
        (6, "page 6 is outside 0 to 5"),
    ],
)
def test_a_bad_page_is_named_and_nothing_changes(method: str, bad: int, message: str) -> None:
    ledger = PageLedger(6)
    pages = ledger.allocate(3)
    before = state(ledger)
    past = {"retain": "retained", "release": "released"}[method]
    with pytest.raises(PoolError, match=message.format(method=past)):
        getattr(ledger, method)([*pages, bad])
    assert state(ledger) == before


def test_double_free_is_caught_in_two_calls_and_in_one() -> None:
    ledger = PageLedger(4)
    pages = ledger.allocate(2)
    before = state(ledger)
    with pytest.raises(PoolError, match="page 2 is released 2 times in one call, it has 1 references"):
        ledger.release([*pages, pages[-1]])
    assert state(ledger) == before
    ledger.release(pages)
    with pytest.raises(PoolError, match="page 1 is free and cannot be released; it was given back before"):
        ledger.release(pages)
    ledger.check(held=[])


@pytest.mark.parametrize("page", [-1, 4])
def test_asking_about_a_foreign_id_is_refused(page: int) -> None:
    ledger = PageLedger(4)
    for ask in (ledger.page_class, ledger.ref_count):
        with pytest.raises(PoolError, match=f"page {page} is outside 0 to 3"):
            ask(page)


def test_a_holder_of_a_foreign_id_is_refused() -> None:
    with pytest.raises(PoolError, match="page 4 is outside 0 to 3"):
        PageLedger(4).check(held=[4])


@pytest.mark.parametrize(
    ("num_pages", "message"),
    [(1, "num_pages 1 is below 2; page 0 is the null page"), (-3, "num_pages -3 is below 2"), (2**31 + 1, "num_pages 2147483649 is above 2147483648")],
)
def test_a_size_that_cannot_work_is_refused(num_pages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageLedger(num_pages)


def _set(table: str, page: int, value: object) -> Callable[[PageLedger], None]:
    def corrupt(ledger: PageLedger) -> None:
        getattr(ledger, table)[page] = value

    return corrupt


# The ledger under corruption: page 0 null, pages 1 and 2 held once, pages 3 to 5 free.
CORRUPTIONS: dict[str, tuple[Callable[[PageLedger], None], str]] = {
    "a table was cut": (lambda ledger: ledger._ref_counts.pop(), "there are 5 reference counts for 6 pages"),
    "null page on the free list": (lambda ledger: ledger._free.append(NULL_PAGE), "page 0 is on the free list, which may hold 1 to 5"),
    "foreign page on the free list": (lambda ledger: ledger._free.append(6), "page 6 is on the free list"),
    "page freed twice": (lambda ledger: ledger._free.append(4), "page 4 is 2 times on the free list"),
    "held page on the free list": (lambda ledger: ledger._free.append(1), "page 1 is of class kv and on the free list"),
    "free page fell off the free list": (lambda ledger: ledger._free.remove(4), "page 4 is of class free and off the free list"),
    "null page handed out": (_set("_classes", 0, PageClass.KV), "page 0 is of class kv; page 0, and no other, is the null page"),
    "second null page": (_set("_classes", 2, PageClass.NULL), "page 2 is of class null; page 0, and no other, is the null page"),
    "null page with a reference": (_set("_ref_counts", 0, 1), "page 0 is of class null with 1 references"),
    "free page with a reference": (_set("_ref_counts", 3, 1), "page 3 is of class free with 1 references"),
    "held page without a reference": (_set("_ref_counts", 2, 0), "page 2 is of class kv with 0 references"),
    "negative references": (_set("_ref_counts", 3, -1), "page 3 is of class free with -1 references"),
    "reference nobody holds": (_set("_ref_counts", 2, 2), "page 2 has 2 references, its holders count 1; a reference was lost"),
    "released behind a holder's back": (lambda ledger: ledger.release([2]), "page 2 has 0 references, its holders count 1; it was released behind"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_finds(name: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    ledger = PageLedger(6)
    held = ledger.allocate(2)
    ledger.check(held)
    corrupt(ledger)
    with pytest.raises(PoolCorruptError, match=message):
        ledger.check(held)


def test_an_image_lives_and_goes_whole() -> None:
    ledger = PageLedger(8)
    row_pages, image = ledger.allocate(2), ledger.allocate_image(3)
    assert [ledger.page_class(page) for page in image] == [PageClass.IMAGE] * 3
    ledger.check(held=[*row_pages, *image])
    before = state(ledger)
    for pages in (image[:2], image[1:], image[::-1], (*image, row_pages[0]), row_pages, ()):
        with pytest.raises(PoolError, match="are not one image's; release what allocate_image returned, whole and once"):
            ledger.release_image(pages)
    for call in (ledger.retain, ledger.release):
        with pytest.raises(PoolError, match=f"page {image[0]} is an image's and cannot be re"):
            call([row_pages[0], image[0]])
    assert state(ledger) == before
    ledger.release_image(image)
    with pytest.raises(PoolError, match="are not one image's"):
        ledger.release_image(image)
    assert ledger.num_free == 5
    ledger.check(held=row_pages)


def test_an_image_of_nothing_or_of_too_much_is_refused() -> None:
    ledger = PageLedger(4)
    with pytest.raises(PoolError, match="an image of 0 pages was asked for, 1 is the least"):
        ledger.allocate_image(0)
    with pytest.raises(OutOfPagesError, match="4 pages were asked for, 3 of 3 are free"):
        ledger.allocate_image(4)
    ledger.check(held=())


@pytest.mark.parametrize(
    "harm",
    [
        lambda ledger, image: ledger._images.clear(),
        lambda ledger, image: ledger._images.update({7: (7, image[0])}),
        lambda ledger, image: ledger._classes.__setitem__(image[0], PageClass.KV),
        lambda ledger, image: ledger._ref_counts.__setitem__(image[0], 2),
    ],
)
def test_check_finds_a_harmed_image(harm: Callable[[PageLedger, tuple[int, ...]], None]) -> None:
    ledger = PageLedger(8)
    image = ledger.allocate_image(2)
    ledger.check(held=image)
    harm(ledger, image)
    with pytest.raises(PoolCorruptError, match=r"images|with 2 references"):
        ledger.check()
