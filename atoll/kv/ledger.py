"""The books of the pool: the class and reference count of every page; knows no tensor, no layout and no request."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from atoll.errors import ConfigError, OutOfPagesError, PoolCorruptError, PoolError
from atoll.kv.page_map import PageMap

NULL_PAGE = 0  # named by every padded lane of a page table; never handed out
MAX_PAGES = 2**31  # page tables are int32


class PageClass(StrEnum):
    """What a page is for, exactly one at a time."""

    NULL = "null"
    FREE = "free"
    KV = "kv"  # held by reference count
    IMAGE = "image"  # one of the pages of a page image: one holder, given back with all the others
    LEASED = "leased"  # a load in flight may still write it: one holder, and nobody reads it


def check_num_pages(num_pages: int) -> None:
    """Raise ConfigError for a size that no pool can have."""
    if num_pages < 2:
        raise ConfigError(f"num_pages {num_pages} is below 2; page 0 is the null page, so give at least one page more")
    if num_pages > MAX_PAGES:
        raise ConfigError(f"num_pages {num_pages} is above {MAX_PAGES}, the ids that an int32 page table can name; use a larger page_size")


class PageLedger:
    """Who holds which of `num_pages` pages.

    A new kv page has one reference; `retain` adds one, `release` takes one away, and the last release frees the page. The pages of an image have one reference
    each and are neither retained nor released one by one: `allocate_image` and `release_image` move all of them. Leased pages have one reference each as well;
    they become rows (`adopt`), an image (`adopt_image`), or free (`release_leased`) when what writes them has ended.
    Every call checks all its arguments first, so a call that raises has changed nothing. Each costs O(1) per page named.
    The same calls give the same page ids.

    `on_free` is told of every page that becomes free, when it does.

    Raises ConfigError for a bad `num_pages`.
    """

    def __init__(self, num_pages: int, on_free: Callable[[int], None] | None = None) -> None:
        check_num_pages(num_pages)
        self._on_free = on_free
        # The class follows from the other two tables; it is kept apart so that check() has two accounts to compare.
        self._classes: list[PageClass] = [PageClass.NULL] + [PageClass.FREE] * (num_pages - 1)
        self._ref_counts: list[int] = [0] * num_pages
        self.map = PageMap(num_pages)
        self._images: dict[int, tuple[int, ...]] = {}  # an image's first page -> all of its pages, in order
        # A stack, next page last. Nothing in a free page is worth keeping, so the page touched last goes out first: its lines are warmest, and a pool larger
        # than its traffic leaves the rest of its memory alone. (Pages that are worth keeping would want the opposite order, and a queue of their own.)
        self._free: list[int] = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_pages(self) -> int:
        """All pages, the null page included."""
        return len(self._classes)

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out at all: every one but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def page_class(self, page: int) -> PageClass:
        self._check_id(page)
        return self._classes[page]

    def ref_count(self, page: int) -> int:
        """References held on a page: 0 for a free page and for the null page."""
        self._check_id(page)
        return self._ref_counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out `num_pages` free pages for rows, each with one reference: all of them, or none.

        Raises OutOfPagesError when fewer are free.
        """
        return self._take(num_pages, PageClass.KV)

    def allocate_image(self, num_pages: int) -> tuple[int, ...]:
        """Hand out `num_pages` free pages, at least one, for one page image: all of them, or none.

        Raises OutOfPagesError when fewer are free.
        """
        if num_pages < 1:
            raise PoolError(f"an image of {num_pages} pages was asked for, 1 is the least; a model without states has no image")
        pages = tuple(self._take(num_pages, PageClass.IMAGE))
        self._images[pages[0]] = pages
        return pages

    def release_image(self, pages: Sequence[int]) -> None:
        """Free an image's pages. Raises PoolError for anything but all pages of one image, in order."""
        if not pages or self._images.get(pages[0]) != tuple(pages):
            raise PoolError(f"pages {list(pages)} are not one image's; release what allocate_image returned, whole and once")
        del self._images[pages[0]]
        self._free_pages(pages)

    def allocate_leased(self, num_pages: int) -> list[int]:
        """Hand out `num_pages` free pages for a load to write: all of them, or none.

        Raises OutOfPagesError when fewer are free.
        """
        return self._take(num_pages, PageClass.LEASED)

    def adopt(self, pages: Sequence[int]) -> None:
        """Make leased pages pages of rows, each with one reference. Raises PoolError when any of them is not leased."""
        self._check_leased(pages)
        for page in pages:
            self._set_held(page, PageClass.KV)

    def adopt_image(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Make leased pages one image's, in this order; returns what `release_image` takes. Raises PoolError when one is not leased, or none is given."""
        self._check_leased(pages)
        if not pages:
            raise PoolError("an image of 0 pages was to be adopted, 1 is the least; a model without states has no image")
        for page in pages:
            self._set_held(page, PageClass.IMAGE)
        self._images[pages[0]] = tuple(pages)
        return self._images[pages[0]]

    def release_leased(self, pages: Sequence[int]) -> None:
        """Free leased pages. Raises PoolError when any of them is not leased."""
        self._check_leased(pages)
        self._free_pages(pages)

    def _take(self, num_pages: int, page_class: PageClass) -> list[int]:
        if num_pages < 0:
            raise PoolError(f"{num_pages} pages were asked for, which is below 0; ask for 0 or more")
        if num_pages > self.num_free:
            raise OutOfPagesError(
                f"{num_pages} pages were asked for, {self.num_free} of {self.num_usable} are free; finish or preempt a sequence, or make a larger pool"
            )
        start = self.num_free - num_pages
        pages = self._free[start:][::-1]
        del self._free[start:]
        for page in pages:
            self._set_held(page, page_class)
            self._ref_counts[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one reference for each time a page is named.

        Raises PoolError when any of them is free, an image's, the null page, or no page at all.
        """
        for page in pages:
            self._check_held(page, "retained")
        for page in pages:
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take away one reference for each time a page is named; a page without references is free.

        Raises PoolError when any of them is free, an image's, the null page, no page at all, or named more often than it is held.
        """
        for page, times in Counter(pages).items():
            self._check_held(page, "released")
            if times > self._ref_counts[page]:
                raise PoolError(f"page {page} is released {times} times in one call, it has {self._ref_counts[page]} references; release each reference once")
        self._free_pages(pages)

    def _free_pages(self, pages: Sequence[int]) -> None:
        # Backwards, so that a run of pages given back goes out again in its own order: neighbours stay neighbours, and one copy can move them.
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._set_free(page)

    def _set_held(self, page: int, page_class: PageClass) -> None:
        self._classes[page] = page_class
        self.map.mark(page, page_class)

    def _set_free(self, page: int) -> None:
        """The one way by which a page becomes free, so that no release escapes `on_free`."""
        self._classes[page] = PageClass.FREE
        self._free.append(page)
        self.map.mark(page, PageClass.FREE)
        if self._on_free is not None:
            self._on_free(page)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Recount everything from scratch.

        `held`, when given, names a page once for every reference that somebody holds; the books must agree, so a page that nobody gave back is found too.

        Raises PoolCorruptError at the first disagreement.
        """
        if len(self._ref_counts) != self.num_pages:
            raise PoolCorruptError(f"there are {len(self._ref_counts)} reference counts for {self.num_pages} pages; a table was resized")
        on_free = Counter(self._free)
        for page, times in on_free.items():
            if not NULL_PAGE < page < self.num_pages:
                raise PoolCorruptError(f"page {page} is on the free list, which may hold 1 to {self.num_pages - 1}; the null page and foreign ids stay off it")
            if times > 1:
                raise PoolCorruptError(f"page {page} is {times} times on the free list, once is the limit; it was freed twice")
        for page, (page_class, refs) in enumerate(zip(self._classes, self._ref_counts, strict=True)):
            self._check_page(page, page_class, refs, page in on_free)
        self._check_images()
        self._check_map()
        if held is not None:
            self._check_held_by(Counter(held))

    def _check_page(self, page: int, page_class: PageClass, refs: int, on_free: bool) -> None:
        if (page == NULL_PAGE) != (page_class is PageClass.NULL):
            raise PoolCorruptError(f"page {page} is of class {page_class}; page {NULL_PAGE}, and no other, is the null page")
        is_held = page_class in (PageClass.KV, PageClass.IMAGE, PageClass.LEASED)
        if (refs >= 1) != is_held or refs < 0 or (is_held and page_class is not PageClass.KV and refs != 1):
            raise PoolCorruptError(f"page {page} is of class {page_class} with {refs} references; kv pages have at least 1, image and leased pages 1, others 0")
        if on_free != (page_class is PageClass.FREE):
            where = "on" if on_free else "off"
            raise PoolCorruptError(f"page {page} is of class {page_class} and {where} the free list; free pages, and no others, are on it")

    def _check_images(self) -> None:
        in_images = Counter(page for pages in self._images.values() for page in pages)
        for page, page_class in enumerate(self._classes):
            if in_images[page] != (page_class is PageClass.IMAGE):
                raise PoolCorruptError(f"page {page} is of class {page_class} and in {in_images[page]} images; an image's pages, and no others, are in one")

    def _check_map(self) -> None:
        for page, page_class in enumerate(self._classes):
            shown = self.map.kind(page)
            if shown != page_class and not (page_class is PageClass.KV and shown == "indexed"):
                raise PoolCorruptError(f"page {page} is of class {page_class} and {shown} on the map; whatever changes a page's class marks it")

    def _check_held_by(self, held: Counter[int]) -> None:
        for page in held:
            self._check_id(page)
        for page, refs in enumerate(self._ref_counts):
            if refs != held[page]:
                fault = "a reference was lost without a release" if refs > held[page] else "it was released behind a holder's back"
                raise PoolCorruptError(f"page {page} has {refs} references, its holders count {held[page]}; {fault}")

    def _check_id(self, page: int) -> None:
        # Without this, -1 would name the last page.
        if not 0 <= page < self.num_pages:
            raise PoolError(f"page {page} is outside 0 to {self.num_pages - 1}; use ids that allocate returned")

    def _check_held(self, page: int, verb: str) -> None:
        self._check_id(page)
        if page == NULL_PAGE:
            raise PoolError(f"page {page} is the null page and cannot be {verb}; only pages that allocate returned can")
        if self._ref_counts[page] == 0:
            raise PoolError(f"page {page} is free and cannot be {verb}; it was given back before, or never allocated")
        if self._classes[page] is PageClass.IMAGE:
            raise PoolError(f"page {page} is an image's and cannot be {verb} by itself; release_image takes all of an image's pages")
        if self._classes[page] is PageClass.LEASED:
            raise PoolError(f"page {page} is leased to a load in flight and cannot be {verb}; wait for the load's completion")

    def _check_leased(self, pages: Sequence[int]) -> None:
        for page, times in Counter(pages).items():
            self._check_id(page)
            if self._classes[page] is not PageClass.LEASED or times > 1:
                raise PoolError(f"page {page} of class {self._classes[page]} is named {times} times as leased; name each page of allocate_leased once")
