"""Where an arm's time goes: a profiler trace that Perfetto reads, and a table by kind of work.

Taken outside every timed region, for profiling slows what it watches. Ranges named by arm and
route enclose each forward, in the trace and, on a GPU, as NVTX ranges for other profilers. Within
a reference that is a module, ranges named by its submodules are its stages; a candidate may bypass
its submodules, so its stages are its operators, each of which has an NVTX range in one forward,
and whatever ranges it opens itself.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from tabulate import tabulate

from pytest_fastlayer.feeding import synchronize
from pytest_fastlayer.kernel_kinds import kind_of

FORWARDS, WARM_UP = 3, 2
#: A forward of so many seconds is profiled once, without warming up.
LONG_FORWARD_S = 1.0
#: Kernels that the table lists by name, and how much of a name it shows.
LARGEST, NAME_WIDTH = 12, 90
GAPS = "launch gaps"
#: Letters of an arm's name that its files keep.
STEM_WIDTH = 120


class Event(NamedTuple):
    """A kernel, or on a CPU an operator: microseconds on the profiler's clock."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Share:
    """Microseconds of one forward spent in one kind of work, or in one kernel."""

    kind: str
    microseconds: float
    calls: float


def shares(
    forwards: Sequence[Sequence[Event]],
    *,
    with_gaps: bool,
    key: Callable[[str], str] = kind_of,
) -> list[Share]:
    """Mean time of a forward by kind of work, largest first.

    ``forwards`` holds the events of each forward. On a GPU (``with_gaps``) the time within a
    forward in which no kernel ran is a kind of its own: on launch-bound work it is most of it. The
    time between two forwards is nobody's.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for events in forwards:
        for event in events:
            spent[key(event.name)] += event.duration
            calls[key(event.name)] += 1
    if not spent:
        return []
    count = len(forwards)
    found = [Share(kind, spent[kind] / count, calls[kind] / count) for kind in spent]
    if with_gaps:
        idle = [gap for events in forwards for gap in _gaps(events)]
        found.append(Share(GAPS, sum(idle) / count, len(idle) / count))
    return sorted(found, key=lambda share: -share.microseconds)


def _gaps(events: Sequence[Event]) -> Iterator[float]:
    """Microseconds between kernels in which none ran, on whatever stream."""
    ordered = sorted(events, key=lambda event: event.start)
    busy_until = ordered[0].start if ordered else 0.0
    for event in ordered:
        if event.start > busy_until:
            yield event.start - busy_until
        busy_until = max(busy_until, event.start + event.duration)


def split(events: Sequence[Event], starts: Sequence[float]) -> list[list[Event]]:
    """Events by the forward during which they began; ``starts`` are the forwards' beginnings.

    What began earlier, by the clocks' disagreement, belongs to the first.
    """
    ordered = sorted(starts)
    forwards: list[list[Event]] = [[] for _ in ordered]
    for event in events:
        forwards[max(0, bisect_right(ordered, event.start) - 1)].append(event)
    return forwards


def table(found: Sequence[Share], heading: str = "kind") -> str:
    """The shares as text."""
    total = sum(share.microseconds for share in found) or 1.0
    return tabulate(
        [
            (
                s.kind if len(s.kind) <= NAME_WIDTH else s.kind[: NAME_WIDTH - 3] + "...",
                f"{s.microseconds:,.1f}",
                f"{s.microseconds / total:.1%}",
                f"{s.calls:,.4g}",
            )
            for s in found
        ],
        headers=(heading, "us a forward", "share", "calls a forward"),
        colalign=("left", "right", "right", "right"),
        disable_numparse=True,
    )


def trace(
    function: Callable[[], Any],
    device: torch.device,
    folder: Path,
    name: str,
    *,
    route: str = "",
    module: object = None,
    forward_s: float = 0.0,
) -> tuple[Path, list[Share]]:
    """Profile a few forwards; write ``<name>.json`` (Chrome trace) and ``<name>.txt`` (tables).

    The files are named by ``stem``: no two arms share one, whatever they are called.

    Args:
        function: One forward.
        device: What it runs on.
        folder: Where the two files go.
        name: What the arm is called.
        route: How it computes; part of the ranges' names.
        module: Where its stages are: ranges are opened around its submodules, unless that changes
            which kernels run.
        forward_s: Seconds that a forward takes, roughly.

    Returns:
        The path of the trace, and the shares by kind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_long = forward_s > LONG_FORWARD_S
    label = f"{name} [{route}]" if route else name
    for _ in range(0 if is_long else WARM_UP):
        function()
    synchronize(device)
    count = 1 if is_long else FORWARDS
    profiler, forwards = _profile(function, device, label, count)
    if not is_long and has_stages(module):
        # A module may refuse hooks, or compute otherwise under them: then it goes without stages.
        with suppress(Exception), stages(module, route or name, device):
            staged, again = _profile(function, device, label, count)
            if _kernels(again) == _kernels(forwards):
                profiler = staged
    if device.type == "cuda" and not is_long:
        # For whoever runs this under another profiler; torch's own must not be running meanwhile.
        with torch.autograd.profiler.emit_nvtx(), span(f"{label} by operators", device):
            function()
        synchronize(device)
    path = folder / f"{stem(name)}.json"
    profiler.export_chrome_trace(str(path))
    gaps = device.type == "cuda"
    found = shares(forwards, with_gaps=gaps)
    by_name = shares(forwards, with_gaps=False, key=str)[:LARGEST]
    what = "kernel" if gaps else "operator"
    text = f"{label}\n\n{table(found)}\n\n{table(by_name, f'largest, by {what}')}\n"
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return path, found


