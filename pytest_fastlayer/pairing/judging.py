"""The verdict of a measured case: against what is stored, then against the base of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pytest_fastlayer import comparability, gate
from pytest_fastlayer.base import judging as base_judging
from pytest_fastlayer.base.client import DishonestArmError, Request
from pytest_fastlayer.base.threeway import Question, against_base
from pytest_fastlayer.pairing.pair import Draft, Pair
from pytest_fastlayer.pairing.terms import Terms
from pytest_fastlayer.records import Device, Probe, Software, Verdict
from pytest_fastlayer.stored import Stored


def judge(
    pair: Pair, terms: Terms, draft: Draft, header: Mapping[str, Any], stored: Stored
) -> None:
    """Hold a timed case against the stored baseline; one without a figure stays as it is."""
    if draft.case.timing is None:
        return
    device = Device.model_validate(header["device"])
    baseline = stored.of(device)
    draft.case = gate.judge(
        draft.case,
        None if baseline is None else comparability.as_of(baseline, pair.name),
        name=pair.name,
        device=device,
        policy=terms.policy(),
        baseline_path=stored.path(device).name,
        software=Software.model_validate(header["software"]),
    )


def hold_against_base(
    pair: Pair, terms: Terms, draft: Draft, request: Request, device: torch.device
) -> None:
    """Time the base's candidate beside this one's: the same work, tolerance and schedule.

    A candidate of this tree that is wrong while it is timed there is DISHONEST, and has no base.
    """
    measured = draft.case.accuracy
    assert measured is not None
    draft.spare = None  # an output's memory, which the base may need
    question = Question(
        pair=pair,
        seeds=measured.seeds,
        tolerance=terms.tolerance(pair.tolerance),
        exact=measured.rms_vs_float64 is not None,
        device=device,
        cost=draft.cost,
        schedule=replace(terms.schedule(device), diagnostic=False),
        policy=terms.policy(),
        progress=terms.progress,
    )
    try:
        base = against_base(request, question)
    except DishonestArmError as error:
        caught = Probe(name="served_output", passed=False, message=str(error))
        draft.add(
            probes=(*draft.case.probes, caught),
            verdict=Verdict.DISHONEST,
            reason=f"{caught.name}: {caught.message}",
            timing=None,  # no figure of a candidate that is paid for something else
            comparison=None,
        )
        return
    draft.case = base_judging.settle(draft.case, base, name=pair.name, policy=terms.policy())
