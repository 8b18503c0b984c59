"""What a warm call costs the host, in parts: ``python -m fastlayer.overhead --case 2 3 4``.

Host times are taken in bursts short enough for the device's queue, which is waited for outside the
timed region: they hold Python's, torch's and the driver's work and no waiting. The first calls of a
burst, after that wait, are not timed. In microseconds a call:

    decision     module call, checks, process state, key: a call that neither looks the parameters
                 over nor runs anything
    freshness    looking the parameters and modules over; by compiled code on a GPU, or by Python
                 where there is no C compiler (``compiled_freshness`` in the JSON says which)
    allocation   the output
    launch       the route's own call without that allocation; on a CPU it would compute there
    host         all of it, one call after another
    to_launch    decision, allocation, launch: after these the device computes, where the route
                 launches ahead of looking the parameters over; else with freshness

and against the device, where there is one:

    kernel       the device's own time, from events around calls that were all queued behind a pause
    back_to_back wall time a call of an unbroken row of calls
    latency      wall time of one call and its synchronisation, on an idle device
    over_kernel  latency less kernel
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch

from fastlayer.admissions import committed
from fastlayer.cases import CASES
from fastlayer.config import TransformerConfig
from fastlayer.contract import Precision, RuntimeContract
from fastlayer.device import probe
from fastlayer.dispatch import decide
from fastlayer.errors import RouteError
from fastlayer.inputs import BASE_SEED, make_inputs
from fastlayer.model import _UNKNOWN_MEMORY, FastTransformer, _is_memory_bound
from fastlayer.routes import ROUTE_NAMES
from fastlayer.usage import size, writable

#: Calls in a burst, untimed and timed: few enough that a device's queue takes them all at once.
_UNTIMED, _BURST = 10, 40

#: Calls in a row for throughput, many beside those that follow a wait.
_ROW = 500

#: Calls queued for the device's own time, at most, and the pause before them, in the device's clock
#: cycles: some 10 ms.
_QUEUED = 100
_PAUSE_CYCLES = 20_000_000

#: Seconds of work before a case, since clocks fall while kernels are compiled.
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Microseconds:
    """The quickest and the median sample; the quickest is what the work takes undisturbed."""

    least: float
    median: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Microseconds:
        return cls(round(min(seconds) * 1e6, 3), round(statistics.median(seconds) * 1e6, 3))

    def minus(self, other: Microseconds) -> Microseconds:
        return Microseconds(
            round(self.least - other.least, 3), round(self.median - other.median, 3)
        )

    def plus(self, other: Microseconds) -> Microseconds:
        return Microseconds(
            round(self.least + other.least, 3), round(self.median + other.median, 3)
        )


def _model(config: TransformerConfig, device: str, route: str | None) -> FastTransformer:
    torch.manual_seed(BASE_SEED)
    options: dict[str, Any] = {"policy": "eligible"} if route is None else {"route": route}
    return FastTransformer(config, **options).eval().requires_grad_(False).to(device)


def _prepare(config: TransformerConfig, device: str, route: str | None) -> None:
    """Leaves what a first call compiles and proves in the caches on disk."""
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        _model(config, device, route)(make_inputs(config, BASE_SEED, device)[0])


def measure(config: TransformerConfig, device: str, route: str | None, samples: int) -> Any:
    """The route that ran and the times of the module's table, by name, for one shape."""
    model = _model(config, device, route)
    x, _ = make_inputs(config, BASE_SEED, device)
    on_device = x.is_cuda
    synchronize = torch.cuda.synchronize if on_device else _nothing
    for _ in range(3):
        model(x)
    synchronize()
    state = model._runtime.state
    _, plan = model._runtime.last
    assert plan is not None, "a decision that follows from free memory is not remembered as last"

    def burst(call: Callable[[], object]) -> Microseconds:
        return _burst(call, synchronize, samples)

    freshness = burst(lambda: state.refresh(False))
    allocation = burst(lambda: torch.empty_like(x))
    with _idle(model):
        decision = burst(lambda: model(x))
    times = {"decision": decision, "freshness": freshness, "allocation": allocation}
    if on_device:
        run = plan.run
        launch = burst(lambda: run(x, None)).minus(allocation)
        ready = decision.plus(allocation).plus(launch)
        times["launch"] = launch
        times["host"] = burst(lambda: model(x))
        times["to_launch"] = ready if plan.ahead else ready.plus(freshness)
        times["kernel"] = _queued(lambda: run(x, None), samples)
        times["back_to_back"] = _row(lambda: model(x), samples)
        times["latency"] = _alone(lambda: model(x), samples)
        times["over_kernel"] = times["latency"].minus(times["kernel"])
    return {
        "route": plan.decision.route,
        "launch": dict(plan.decision.launch),
        "ahead": plan.ahead,
        "compiled_freshness": state.is_proved,
        "microseconds": {name: asdict(value) for name, value in times.items()},
    }


def _nothing() -> None:
    """Stands for waiting where nothing runs behind the host's back."""


