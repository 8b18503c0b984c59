"""Small valid records for tests of readers and reports."""

from __future__ import annotations

import re
from typing import Any

from pytest_fastlayer.records import (
    Accuracy,
    BaseArm,
    CaseRecord,
    Control,
    Device,
    Method,
    NoiseFloor,
    PeakMemory,
    Precision,
    Ratio,
    RunRecord,
    Software,
    Timing,
    ToleranceRecord,
    Verdict,
)


def obeyed(output: str) -> list[str]:
    """The lines in which GitHub's runner looks for a command, as it finds them."""
    lines = re.split(r"\r\n|\r|\n", output)
    return [line for line in lines if line.lstrip().startswith("::") or "##[" in line]


DEVICE = Device(
    type="cuda", name="NVIDIA H200", capability=(9, 0), multiprocessors=132, memory_mib=143771
)
SOFTWARE = Software(python="3.12.3", platform="Linux", torch="2.13.0", triton="3.7.1")


def accuracy(failed: int = 0, **changes: Any) -> Accuracy:
    fields: dict[str, Any] = {
        "trials": 2,
        "seeds": (1234, 1235),
        "failed": failed,
        "nonfinite": 0,
        "total": 8_388_608,
        "max_abs": 0.001,
        "budget_used": 0.43,
        "tolerance": ToleranceRecord(atol=0.002, rtol=0.02),
    }
    return Accuracy(**(fields | changes))


def timing(speedup: float = 4.0, floor: float = 0.01, **changes: Any) -> Timing:
    fields: dict[str, Any] = {
        "method": Method(clock="cuda_events", settle_s=1, block_ms=50),
        "reference_s": 0.004,
        "candidate_s": 0.004 / speedup,
        "speedup": speedup,
        "ci": (speedup * 0.995, speedup * 1.005),
        "noise_floor": floor,
        "floor_sources": NoiseFloor(
            within_quad=floor, control=floor / 2, resolution=0.0001, min_effect=floor / 4
        ),
        "aa": Control(arm="reference", speedup=1.001),
        "min_detectable_effect": 0.02,
        "pairs": 6,
        "log_ratios": (1.38, 1.39, 1.4, 1.38, 1.39, 1.4),
    }
    return Timing(**(fields | changes))


def case(
    verdict: Verdict = Verdict.PASS, speedup: float | None = 4.0, **changes: Any
) -> CaseRecord:
    """A timed case, or an untimed one with ``speedup=None``."""
    fields: dict[str, Any] = {
        "verdict": verdict,
        "workload": {"rows": 64, "width": 128},
        "reference_sha256": "ab" * 32,
        "reference_kind": "dense",
        "precision": Precision(float32_matmul_precision="high", allow_tf32=True),
        "route": "fused",
        "accuracy": accuracy(),
        "timing": None if speedup is None else timing(speedup),
        "peak_mib": PeakMemory(reference=103.08, candidate=75.05),
    }
    return CaseRecord(**(fields | changes))


def base(verdict: Verdict | None = Verdict.SLOWER, ratio: float = 0.95, **changes: Any) -> BaseArm:
    """A measured base, the head ``ratio`` times as fast; another ``status`` has no figure."""
    measured: dict[str, Any] = {
        "timing": timing(ratio),
        "accuracy": accuracy(),
        "reference_s": 0.016,
        "head": Ratio(value=4.0, ci=(3.98, 4.02)),
        "base": Ratio(value=4.2, ci=(4.18, 4.22)),
        "p_value": 0.0004,
        "route": "fused",
        "launch": {"warps": 8},
    }
    fields: dict[str, Any] = {
        "rev": "main~1",
        "commit": "fedcba9876543210fedcba9876543210fedcba98",
        "status": "measured",
        "verdict": verdict,
    }
    without = changes.get("status", "measured") != "measured"
    return BaseArm(**(fields | ({} if without else measured) | changes))


def unsupported(reason: str = "needs 10.2 TB, the device has 141 GB") -> CaseRecord:
    return CaseRecord(verdict=Verdict.UNSUPPORTED, reason=reason)


def incorrect(reason: str = "1 of 8388608 elements out of tolerance") -> CaseRecord:
    return case(Verdict.INCORRECT, None, accuracy=accuracy(failed=1), reason=reason)


def run(cases: dict[str, CaseRecord] | None = None, **changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "created": "2026-11-30T08:00:00+00:00",
        "commit": "abc1234",
        "device": DEVICE,
        "software": SOFTWARE,
        "cases": {"a": case()} if cases is None else cases,
    }
    return RunRecord(**(fields | changes))
