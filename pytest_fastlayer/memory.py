"""Peak memory of a call above its starting level."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pytest_fastlayer.clocks import _perf_counter

_MIB = 1024 * 1024
_PROC = Path("/proc/self")
#: Further readings on CPU, while they stay within these seconds.
_REPEATS, _QUICK_S = 2, 1.0


def peak_memory(fn: Callable[[], object], device: torch.device | str) -> float | None:
    """Peak memory of one call of ``fn`` above the level at its start, MiB; its output included.

    CUDA: the caching allocator's own statistics, after what is unreferenced was freed. Memory
    that an earlier call captured for good (graph pools, packed weights) is part of the starting
    level: give a ``fn`` that builds afresh to have it counted. CPU: the kernel's high-water mark
    of the resident set, reset through ``/proc/self/clear_refs``; None off Linux or where that is
    not permitted. Whatever else the process does meanwhile counts there too, so a quick ``fn`` is
    called three times and the least is taken.
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        output = fn()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        del output
        return max(0.0, (peak - start) / _MIB)
    if device.type != "cpu":
        return None
    begin = _perf_counter()
    least = _cpu_peak(fn)
    for _ in range(_REPEATS):
        if least is None or _perf_counter() - begin > _QUICK_S:
            break
        least = min(least, _cpu_peak(fn) or 0.0)
    return least


def _cpu_peak(fn: Callable[[], object], proc: Path = _PROC) -> float | None:
    if not sys.platform.startswith("linux"):
        return None
    _release_free_memory()
    try:
        (proc / "clear_refs").write_text("5")  # 5: reset VmHWM (proc(5))
    except OSError:
        return None
    start = _status_kib(proc, "VmHWM")
    output = fn()
    peak = _status_kib(proc, "VmHWM")
    del output
    if start is None or peak is None:
        return None
    return max(0.0, (peak - start) / 1024)


def _status_kib(proc: Path, field: str) -> int | None:
    found = re.search(rf"^{field}:\s*(\d+) kB$", (proc / "status").read_text(), re.MULTILINE)
    return int(found.group(1)) if found else None


def _release_free_memory() -> None:
    """Give the heap's free pages back, so that reusing them shows in the resident set (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
