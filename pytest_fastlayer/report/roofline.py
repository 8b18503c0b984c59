"""How near a case comes to what its device could do at best (Williams, Waterman & Patterson 2009).

A forward of ``flops`` floating-point operations that must move ``bytes`` over the memory bus takes
at least ``max(flops / peak, bytes / bandwidth)`` seconds: its *roofline floor*. Both figures are a
record's `Work`, of the minimal algorithm; the peaks are the vendor's, of the table below.

The peak is the dense fp16 tensor rate with float32 accumulation, the fastest arithmetic of half
precision or better: a floor for whatever of these a candidate picks. Float32 code that may use no
tensor cores cannot reach it; the TF32 rate is drawn beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_fastlayer.records import CaseRecord, Device, Work

TERA = 1e12


@dataclass(frozen=True)
class Peaks:
    """What a device could do at best: FLOP/s, dense, and bytes/s; ``source`` names the figures."""

    device: str  #: regular expression that must match the device's whole name
    fp16: float  #: tensor cores, fp16 operands, float32 accumulation
    tf32: float  #: tensor cores, TF32 operands
    bandwidth: float
    source: str

    def floor_s(self, work: Work) -> float:
        """Least seconds of a forward."""
        return max(work.flops / self.fp16, work.bytes / self.bandwidth)

    def attainable(self, intensity: float, rate: float) -> float:
        """FLOP/s under the roof of ``rate`` at ``intensity`` FLOP a byte."""
        return min(rate, intensity * self.bandwidth)


def _row(device: str, fp16: float, tf32: float, bandwidth: float, source: str) -> Peaks:
    return Peaks(device, fp16 * TERA, tf32 * TERA, bandwidth * TERA, source)


_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix"
#: Dense tensor TFLOP/s (fp16, TF32) and memory TB/s. Where a data sheet gives only the rate with
#: sparsity, half of it. Names as the driver gives them: an H200 NVL or a laptop's chip is another
#: device with other rates, so a name must match as a whole.
PEAKS: tuple[Peaks, ...] = (
    _row("NVIDIA H200", 989, 494, 4.8, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    _row("NVIDIA H100 80GB HBM3", 989, 494, 3.35, "NVIDIA H100 Tensor Core GPU data sheet, SXM"),
    _row("NVIDIA A100-SXM4-80GB", 312, 156, 2.039, "NVIDIA A100 Tensor Core GPU data sheet"),
    _row("NVIDIA A100-SXM4-40GB", 312, 156, 1.555, "NVIDIA A100 Tensor Core GPU data sheet"),
    _row("NVIDIA GeForce RTX 4090", 165.2, 82.6, 1.008, _ADA),
    _row("NVIDIA GeForce RTX 5080", 112.6, 56.3, 0.960, _BLACKWELL),
    _row("NVIDIA GeForce RTX 5090", 209.5, 104.8, 1.792, _BLACKWELL),
)


def peaks_of(device: Device) -> Peaks | None:
    """The device's row, None where its figures are not known here."""
    return next((row for row in PEAKS if re.fullmatch(row.device, device.name)), None)


@dataclass(frozen=True)
class Point:
    """Where a case lies: FLOP a byte, and the FLOP/s that each arm achieved."""

    name: str
    intensity: float
    reference: float
    candidate: float


def point(name: str, case: CaseRecord) -> Point | None:
    """None for a case without work or without a time."""
    if case.work is None or case.timing is None:
        return None
    flops = case.work.flops
    return Point(
        name,
        flops / case.work.bytes,
        flops / case.timing.reference_s,
        flops / case.timing.candidate_s,
    )


def times_floor(case: CaseRecord, peaks: Peaks | None) -> float | None:
    """The candidate's time over the case's roofline floor; 1 is the most that the device can do."""
    if peaks is None or case.work is None or case.timing is None:
        return None
    return case.timing.candidate_s / peaks.floor_s(case.work)


def sentence(device: Device, cases: int, placed: int) -> str:
    """What stands where the plot would be missing, or beside it; empty where nothing is to say."""
    peaks = peaks_of(device)
    if device.type != "cuda":
        return ""
    if peaks is None:
        return (
            f"No roofline: the peak rates of {device.name} are not in the table of "
            "pytest_fastlayer/report/roofline.py."
        )
    if placed == 0:
        return "No roofline: no timed case says how many operations and bytes it needs (work)."
    left_out = cases - placed
    plural = "case" if left_out == 1 else "cases"
    said = f"; {left_out} {plural} without work or time left out" if left_out else ""
    return f"Peaks: {peaks.source}{said}."
