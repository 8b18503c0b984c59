"""A way to ask for the probes that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from probe_pair import honest, make_inputs

from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.probes import run_probes

Caught = dict[str, str]


@pytest.fixture
def probe() -> Callable[..., Caught]:
    """Run the probes; returns {probe: message} of those that did not pass."""

    def run(
        candidate: Any, reference: Any = honest, inputs: Any = make_inputs, **kw: Any
    ) -> Caught:
        found = run_probes(
            reference, candidate, inputs, (1234, 1235), Tolerance(), kw.pop("device", "cpu"), **kw
        )
        names = [one.name for one in found]
        assert len(names) == len(set(names))
        return {one.name: one.message for one in found if not one.passed}

    return run


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong outputs are watched for late changes: long enough for these tests' threads."""
    monkeypatch.setattr("pytest_fastlayer.probes.checks.PATIENCE_S", 0.1)