def stem(name: str) -> str:
    """A file's name for an arm, another for each: what had to be changed is told by a digest."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")[:STEM_WIDTH]
    if plain == name and not name.startswith("."):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{plain.lstrip('.') or 'trace'}-{digest}"


def _kernels(forwards: Sequence[Sequence[Event]]) -> Counter[str]:
    return Counter(event.name for events in forwards for event in events)


def _profile(
    function: Callable[[], Any],
    device: torch.device,
    label: str,
    count: int,
) -> tuple[Any, list[list[Event]]]:
    """A finished profiler, and the events of each of ``count`` forwards."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    names = [f"{label} forward {index}" for index in range(count)]
    # One cycle, whose events are kept: without acc_events torch warns that later ones are lost.
    with profile(activities=activities, acc_events=True) as profiler:
        for name in names:
            with span(name, device):
                function()
                synchronize(device)  # so that a forward's kernels lie within its range
    seen = list(profiler.events())
    starts = [
        event.time_range.start
        for event in seen
        if event.name in names and event.device_type.name == "CPU"
    ]
    return profiler, split(_events(seen, device), starts or [0.0])


@contextmanager
def span(name: str, device: torch.device) -> Iterator[None]:
    """A named range in the profiler's trace, and on a GPU in NVTX."""
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if device.type == "cuda":
            torch.cuda.nvtx.range_push(name)
            stack.callback(torch.cuda.nvtx.range_pop)
        yield


def has_stages(module: object) -> TypeGuard[torch.nn.Module]:
    """A module, and none that torch.compile wraps: that would compile again for every hook."""
    return isinstance(module, torch.nn.Module) and type(module).__name__ != "OptimizedModule"


@contextmanager
def stages(module: torch.nn.Module, route: str, device: torch.device) -> Iterator[None]:
    """Ranges ``<route>/<path>`` around the forward of every submodule."""
    open_spans: list[AbstractContextManager[None]] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_spans.append(span(f"{route}/{path}", device))
            open_spans[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        open_spans.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for path, child in module.named_modules():
            if path:
                stack.callback(child.register_forward_pre_hook(enter(path)).remove)
                stack.callback(child.register_forward_hook(leave, always_call=True).remove)
        yield


def _events(seen: Sequence[Any], device: torch.device) -> list[Event]:
    """Kernels on a GPU; on a CPU the operators, each with the time it did not pass on."""
    found = []
    for event in seen:
        start = event.time_range.start
        if device.type == "cuda":
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                found.append(Event(event.name, start, event.time_range.elapsed_us()))
        elif event.name.startswith(("aten::", "mkldnn::")):
            found.append(Event(event.name, start, event.self_cpu_time_total))
    return found
