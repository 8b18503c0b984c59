"""Turns the published RTX 5080 figures beside this file into a baseline.

Run as ``python tests/baselines/published.py`` to rewrite the file under ``baselines/``. The
figures are copied as they are, only their units change; what was not published (intervals, the
budget used, which arm the A/A controls timed) is left out rather than estimated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_fastlayer import baselines
from pytest_fastlayer.records import (
    Accuracy,
    CaseRecord,
    Device,
    Method,
    PeakMemory,
    Precision,
    RunRecord,
    Settings,
    Software,
    Timing,
    ToleranceRecord,
    Verdict,
)

SOURCE = Path(__file__).with_name("rtx5080_published.json")
TARGET = Path(__file__).parents[2] / "baselines" / "nvidia-geforce-rtx-5080.json"
#: The model's specification; the publication does not state it.
MULTIPROCESSORS = 84
#: case: (batch_size, seq_len, d_model, num_heads, ffn_dim, num_layers)
SHAPES = {
    "1": (64, 128, 128, 4, 128, 4),
    "2": (1, 128, 128, 4, 128, 4),
    "3": (4, 128, 128, 4, 128, 4),
    "4": (16, 128, 128, 4, 128, 4),
    "5": (128, 128, 128, 4, 128, 4),
    "6": (10000, 128, 128, 4, 128, 4),
    "7": (64, 128, 32, 4, 32, 4),
    "8": (64, 128, 1024, 4, 1024, 4),
    "9": (64, 128, 128, 1, 128, 4),
    "10": (64, 128, 128, 2, 128, 4),
    "11": (64, 128, 128, 16, 128, 4),
    "12": (64, 32, 128, 4, 128, 4),
    "13": (64, 1024, 128, 4, 128, 4),
    "14": (32, 100000, 1024, 16, 1024, 2),
}
FIRST_SEED = 1234


def workload(case: str) -> dict[str, Any]:
    """The disclosed case as a workload: shape and the benchmark's defaults."""
    fields = ("batch_size", "seq_len", "d_model", "num_heads", "ffn_dim", "num_layers")
    return {
        **dict(zip(fields, SHAPES[case], strict=True)),
        "causal": True,
        "dtype": "float32",
        "padding_ratio": 0.0,
        "input_scale": 1.0,
    }


def label(case: str) -> str:
    """``case 13 [64x1024x128 H4 L4]``."""
    batch, length, width, heads, _, layers = SHAPES[case]
    return f"case {case} [{batch}x{length}x{width} H{heads} L{layers}]"


def convert(source: dict[str, Any]) -> RunRecord:
    """The publication as a record with ``provenance="published"``."""
    date = source["provenance"].removeprefix("published ")
    software, device = source["software"], source["device"]
    oracle = source["oracle_check"]
    notes = (
        source["what"],
        f"published geometric mean speedup over cases 1 to 13: "
        f"{source['geomean_speedup_cases_1_to_13']}x",
        f"published oracle check: batch {oracle['batch']}, sequence {oracle['seq_len']}, "
        f"{oracle['failed']} of {oracle['total']} elements failed, max abs {oracle['max_abs']}",
        f"power limit {device['power_limit_w']} W; {MULTIPROCESSORS} multiprocessors is the "
        "model's specification, not part of the publication",
    )
    return RunRecord(
        provenance="published",
        created=f"{date}T00:00:00+00:00",
        device=Device(
            type="cuda",
            name=device["name"],
            capability=tuple(device["capability"]),
            multiprocessors=MULTIPROCESSORS,
            memory_mib=device["memory_mib"],
        ),
        software=Software(
            python=software["python"],
            platform=software["os"],
            torch=software["torch"],
            triton=software["triton"],
            cuda=software["cuda"],
            cudnn=str(software["cudnn"]),
            driver=software["driver"],
        ),
        settings=Settings(
            pairs=source["timing"]["pairs"],
            settle_s=source["timing"]["settle_seconds_per_arm"],
            block_ms=source["timing"]["target_block_ms"],
            min_effect=0.0,
        ),
        notes=notes,
        cases={name: _case(name, case, source) for name, case in source["cases"].items()},
    )


def _case(name: str, case: dict[str, Any], source: dict[str, Any]) -> CaseRecord:
    batch, length, width = SHAPES[name][:3]
    trials = case["trials"]
    dense = case["reference_ms"] is not None
    reason = ""
    if not dense:
        reason = (
            f"dense reference does not fit; published once: candidate {case['candidate_s']} s, "
            f"streamed float32 oracle {case['streamed_fp32_oracle_s']} s, diagnostic ratio "
            f"{case['diagnostic_oracle_ratio']}; no noise floor was published, so no timing is "
            "recorded"
        )
    return CaseRecord(
        verdict=Verdict.PASS if dense else Verdict.ACCURATE,
        reason=reason,
        label=label(name),
        workload=workload(name),
        reference_kind="dense" if dense else "oracle",
        precision=Precision(**source["precision"]),
        route=case["route"],
        accuracy=Accuracy(
            trials=trials,
            seeds=tuple(range(FIRST_SEED, FIRST_SEED + trials)),
            failed=case["failed_elements"],
            nonfinite=0,
            total=case.get("total_elements", batch * length * width * trials),
            max_abs=case["max_abs_error"],
            budget_used=None,
            tolerance=ToleranceRecord(atol=0.002, rtol=0.02),
        ),
        timing=_timing(name, case, source) if dense else None,
        peak_mib=PeakMemory(**case["peak_mib"]),
    )


def _timing(name: str, case: dict[str, Any], source: dict[str, Any]) -> Timing:
    control = source["aa_controls_nominally_significant"].get(name)
    warnings = () if control is None else (f"published A/A control nominally off: {control}x",)
    return Timing(
        method=Method(
            clock="published",
            settle_s=source["timing"]["settle_seconds_per_arm"],
            block_ms=source["timing"]["target_block_ms"],
        ),
        # Division by a power of ten rounds correctly: 1.935 ms becomes exactly 0.001935.
        reference_s=case["reference_ms"] / 1e3,
        candidate_s=case["candidate_ms"] / 1e3,
        speedup=case["speedup"],
        ci=None,
        noise_floor=case["noise_floor_percent"] / 1e2,
        pairs=source["timing"]["pairs"],
        warnings=warnings,
    )


if __name__ == "__main__":
    baselines.save(convert(json.loads(SOURCE.read_text(encoding="utf-8"))), TARGET)
