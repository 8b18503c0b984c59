"""Gate one callable against itself on the real machine, many times, and count the alarms.

``python -m pytest_fastlayer.selfgate --gates 200 --device cuda``

Each gate is the real one, timer and statistics and all: the callable is reference and candidate.
Two kinds of alarm are counted. A *claim* is a verdict that the candidate is faster or slower than
itself; a *regression* is SLOWER or FASTER against the gate before, which is what a stored baseline
sees. At the stated alpha each kind may come up in at most that share of the gates.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy import stats as distributions

from pytest_fastlayer import environment, gate, measurement
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.calibrate import ACCURATE
from pytest_fastlayer.feeding import Feed
from pytest_fastlayer.measurement import Schedule
from pytest_fastlayer.records import (
    CaseRecord,
    RunRecord,
    Timing,
    Verdict,
)

#: Blocks short enough that two hundred gates end in minutes, long against the timer's step.
SCHEDULE = Schedule(
    pairs=24, settle_s=0.02, block_ms=2.0, budget_s=10.0, l2="warm", min_effect=0.01
)
ALPHA = 0.05


def workload(device: torch.device) -> Callable[[], Any]:
    """A small feed-forward block, launch-bound on a GPU and cache-resident on a CPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    ).to(device)
    x = torch.randn(128, 64, device=device)
    return lambda: model(x)


def gate_once(
    function: Callable[[], Any], device: torch.device, previous: Timing | None
) -> tuple[CaseRecord, CaseRecord | None]:
    """The verdict on a callable against itself: alone, and against the gate before."""
    policy = gate.Policy(alpha=ALPHA)
    timing, _ = measurement.measure(
        function, function, Feed(()), device, (0.0, 0.0), SCHEDULE, policy, lambda text: None
    )
    case = ACCURATE.model_copy(update={"timing": timing})
    where = environment.device_record(device)
    alone = gate.judge(case, None, name="self", device=where, policy=policy)
    if previous is None:
        return alone, None
    stored = RunRecord(
        created="",
        device=where,
        software=environment.software_record(),
        cases={"self": case.model_copy(update={"timing": previous})},
    )
    return alone, gate.judge(case, stored, name="self", device=where, policy=policy)


def run(gates: int, device: torch.device) -> tuple[Counter[str], Counter[str]]:
    """Verdicts of ``gates`` gates: alone, and against the gate before."""
    function = workload(device)
    alone: Counter[str] = Counter()
    against: Counter[str] = Counter()
    previous: Timing | None = None
    with torch.no_grad():
        for _ in range(gates):
            try:
                case, compared = gate_once(function, device, previous)
            except stats.SamplesError as error:
                alone[error.verdict] += 1
                continue
            alone[_claim(case)] += 1
            if compared is not None and compared.comparison is not None:
                against[_regression(compared)] += 1
            previous = case.timing
    return alone, against


def _claim(case: CaseRecord) -> str:
    """FASTER where the claim of a speedup would pass, SLOWER where a slowdown would, else NONE."""
    assert case.timing is not None
    assert case.timing.ci is not None
    low, high = case.timing.ci
    bar = 1 + case.timing.noise_floor
    return "FASTER" if low > bar else "SLOWER" if high < 1 / bar else "NONE"


def _regression(case: CaseRecord) -> str:
    """SLOWER by the gate's own verdict; FASTER where the stored figure would be beaten."""
    comparison = case.comparison
    assert comparison is not None
    if case.verdict is Verdict.SLOWER:
        return case.verdict
    gained = comparison.ci is not None and comparison.ci[0] > 1 + comparison.threshold
    return "FASTER" if gained else "NONE"


def alarms_in(verdicts: Counter[str]) -> tuple[int, int]:
    """Alarms and gates."""
    return verdicts["FASTER"] + verdicts["SLOWER"], sum(verdicts.values())


def report(kind: str, verdicts: Counter[str]) -> str:
    """Alarms, their share, and its exact 95% interval (Clopper & Pearson 1934)."""
    alarms, total = alarms_in(verdicts)
    interval = distributions.binomtest(alarms, total).proportion_ci() if total else None
    ends = f" [{interval.low:.1%}, {interval.high:.1%}]" if interval else ""
    share = alarms / total if total else 0.0
    return f"{kind}: {alarms} alarms in {total} gates, {share:.1%}{ends}; stated {ALPHA:.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a kind of alarm is significantly above the stated rate."""
    parser = argparse.ArgumentParser(prog="python -m pytest_fastlayer.selfgate")
    parser.add_argument("--gates", type=int, default=200, help="gates to run (200)")
    parser.add_argument("--device", default="cpu", help="torch device (cpu)")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    alone, against = run(given.gates, device)
    print(environment.device_record(device).name)
    print(report("claims", alone))
    print(report("regressions", against))
    excessive = False
    for verdicts in (alone, against):
        alarms, total = alarms_in(verdicts)
        if total:
            p = distributions.binomtest(alarms, total, ALPHA, alternative="greater").pvalue
            excessive |= bool(p < 0.05)
    return int(excessive)


if __name__ == "__main__":
    sys.exit(main())
