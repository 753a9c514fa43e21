"""The paged KV pool: where bytes lie in a page, who holds which page, and the one buffer of them all; knows no model and no request.

`PageLedger` needs no torch, so that a scheduler can run without it; the names that do need it are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from atoll.kv.ledger import NULL_PAGE, PageClass, PageLedger

if TYPE_CHECKING:
    from atoll.kv.layout import PageLayout
    from atoll.kv.pool import FILLS, PagePool, num_pages_for_bytes

__all__ = ["FILLS", "NULL_PAGE", "PageClass", "PageLayout", "PageLedger", "PagePool", "num_pages_for_bytes"]

_NEEDS_TORCH = {
    "FILLS": "atoll.kv.pool",
    "PageLayout": "atoll.kv.layout",
    "PagePool": "atoll.kv.pool",
    "num_pages_for_bytes": "atoll.kv.pool",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
