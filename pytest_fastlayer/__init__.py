"""pytest_fastlayer: gate any (reference, candidate) pair of torch callables on accuracy and speed.

The names below are what a test or a script imports; they load on first use, so that installing
the plugin costs a pytest run that never touches it neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fastlayer.accuracy import Tolerance, assert_elementwise, compare
    from pytest_fastlayer.grids import input_scales, padding_ratios
    from pytest_fastlayer.immutable import freeze
    from pytest_fastlayer.records import CaseRecord, RunRecord, Verdict, Work

_HOMES = {
    "CaseRecord": "records",
    "RunRecord": "records",
    "Tolerance": "accuracy",
    "Verdict": "records",
    "Work": "records",
    "assert_elementwise": "accuracy",
    "compare": "accuracy",
    "freeze": "immutable",
    "input_scales": "grids",
    "padding_ratios": "grids",
}

__all__ = [
    "CaseRecord",
    "RunRecord",
    "Tolerance",
    "Verdict",
    "Work",
    "assert_elementwise",
    "compare",
    "freeze",
    "input_scales",
    "padding_ratios",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
