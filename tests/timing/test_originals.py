"""What was replaced before the gate's heavier modules were imported is seen too."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fastlayer import accuracy, clocks, elementwise, originals, statistics
from pytest_fastlayer.probes import run as probes_run

#: A pair whose candidate is the reference. Names are replaced as a test module is imported.
PAIR = """
import gc, time
import torch
{replacing}

def inputs(seed):
    return (torch.randn(8, generator=torch.Generator().manual_seed(seed)),)

def test_pair(paired):
    paired("pair", reference=torch.relu, candidate=lambda x: {candidate}, inputs=inputs)
"""
ALWAYS_RIGHT = """
from pytest_fastlayer import accuracy
from pytest_fastlayer.probes import after, run
real = accuracy.compare
def compare(candidate, reference, *rest, **more):
    return real(reference, reference, *rest, **more)
for module in (accuracy, after, run):
    module.compare = compare
"""


def test_nothing_is_replaced() -> None:
    assert originals.replaced_timers() == []
    assert originals.replaced_deciders() == []


@pytest.mark.parametrize(
    ("replacing", "candidate", "said"),
    [
        (
            "now = time.perf_counter\ntime.perf_counter = lambda: now() / 10",
            "torch.relu(x)",
            "*DISHONEST: pair: timers: time.perf_counter replaced*",
        ),
        (
            "torch.cuda.Event.elapsed_time = lambda start, end: 0.0",
            "torch.relu(x)",
            "*DISHONEST: pair: timers: torch.cuda.Event.elapsed_time replaced*",
        ),
        (ALWAYS_RIGHT, "x + 1", "*DISHONEST: pair: patched_functions: *accuracy.compare replaced*"),
    ],
    ids=["clock", "event", "compare"],
)
def test_what_a_test_module_replaces_on_import_is_named(
    pytester: pytest.Pytester, replacing: str, candidate: str, said: str
) -> None:
    """In a process of its own: here everything has long been imported."""
    pytester.makepyfile(PAIR.format(replacing=replacing, candidate=candidate))
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    assert result.ret == 1
    result.stdout.fnmatch_lines([said])


def test_timers_are_bound_without_torch() -> None:
    code = (
        "import time; original = time.perf_counter; import pytest_fastlayer.plugin, sys;"
        "assert not {'torch', 'numpy'} & set(sys.modules); time.perf_counter = lambda: 0.0;"
        "from pytest_fastlayer import clocks; assert clocks._perf_counter is original;"
        "assert clocks.patched_timers() == ['time.perf_counter']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls itself by the name of what it replaces."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (accuracy, "compare", "pytest_fastlayer.accuracy.compare"),
        (probes_run, "compare", "pytest_fastlayer.probes.run.compare"),
        (probes_run, "_noting", "pytest_fastlayer.probes.run._noting"),
        (elementwise.Comparer, "run", "pytest_fastlayer.elementwise.Comparer.run"),
        (clocks.CpuClock, "block", "pytest_fastlayer.clocks.CpuClock.block"),
        (clocks, "_perf_counter", "pytest_fastlayer.clocks._perf_counter"),
        (statistics, "summarize", "pytest_fastlayer.statistics.summarize"),
    ],
)
def test_a_wrapped_decider_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, said: str
) -> None:
    monkeypatch.setattr(owner, name, wrapping(getattr(owner, name)))
    assert said in originals.replaced_deciders()


def test_a_decider_of_other_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*args: Any, **kwargs: Any) -> Any:
        return None

    monkeypatch.setattr(accuracy.compare, "__code__", compare.__code__)
    assert originals.replaced_deciders() == ["pytest_fastlayer.accuracy.compare"]


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (time, "perf_counter", "time.perf_counter"),
        (gc, "collect", "gc.collect"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
    ],
)
def test_a_wrapped_timer_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, said: str
) -> None:
    monkeypatch.setattr(owner, name, wrapping(getattr(owner, name)))
    assert originals.replaced_timers() == [said]


def test_a_timer_that_another_plugin_replaced_first_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was bound is then itself not Python's, though it is what is there now."""
    fake = wrapping(time.perf_counter)
    bound = tuple(
        (owner, name, fake if name == "perf_counter" else original)
        for owner, name, original in originals._BUILTIN
    )
    monkeypatch.setattr(time, "perf_counter", fake)
    monkeypatch.setattr(originals, "_BUILTIN", bound)
    assert originals.replaced_timers() == ["time.perf_counter"]


def test_a_drawn_number_is_below_its_bound() -> None:
    assert {originals.draw(3) for _ in range(200)} == {0, 1, 2}