@contextmanager
def _idle(model: FastTransformer) -> Iterator[None]:
    """Within, a warm call of ``model`` looks nothing over and runs nothing."""
    state, (_, plan) = model._runtime.state, model._runtime.last
    assert plan is not None
    version, run = state.version, plan.run
    plan.run = lambda x, mask: x
    state.refresh = lambda capturing=False: version  # type: ignore[method-assign]
    try:
        yield
    finally:
        plan.run = run
        del state.refresh


def _burst(
    call: Callable[[], object], synchronize: Callable[[], None], samples: int
) -> Microseconds:
    taken = []
    for _ in range(samples):
        for _ in range(_UNTIMED):
            call()
        start = time.perf_counter()
        for _ in range(_BURST):
            call()
        taken.append((time.perf_counter() - start) / _BURST)
        synchronize()
    return Microseconds.of(taken)


def _queued(call: Callable[[], object], samples: int) -> Microseconds:
    """The device's time a call: the host is through before the first of them begins.

    A row that the host cannot queue within the pause, or that a queue does not hold, is halved.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    row = _QUEUED
    taken: list[float] = []
    while len(taken) < max(3, samples // 10):
        torch.cuda._sleep(_PAUSE_CYCLES)
        start.record()
        for _ in range(row):
            call()
        end.record()
        late = start.query()
        end.synchronize()
        if not late:
            taken.append(start.elapsed_time(end) * 1e-3 / row)
        elif row > 1:
            row //= 2
            taken.clear()
        else:
            raise RuntimeError(
                f"the device began before one call was queued: given a pause of {_PAUSE_CYCLES:,} "
                "cycles; expected it to outlast that. Is the host very busy?"
            )
    return Microseconds.of(taken)


def _row(call: Callable[[], object], samples: int) -> Microseconds:
    taken = []
    for _ in range(max(3, samples // 10)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_ROW):
            call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / _ROW)
    return Microseconds.of(taken)


def _alone(call: Callable[[], object], samples: int) -> Microseconds:
    taken = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return Microseconds.of(taken)


def _settle(device: str) -> None:
    """Brings clocks up."""
    block = torch.ones(1024, 1024, device=device)
    until = time.perf_counter() + _SETTLE_S
    while time.perf_counter() < until:
        block @ block
        if block.is_cuda:
            torch.cuda.synchronize()


def _line(case: int, measured: dict[str, Any]) -> str:
    times = measured["microseconds"]
    parts = "  ".join(f"{name} {value['least']:.1f}" for name, value in times.items())
    return f"case {case:2d}  {measured['route']:<12}  {parts}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, which can be measured here. Ends with status 2 where they cannot."""
    parser = argparse.ArgumentParser(prog="python -m fastlayer.overhead")
    parser.add_argument("--case", type=int, nargs="+", choices=list(CASES), default=[2, 3, 4])
    parser.add_argument(
        "--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--route", choices=ROUTE_NAMES, help="the first without objection where left out"
    )
    parser.add_argument("--samples", type=size, default=60, help="bursts for each figure")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write every figure")
    options = parser.parse_args(arguments)
    for case in options.case:
        if reason := _unmeasurable(case, options.device, options.route):
            parser.error(f"given --case {case} on {options.device}: {reason}")
    return options


def _device(text: str) -> str:
    """A device of this machine by name."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" or (
        device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    ):
        return text
    present = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    raise argparse.ArgumentTypeError(f"given {text!r}; expected one of {', '.join(present)}")


def _unmeasurable(case: int, device: str, route: str | None) -> str:
    """Why a warm call of that case cannot be taken apart here, with what to do; or ""."""
    facts = probe(device)
    contract = RuntimeContract(
        CASES[case],
        facts,
        precision=Precision("high", True),
        available_bytes=facts.memory_bytes or _UNKNOWN_MEMORY,
    )
    if _is_memory_bound(contract):
        return (
            "its decision follows from free memory, which every call asks for; expected a case "
            "whose dense arithmetic takes a small share of the device. Choose a smaller one."
        )
    try:
        decide(contract, committed(), "eligible", route)
    except RouteError as error:
        return f"{'; '.join(error.objections)}; expected --route {' or '.join(error.valid)}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    before = torch.get_float32_matmul_precision()
    if options.device != "cpu" and len(options.case) > 1:
        # Kernels are compiled and proved all at once, before anything is timed.
        jobs = min(len(options.case), os.cpu_count() or 1)
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
            for done in [
                workers.submit(_prepare, CASES[case], options.device, options.route)
                for case in options.case
            ]:
                done.result()
    torch.set_float32_matmul_precision("high")
    gc.collect()
    gc.disable()
    cases = {}
    try:
        with torch.no_grad():
            for case in options.case:
                _settle(options.device)
                cases[case] = measure(CASES[case], options.device, options.route, options.samples)
                print(_line(case, cases[case]), flush=True)
    finally:
        gc.enable()
        torch.set_float32_matmul_precision(before)
    if options.json:
        report = {
            "device": asdict(probe(options.device)),
            "host": probe("cpu").name,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "cases": cases,
        }
        options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
