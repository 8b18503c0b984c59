"""A watch names whatever a candidate changed in the process, and nothing that honest ones do."""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from probe_pair import honest, make_inputs
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pytest_fastlayer import (
    accuracy,
    baselines,
    comparison,
    gate,
    immutable,
    measurement,
    probes,
    records,
    statistics,
    timing,
)
from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.probes import Watch, namespaces, run_probes, state
from pytest_fastlayer.probes import watch as watch_module

Patch = pytest.MonkeyPatch


def _no(*_: object, **__: object) -> Any:
    return False


def _slow(*args: Any, **keywords: Any) -> Any:
    return functional.softmax(*args, **keywords)


class _Mode(TorchFunctionMode):
    """Sees every call of a torch function."""


def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Any:
    """A change of a setting that is put back afterwards."""

    def change(patch: Patch, stack: ExitStack) -> None:
        stack.callback(put, get())
        put(value)

    return change


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, kept)


def _enter(make: Callable[[], Any]) -> Any:
    return lambda patch, stack: stack.enter_context(make())


def _kernel(patch: Patch, stack: ExitStack) -> None:
    library = torch.library.Library("aten", "IMPL")
    stack.callback(library._destroy)
    library.impl("digamma", lambda x: x, "CPU")


def _hook(patch: Patch, stack: ExitStack) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    stack.callback(handle.remove)


