"""The paged KV pool and the state slots: where bytes lie, who holds what, and the one buffer of each; knows no model and no request.

The ledgers need no torch, so that a scheduler can run without it; the names that do need it are imported on first use.
"""

from typing import TYPE_CHECKING

from atoll.kv.guard import ReleaseGuard
from atoll.kv.ledger import NULL_PAGE, PageClass, PageLedger
from atoll.kv.slot_ledger import SlotLedger
from atoll.lazy import imported_on_use

if TYPE_CHECKING:
    from atoll.kv.fills import FILLS
    from atoll.kv.images import num_image_pages, restore_states, save_states
    from atoll.kv.layout import PageLayout
    from atoll.kv.pool import PagePool, num_pages_for_bytes
    from atoll.kv.slots import SlotLayout, SlotPool

__all__ = [
    "FILLS",
    "NULL_PAGE",
    "PageClass",
    "PageLayout",
    "PageLedger",
    "PagePool",
    "ReleaseGuard",
    "SlotLayout",
    "SlotLedger",
    "SlotPool",
    "num_image_pages",
    "num_pages_for_bytes",
    "restore_states",
    "save_states",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "FILLS": "atoll.kv.fills",
        "PageLayout": "atoll.kv.layout",
        "PagePool": "atoll.kv.pool",
        "SlotLayout": "atoll.kv.slots",
        "SlotPool": "atoll.kv.slots",
        "num_image_pages": "atoll.kv.images",
        "num_pages_for_bytes": "atoll.kv.pool",
        "restore_states": "atoll.kv.images",
        "save_states": "atoll.kv.images",
    },
)
