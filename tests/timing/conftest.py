"""Every timing collects garbage: what was there before the tests is not gone through each time."""

from __future__ import annotations

import atexit
import gc

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """All modules of the run are imported by now; torch's heap alone takes a quarter second."""
    gc.collect()
    gc.freeze()
    # What is frozen would outlive the interpreter, and nanobind lists all of it as leaked.
    atexit.register(gc.unfreeze)
