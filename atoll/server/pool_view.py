"""What the page shows of the engine: the pool page by page, requests, tokens, what was reused and why the rest was not; knows no HTTP."""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from atoll.kv.page_map import LETTERS, count_kinds
from atoll.kv.prefix_stats import MissReason
from atoll.offload.base import ConnectorStats

if TYPE_CHECKING:
    from atoll.engine.engine import Engine


@dataclass(frozen=True)
class PoolView:
    """The engine between two steps. `of` runs beside the engine and copies one byte per page; `as_json` runs in the server."""

    pages: str  # a letter for each
    page_size: int  # tokens
    page_bytes: int
    image_pages: int  # pages of one checkpoint; 0: the model keeps no states
    num_running: int
    num_waiting: int
    num_parked: int  # wait for a load
    num_steps: int
    num_preemptions: int
    num_queries: int  # prompt tokens
    num_hits: int  # of them, reused
    num_fetched: int  # of those, brought back from a tier
    misses: dict[MissReason, int]
    offload: ConnectorStats | None  # None: there is no tier
    time_s: float  # of the monotonic clock

    @classmethod
    def of(cls, engine: "Engine") -> "PoolView":
        scheduler, prefix = engine.scheduler, engine.prefix_stats
        return cls(
            pages=scheduler.ledger.map.text(),
            page_size=scheduler.config.page_size,
            page_bytes=engine.pool.layout.page_bytes,
            image_pages=scheduler.cache.image_pages,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_parked=engine.num_parked,
            num_steps=engine.num_steps,
            num_preemptions=engine.num_preemptions,
            num_queries=prefix.num_queries,
            num_hits=prefix.num_hits,
            num_fetched=prefix.num_fetched,
            misses={reason: prefix.misses[reason] for reason in MissReason},
            offload=engine.offload_stats,
            time_s=time.monotonic(),
        )

    def as_json(self) -> dict[str, Any]:
        """All fields, what the letters mean, and the pages counted by kind."""
        kinds = {letter: kind for kind, letter in LETTERS.items()}
        offload = asdict(self.offload) if self.offload is not None else None
        return {**vars(self), "offload": offload, "kinds": kinds, "counts": count_kinds(self.pages)}
