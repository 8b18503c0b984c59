"""One more question after the timing: does the candidate still compute?

A candidate that counts its calls can be honest while it is checked and replay while it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fastlayer import records
from pytest_fastlayer.accuracy import Tolerance, compare
from pytest_fastlayer.probes.checks import brief
from pytest_fastlayer.probes.run import loosened


def after_timing(
    reference: Callable[..., object],
    candidate: Callable[..., object],
    inputs: Callable[[int], Any],
    seed: int,
    tolerance: Tolerance | None = None,
    *,
    expected: object = None,
) -> records.Probe:
    """A forward of the candidate on ``inputs(seed)``, another seed than the one that was timed.

    ``expected`` is the reference's output for that seed, where it is at hand; else the reference
    runs once.
    """
    given = inputs(seed)
    args = tuple(given) if isinstance(given, tuple | list) else (given,)
    with torch.no_grad():
        output = candidate(*args)
        want = reference(*args) if expected is None else expected
    found = compare(output, want, loosened(tolerance or Tolerance()))
    message = (
        ""
        if found.passed
        else "right before it was timed, wrong after it on other contents: results are replayed "
        f"once calls have been counted, or state was spoilt: {brief(found)}"
    )
    return records.Probe(name="after_timing", passed=found.passed, message=message)
