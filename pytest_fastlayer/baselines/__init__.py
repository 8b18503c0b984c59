"""Baseline files: read with every check, merged without losing a case, replaced atomically.

A baseline is a run record that was accepted, so one reader serves both.
"""

from pytest_fastlayer.baselines.merging import ACCEPTABLE, Merge, measured_at, merge, unused
from pytest_fastlayer.baselines.reading import (
    BaselineError,
    BaselineNotFoundError,
    load,
    parse,
    shown,
)
from pytest_fastlayer.baselines.writing import find, locked, save

__all__ = [
    "ACCEPTABLE",
    "BaselineError",
    "BaselineNotFoundError",
    "Merge",
    "find",
    "load",
    "locked",
    "measured_at",
    "merge",
    "parse",
    "save",
    "shown",
    "unused",
]
