"""Every garbage collection of the suite would walk what collection left behind: it is frozen."""

from __future__ import annotations

import atexit
import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    # Or extension modules complain, at exit, of objects that were never freed.
    atexit.register(gc.unfreeze)
