"""The guard: which pages must be zeroed before anyone reads them, for attention that does not mask; knows no tensor and no page's owner."""

from collections.abc import Iterable


class ReleaseGuard:
    """Pages that came back and still hold what they held.

    A kernel that masks scores alone multiplies the rows of a page that nobody has written yet by probability 0, and 0 * NaN = NaN. So every page is zeroed
    between two holders. The ledger reports a page when it becomes free, the scheduler takes the pages of each step, and the runner zeroes them before the
    step's first read or write: a page that is handed out again in the step that frees it is thereby zeroed first, and written then.

    `dirty` are pages that start with other bytes than zeros.
    """

    def __init__(self, dirty: Iterable[int] = ()) -> None:
        # A dict for its order: the same releases give the same step.
        self._pages: dict[int, None] = dict.fromkeys(dirty)

    @property
    def num_pending(self) -> int:
        """Pages released and not taken yet."""
        return len(self._pages)

    def released(self, page: int) -> None:
        """Note a page that became free."""
        self._pages[page] = None

    def take(self) -> list[int]:
        """The pages to zero now, each once, in order of release; they are then forgotten."""
        pages = list(self._pages)
        self._pages.clear()
        return pages
