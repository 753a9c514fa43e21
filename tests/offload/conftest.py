"""One thread for tiny models: waking a second one costs more than their matrices do."""

from tests.engine.conftest import one_thread

__all__ = ["one_thread"]
