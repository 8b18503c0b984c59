"""The clocks that time a block of forwards, with timers that no candidate has replaced.

A candidate that replaces ``time.perf_counter`` or ``torch.cuda.Event.elapsed_time`` would set its
own time. Python's timers are bound when pytest loads the plugin (``originals``); torch's here, and
known by their origin. ``patched_timers`` names those that are not what Python and torch define.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from pytest_fastlayer import originals

_perf_counter = originals.perf_counter
_clock_info = originals.clock_info
_gc_disable = originals.gc_disable
_gc_enable = originals.gc_enable
_gc_collect = originals.gc_collect
_Event = torch.cuda.Event
_record = torch.cuda.Event.record
_wait_for = torch.cuda.Event.synchronize
_elapsed_ms = torch.cuda.Event.elapsed_time
_synchronize = torch.cuda.synchronize

#: cudaEventElapsedTime's stated resolution (CUDA Runtime API, "around 0.5 microseconds").
CUDA_EVENT_RESOLUTION_S = 0.5e-6

#: A flush touches this many times the cache, whatever its replacement policy.
FLUSH_MULTIPLE = 4


def patched_timers() -> list[str]:
    """Public timers that are not what they were when pytest loaded the plugin, or not torch's."""
    found = originals.replaced_timers()
    event = torch.cuda.Event
    public = (
        event,
        *(getattr(event, name, None) for name in ("record", "synchronize", "elapsed_time")),
        torch.cuda.synchronize,
    )
    if not found and public != (_Event, _record, _wait_for, _elapsed_ms, _synchronize):
        found = ["what pytest_fastlayer.clocks bound of torch.cuda's timers"]  # and put back since
    return found


@dataclass(frozen=True)
class BlockTime:
    """One block: ``seconds`` by the clock, ``wall_s`` by the host, ``tail_s`` still running.

    ``tail_s`` is how long the device went on working after the stream that was timed had
    finished: work hidden on another stream.
    """

    seconds: float
    wall_s: float
    tail_s: float = 0.0


class Clock(Protocol):
    """Times blocks of forwards."""

    name: Literal["cuda_events", "cpu_clock"]
    resolution_s: float
    settle_s: float  #: default settling time per arm

    def block(self, fn: Callable[[], object], forwards: int, *, cold: bool = False) -> BlockTime:
        """Time ``forwards`` calls; ``cold`` flushes the cache before each, outside the time."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""
        ...


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection off, and afterwards as it was."""
    was_enabled = gc.isenabled()
    _gc_disable()
    try:
        yield
    finally:
        if was_enabled:
            _gc_enable()


class CpuClock:
    """``time.perf_counter`` around the block; in cold mode around each forward."""

    name: Literal["cuda_events", "cpu_clock"] = "cpu_clock"
    settle_s = 0.5

    def __init__(self) -> None:
        self.resolution_s = max(_clock_info("perf_counter").resolution, _smallest_step())
        self._flush: torch.Tensor | None = None

    def synchronize(self) -> None:
        """Nothing to wait for: a CPU forward is done when it returns."""

    def block(self, fn: Callable[[], object], forwards: int, *, cold: bool = False) -> BlockTime:
        with _no_collection():
            begin = _perf_counter()
            if cold:
                spent = 0.0
                for _ in range(forwards):
                    self._flush_cache()
                    start = _perf_counter()
                    fn()
                    spent += _perf_counter() - start
            else:
                for _ in range(forwards):
                    fn()
                spent = _perf_counter() - begin
            return BlockTime(spent, _perf_counter() - begin)

    def _flush_cache(self) -> None:
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_MULTIPLE * cpu_cache_bytes(), dtype=torch.uint8)
        self._flush.add_(1)


class CudaClock:
    """A pair of CUDA events around the block; in cold mode around each forward.

    In cold mode the flush keeps the device busy while the host launches the forward, so the time
    is the device's alone; a warm block of small kernels also shows the host's launches. The two
    are never compared.
    """

    name: Literal["cuda_events", "cpu_clock"] = "cuda_events"
    settle_s = 10.0
    resolution_s = CUDA_EVENT_RESOLUTION_S

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None

    def synchronize(self) -> None:
        _synchronize(self.device)

    def block(self, fn: Callable[[], object], forwards: int, *, cold: bool = False) -> BlockTime:
        with torch.cuda.device(self.device), _no_collection():
            stream = torch.cuda.current_stream(self.device)
            count = forwards if cold else 1
            events = [
                (_Event(enable_timing=True), _Event(enable_timing=True)) for _ in range(count)
            ]
            _synchronize(self.device)
            begin = _perf_counter()
            if cold:
                for start, end in events:
                    self._flush_cache()
                    _record(start, stream)
                    fn()
                    _record(end, stream)
            else:
                start, end = events[0]
                _record(start, stream)
                for _ in range(forwards):
                    fn()
                _record(end, stream)
            _wait_for(events[-1][1])
            timed = _perf_counter()
            _synchronize(self.device)
            done = _perf_counter()
            seconds = sum(_elapsed_ms(start, end) for start, end in events) / 1e3
            return BlockTime(seconds, done - begin, done - timed)

    def _flush_cache(self) -> None:
        if self._flush is None:
            size = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
            self._flush = torch.empty(
                FLUSH_MULTIPLE * max(size, 1 << 20), dtype=torch.uint8, device=self.device
            )
        self._flush.zero_()


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device. Raises ValueError for types other than cuda and cpu."""
    device = torch.device(device)
    if device.type == "cuda":
        return CudaClock(device)
    if device.type == "cpu":
        return CpuClock()
    raise ValueError(f"no clock for device {device}: expected a cuda or cpu device")


def _smallest_step(readings: int = 2000) -> float:
    """Smallest step between two readings of the clock that was ever seen."""
    times = [_perf_counter() for _ in range(readings)]
    steps = [b - a for a, b in pairwise(times) if b > a]
    return min(steps, default=1e-6)


def cpu_cache_bytes(root: str | Path = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Size of the CPU's largest cache, bytes: Linux's sysfs, POSIX sysconf, else 32 MiB."""
    sizes = []
    for file in Path(root).glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL4_CACHE_SIZE"):
        if name in getattr(os, "sysconf_names", {}):
            sizes.append(os.sysconf(name))
    return max(sizes, default=0) or (32 << 20)


def collect_garbage() -> Any:
    """A full collection by the captured collector."""
    return _gc_collect()
