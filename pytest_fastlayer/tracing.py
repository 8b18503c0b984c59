"""Where an arm's time goes: a profiler trace that Perfetto reads, and a table by kind of work.

Taken outside every timed region, for profiling slows what it watches. The kinds are told apart by
kernel and operator names; what no row recognises is "other", never guessed into a kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from pytest_fastlayer.measurement import synchronize

FORWARDS = 3
WARM_UP = 2

#: (kind, pattern of a kernel's or operator's name), first match wins.
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("attention", r"attention|flash|fmha|sdpa|mem_eff|softmax"),
        ("GEMM", r"gemm|cutlass|cublas|matmul|addmm|\bmm\b|bmm|linear|wgmma|nvjet|xmma"),
        ("normalisation", r"norm"),
        ("copies", r"memcpy|memset|copy|clone|contiguous|transpose|\bcat\b|fill"),
        ("elementwise", r"elementwise|gelu|add|mul|where|masked|vectorized"),
    )
)


@dataclass(frozen=True)
class Share:
    """Microseconds of one forward spent in one kind of work."""

    kind: str
    microseconds: float
    calls: float


def kind_of(name: str) -> str:
    """The kind of work that a kernel's or operator's name tells, or "other"."""
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


def shares(
    events: Iterable[tuple[str, float, float]], forwards: int, *, with_gaps: bool
) -> list[Share]:
    """Time by kind, of ``(name, start_us, duration_us)`` events of ``forwards`` forwards.

    On a GPU (``with_gaps``) the gaps between events, from the first start to the last end, are a
    kind of their own: on launch-bound work they are most of it.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    busy_until = first = None
    gaps = 0.0
    for name, start, duration in sorted(events, key=lambda event: event[1]):
        kind = kind_of(name)
        spent[kind] += duration
        calls[kind] += 1
        if busy_until is None:
            busy_until = first = start
        gaps += max(0.0, start - busy_until)
        busy_until = max(busy_until, start + duration)
    if first is None:
        return []
    found = [Share(k, spent[k] / forwards, calls[k] / forwards) for k in spent]
    if with_gaps:
        found.append(Share("gaps", gaps / forwards, 0))
    return sorted(found, key=lambda share: -share.microseconds)


def table(found: Iterable[Share]) -> str:
    """The shares as text, largest first."""
    rows = list(found)
    total = sum(share.microseconds for share in rows)
    return tabulate(
        [
            (s.kind, f"{s.microseconds:,.1f}", f"{s.microseconds / total:.1%}", f"{s.calls:g}")
            for s in rows
        ],
        headers=("kind", "us a forward", "share", "calls a forward"),
        colalign=("left", "right", "right", "right"),
    )


def trace(
    function: Callable[[], Any], device: torch.device, folder: Path, name: str
) -> tuple[Path, list[Share]]:
    """Profile a few forwards; write ``<name>.json`` (Chrome trace) and ``<name>.txt`` (table)."""
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(WARM_UP):
        function()
    synchronize(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for index in range(FORWARDS):
            with torch.profiler.record_function(f"{name} forward {index}"):
                function()
        synchronize(device)
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-")[:120] or "trace"
    path = folder / f"{stem}.json"
    profiler.export_chrome_trace(str(path))
    found = shares(_events(profiler, device), FORWARDS, with_gaps=device.type == "cuda")
    path.with_suffix(".txt").write_text(table(found) + "\n", encoding="utf-8")
    return path, found


def _events(profiler: Any, device: torch.device) -> Iterable[tuple[str, float, float]]:
    """Kernels on a GPU; on a CPU the operators, each with the time it did not pass on."""
    for event in profiler.events():
        start, span = event.time_range.start, event.time_range.elapsed_us()
        if device.type == "cuda":
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                yield event.name, start, span
        elif event.name.startswith(("aten::", "mkldnn::")):
            yield event.name, start, event.self_cpu_time_total