SETTINGS: dict[str, Callable[[Patch, ExitStack], object]] = {
    "the number of threads": _setting(
        torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1
    ),
    "float32 matmul precision": _setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "the default dtype": _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic algorithms": _setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "autocast on cpu": _enter(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autograd's anomaly mode": _enter(torch.autograd.detect_anomaly),
    "oneDNN": _enter(lambda: torch.backends.mkldnn.flags(enabled=False)),
    "the fast path of attention": _setting(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
    "math SDPA": _setting(
        torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False
    ),
    "the order of SDPA backends": _setting(
        torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4]
    ),
    "fp16 accumulation": _enter(
        lambda: _attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", True)
    ),
    "reduced precision in math SDPA": _setting(
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
    "the filling of uninitialised memory": _enter(
        lambda: _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False)
    ),
    "torch function modes": _enter(_Mode),
    "kernels of aten operators": _kernel,
    "hooks of all modules": _hook,
    "a profile function": _setting(sys.getprofile, sys.setprofile, lambda *_: None),
    "the thresholds of garbage collection": _setting(
        gc.get_threshold, lambda values: gc.set_threshold(*values), (1, 1, 1)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_named(name: str, monkeypatch: Patch) -> None:
    watch = Watch()
    with ExitStack() as stack:
        SETTINGS[name](monkeypatch, stack)
        found = watch.changes()
    assert any(one.startswith(name) for one in found), found
    assert watch.changes() == []


def _code(owner: Any, name: str) -> Callable[[Patch], None]:
    """Other code in the same function object."""

    def change(patch: Patch) -> None:
        target = getattr(owner, name)
        target = target.fget if isinstance(target, property) else target

        def other(*args: Any, **keywords: Any) -> Any:
            return None

        patch.setattr(target, "__code__", other.__code__)

    return change


def _set(owner: Any, name: str, value: Any = _no, *, new: bool = False) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value, raising=not new)


#: What leads elsewhere, how it is brought about.
FUNCTIONS: dict[str, Callable[[Patch], None]] = {
    # torch and Python, as the reference uses them
    "torch.softmax": _set(torch, "softmax", _slow),
    "torch.nn.functional.gelu": _set(functional, "gelu", _slow),
    "torch.Tensor.matmul": _set(torch.Tensor, "matmul", _slow, new=True),
    "torch.nn.Linear.forward": _set(torch.nn.Linear, "forward", _slow),
    "torch.nn.Linear.__call__": _set(torch.nn.Linear, "__call__", _slow, new=True),
    "torch.nn.GELU.forward": _set(torch.nn.GELU, "forward", _slow),
    "torch.nn.Linear": _set(torch.nn, "Linear", torch.nn.Bilinear),
    "torch._VF.lstm": _set(torch._VF, "lstm", _slow, new=True),
    "torch._C._nn.linear": _set(torch._C._nn, "linear", _slow),
    "torch.nn.functional.len": _set(functional, "len", _slow, new=True),
    "builtins.all": _set(builtins, "all", _slow),
    "math.sqrt": _set(math, "sqrt", _slow),
    "numpy.median": _set(np, "median"),
    "the code of torch.nn.functional.relu": _code(functional, "relu"),
    "the code of torch.nn.Linear.forward": _code(torch.nn.Linear, "forward"),
    # the gate itself
    "pytest_fastlayer.gate.is_failure": _set(gate, "is_failure"),
    "pytest_fastlayer.gate.judge": _set(gate, "judge"),
    "the code of pytest_fastlayer.gate.is_failure": _code(gate, "is_failure"),
    "pytest_fastlayer.gate.EXIT_CODES[": lambda patch: patch.setitem(
        gate.EXIT_CODES, next(iter(gate.EXIT_CODES)), 99
    ),
    "pytest_fastlayer.gate.any": _set(gate, "any", new=True),
    "pytest_fastlayer.accuracy.compare": _set(accuracy, "compare"),
    "Comparison.passed": _set(comparison.Comparison, "passed", property(lambda _: True)),
    "the code of pytest_fastlayer.comparison.Comparison.passed": _code(
        comparison.Comparison, "passed"
    ),
    "pytest_fastlayer.timing.measure": _set(timing, "measure"),
    "pytest_fastlayer.statistics.summarize": _set(statistics, "summarize"),
    "pytest_fastlayer.measurement.DEFAULTS['cpu']": lambda patch: patch.setitem(
        measurement.DEFAULTS["cpu"], "pairs", 1
    ),
    "pytest_fastlayer.probes.run_probes": _set(probes, "run_probes", lambda *a, **k: ()),
    "pytest_fastlayer.probes.run.SLACK": lambda patch: patch.setattr(
        "pytest_fastlayer.probes.run.SLACK", 1e9
    ),
    "pytest_fastlayer.baselines.merge": _set(baselines, "merge"),
    "pytest_fastlayer.records.CaseRecord.__pydantic_validator__": _set(
        records.CaseRecord, "__pydantic_validator__", object()
    ),
    "pytest_fastlayer.immutable.FrozenReference.verify": _set(immutable.FrozenReference, "verify"),
    "pytest_fastlayer.gate": lambda patch: patch.setitem(
        sys.modules, "pytest_fastlayer.gate", ModuleType("gate")
    ),
    # the watch itself
    "pytest_fastlayer.probes.Watch": _set(probes, "Watch"),
    "pytest_fastlayer.probes.watch.Watch": _set(watch_module, "Watch"),
    "Watch.changes": _set(Watch, "changes", lambda self: []),
    "pytest_fastlayer.probes.namespaces.replaced": _set(namespaces, "replaced", lambda *_: []),
    "the code of pytest_fastlayer.probes.namespaces.replaced": _code(namespaces, "replaced"),
    "pytest_fastlayer.probes.namespaces.sorted": _set(namespaces, "sorted", new=True),
    "pytest_fastlayer.probes.state.changed": _set(state, "changed", lambda *_: []),
    "pytest_fastlayer.probes.state._SETTINGS[": lambda patch: patch.setitem(
        state._SETTINGS,
        "the number of threads",
        lambda: 3,  # type: ignore[arg-type]
    ),
    "builtins.sorted": _set(builtins, "sorted"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replaced_function_is_named(name: str) -> None:
    watch = Watch()
    changes, probe = watch.changes, watch.probe
    with pytest.MonkeyPatch.context() as patch:
        FUNCTIONS[name](patch)
        found, record = changes(), probe()
    assert any(name in one for one in found), found[:5]
    assert not record.passed
    assert record.name == "global_state"
    assert record.message
    assert changes() == []
    assert probe("after") == records.Probe(name="after", passed=True)


def test_a_watch_cannot_be_edited() -> None:
    watch = Watch()
    with pytest.raises(AttributeError, match="cannot be edited"):
        watch.changes = lambda: []


@pytest.fixture
def _settings_restored() -> Iterator[None]:
    kept = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.softmax
    yield
    torch.set_num_threads(kept[0])
    torch.set_float32_matmul_precision(kept[1])
    torch.softmax = kept[2]  # type: ignore[assignment]


@pytest.mark.usefixtures("_settings_restored")
def test_what_was_changed_before_the_probes_is_caught_by_an_earlier_watch() -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(kept + 1)
        torch.set_float32_matmul_precision("medium")
        torch.softmax = _slow  # type: ignore[assignment]
        return honest(x)

    kept = torch.get_num_threads()
    watch = Watch()
    candidate(*make_inputs(1))  # as the accuracy check does
    found = run_probes(honest, candidate, make_inputs, (1, 2), Tolerance(), watch=watch)
    caught = {one.name: one.message for one in found if not one.passed}
    assert set(caught) == {"global_state", "patched_functions"}
    assert f"the number of threads (from {kept} to {kept + 1})" in caught["global_state"]
    assert "float32 matmul precision" in caught["global_state"]
    assert "torch.softmax" in caught["patched_functions"]


def test_honest_use_of_torch_is_no_change() -> None:
    """Lazy imports, compilation, records, timing of grad modes: none of it is a change."""
    watch = Watch()
    limit = sys.getrecursionlimit()
    compiled = torch.compile(functional.gelu, backend="aot_eager")
    with torch.no_grad():
        compiled(torch.randn(4))
        torch.func.vmap(torch.sin)(torch.ones(2))
        torch.compile(torch.nn.LayerNorm(4), backend="eager")(torch.ones(2, 4))
        sys.setrecursionlimit(limit + 1000)  # as Inductor does
        torch.manual_seed(0)
        torch.nn.functional.later = _slow  # type: ignore[attr-defined]
        importlib.import_module("torch.distributed.tensor")

        try:
            assert watch.changes() == []
        finally:
            del torch.nn.functional.later  # type: ignore[attr-defined]
            sys.setrecursionlimit(limit)
    with torch.inference_mode():
        assert watch.probe().passed


def test_modules_that_are_loaded_later_are_no_change(monkeypatch: Patch) -> None:
    watch = Watch()
    late = ModuleType("pytest_fastlayer.late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    monkeypatch.setattr("pytest_fastlayer.late", late, raising=False)
    assert watch.changes() == []


def test_a_module_that_is_loaded_again_is_no_change(monkeypatch: Patch) -> None:
    """pytester forgets modules that its inner session loaded; the next one loads them afresh."""
    stale, fresh = ModuleType("pytest_fastlayer.again"), ModuleType("pytest_fastlayer.again")
    monkeypatch.setattr("pytest_fastlayer.again", stale, raising=False)
    watch = Watch()
    monkeypatch.setitem(sys.modules, fresh.__name__, fresh)
    monkeypatch.setattr("pytest_fastlayer.again", fresh)
    assert watch.changes() == []


def test_a_watch_is_cheap() -> None:
    """Counted in function calls, which do not depend on the machine."""
    watch = Watch()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        watch.functions()
    finally:
        sys.setprofile(before)
    assert calls < 20_000


def test_wrapped_functions_are_followed() -> None:
    def inner() -> int:
        return 1

    @functools.wraps(inner)
    def outer() -> int:
        return inner()

    class Holder:
        method = staticmethod(outer)
        value = property(lambda self: 1)
        cached = functools.lru_cache(inner)
        bound = functools.partial(inner)

    for name, count in (("method", 2), ("value", 1), ("cached", 1), ("bound", 1)):
        assert len(list(namespaces._functions_in(vars(Holder)[name]))) == count
