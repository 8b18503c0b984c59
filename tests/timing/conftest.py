"""Every timing collects garbage: what was there before is not gone through each time."""

from __future__ import annotations

import atexit
import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """torch's heap alone, and what earlier tests left, takes a quarter second a collection."""
    gc.collect()
    gc.freeze()
    # What is frozen would outlive the interpreter, and nanobind lists all of it as leaked.
    atexit.register(gc.unfreeze)
