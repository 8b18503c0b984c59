"""Cases, timings and baselines for the gate, built by hand."""

from __future__ import annotations

import math
from typing import Any

from pytest_fastlayer.records import (
    Accuracy,
    CaseRecord,
    Device,
    Method,
    PeakMemory,
    Precision,
    RunRecord,
    Software,
    Timing,
    ToleranceRecord,
    Verdict,
)

H200 = Device(
    type="cuda", name="NVIDIA H200", capability=(9, 0), multiprocessors=132, memory_mib=143771
)
SOFTWARE = Software(python="3.11.9", platform="Linux", torch="2.13.0", triton="3.7.1")
METHOD = Method(clock="cuda_events", settle_s=10, block_ms=50)
PRECISION = Precision(float32_matmul_precision="high", allow_tf32=True)
DIGEST = "a" * 64


def timing(
    speedup: float = 2.0, half: float = 0.002, *, floor: float = 0.01, **more: Any
) -> Timing:
    """A timing of 50 quads whose log interval is ``±half`` about its speedup."""
    fields = {
        "method": METHOD,
        "reference_s": 1e-3 * speedup,
        "candidate_s": 1e-3,
        "speedup": speedup,
        "ci": (speedup * math.exp(-half), speedup * math.exp(half)),
        "noise_floor": floor,
        "min_detectable_effect": 0.019,
        "pairs": 100,
    }
    return Timing.model_validate(fields | more)


def accuracy(failed: int = 0, *, total: int = 1000, nonfinite: int = 0) -> Accuracy:
    return Accuracy(
        trials=5,
        seeds=(1, 2, 3, 4, 5),
        failed=failed,
        nonfinite=nonfinite,
        total=total,
        max_abs=0.001,
        budget_used=1.75 if failed else 0.4,
        tolerance=ToleranceRecord(atol=0.002, rtol=0.02),
    )


def case(timed: Timing | None = None, **more: Any) -> CaseRecord:
    fields: dict[str, Any] = {
        "verdict": Verdict.ACCURATE,
        "workload": {"batch": 4, "seq_len": 128},
        "reference_sha256": DIGEST,
        "precision": PRECISION,
        "accuracy": accuracy(),
        "timing": timed,
        "peak_mib": PeakMemory(reference=200, candidate=100),
    }
    return CaseRecord.model_validate(fields | more)


def baseline(*, name: str = "case", stored: CaseRecord | None = None, **more: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "created": "2026-01-01T00:00:00Z",
        "device": H200,
        "software": SOFTWARE,
        "cases": {name: stored if stored is not None else case(timing())},
    }
    return RunRecord.model_validate(fields | more)
