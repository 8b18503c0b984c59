"""Python's own timers, bound when pytest loads the plugin, and which functions are not originals.

A test module is imported at collection, long before the first fixture. So what the gate reads the
time with is bound here, and this module, which needs neither torch nor numpy, is imported with the
plugin itself. torch may come first, and the gate's heavier modules come later: their functions are
known by origin instead, that is by the namespace that a function reads its globals from, by the
file that its code was compiled from, and by its name. For the gate's own modules the source says
what each name must be.

All of this runs in the candidate's process and can be forged by whoever sets out to: it is a check
for replaced functions, no sandbox.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

perf_counter = time.perf_counter
clock_info = time.get_clock_info
gc_disable, gc_enable, gc_collect = gc.disable, gc.enable, gc.collect
_urandom = os.urandom

#: Timers of Python that a benchmark trusts: where they live, and what they were.
_BUILTIN: tuple[tuple[ModuleType, str, object], ...] = tuple(
    (owner, name, getattr(owner, name))
    for owner, names in (
        (
            time,
            ("perf_counter", "perf_counter_ns", "time", "time_ns", "monotonic", "process_time"),
        ),
        (gc, ("collect", "disable", "enable")),
    )
    for name in names
)
#: What this module bound of them, which the clocks use.
_BOUND: tuple[tuple[str, ModuleType, str], ...] = (
    ("perf_counter", time, "perf_counter"),
    ("clock_info", time, "get_clock_info"),
    ("gc_disable", gc, "disable"),
    ("gc_enable", gc, "enable"),
    ("gc_collect", gc, "collect"),
)
#: Timers of torch: the module and name that are public, and where torch defines what is there.
_TORCH: tuple[tuple[str, str, str], ...] = (
    ("torch.cuda", "Event", "torch.cuda.streams"),
    ("torch.cuda", "Stream", "torch.cuda.streams"),
    ("torch.cuda", "Event.record", "torch.cuda.streams"),
    ("torch.cuda", "Event.synchronize", "torch.cuda.streams"),
    ("torch.cuda", "Event.elapsed_time", "torch.cuda.streams"),
    ("torch.cuda", "synchronize", "torch.cuda"),
    ("torch.cuda", "current_stream", "torch.cuda"),
    ("torch._C", "_cuda_synchronize", "torch._C"),
)
#: Modules that decide whether a candidate is right, honest and how long it took.
DECIDING = (
    "accuracy",
    "clocks",
    "elementwise",
    "feeding",
    "fingerprint",
    "immutable",
    "originals",
    "outputs",
    "probes",
    "samples",
    "statistics",
)
_PACKAGE = "pytest_fastlayer"
#: Where what a decorator of Python's library leaves around a function keeps it.
_INSIDE: dict[type, str] = {
    property: "fget",
    classmethod: "__func__",
    staticmethod: "__func__",
    functools.cached_property: "func",
    type(functools.cache(len)): "__wrapped__",
}


def draw(choices: int) -> int:
    """A number from 0 up to ``choices`` (excluded) that no seed foretells."""
    return int.from_bytes(_urandom(8), "big") % choices


def replaced_timers() -> list[str]:
    """Public timers that are not what they were, or not what Python and torch define."""
    found = [
        f"{owner.__name__}.{name}"
        for owner, name, original in _BUILTIN
        if getattr(owner, name, None) is not original or not _is_builtin(owner, name, original)
    ]
    found += [
        f"{__name__}.{name}"
        for name, owner, attribute in _BOUND
        if not _is_builtin(owner, attribute, globals()[name])
    ]
    for module, name, home in _TORCH:
        if module not in sys.modules or home not in sys.modules:
            continue
        owner: Any = sys.modules[module]
        *path, last = name.split(".")
        for step in path:
            owner = vars(owner).get(step)
        if not isinstance(owner, ModuleType | type):
            continue  # its class has been named already
        is_there = last in vars(owner)
        if is_there and not _is_of(vars(owner)[last], sys.modules[home], name):
            found.append(f"{module}.{name}")
    # A class that was replaced as a whole is named once, not method by method.
    return [one for one in found if not any(one.startswith(f"{other}.") for other in found)]


def _is_builtin(owner: ModuleType, name: str, value: object) -> bool:
    """What was bound is Python's own too: another plugin may have been loaded first."""
    return (
        isinstance(value, BuiltinFunctionType)
        and value.__self__ is owner
        and value.__name__ == name
    )


def _is_of(value: object, home: ModuleType, name: str) -> bool:
    """Whether ``value`` is what ``home`` defines under ``name``, judging by what it is made of."""
    if isinstance(value, FunctionType):
        return (
            value.__globals__ is vars(home)
            and value.__qualname__ == name
            and _ends_like(value.__code__.co_filename, home)
        )
    if isinstance(value, type):
        return value is vars(home).get(name) and value.__module__ == home.__name__
    # Without CUDA, torch leaves some of its C functions out; there is nothing to be timed then.
    return value is None or (isinstance(value, BuiltinFunctionType) and value.__name__ == name)


def _ends_like(filename: str, home: ModuleType) -> bool:
    """Code compiled from the file of ``home``, wherever its folder was when it was compiled."""
    parts = home.__name__.split(".")
    steps = filename.replace("\\", "/").removesuffix(".py").split("/")
    if steps[-1] == "__init__":
        steps.pop()
    return steps[-len(parts) :] == parts


def replaced_deciders() -> list[str]:
    """Functions and methods of the gate's deciding modules that are not what their source says."""
    found: list[str] = []
    for label, module in list(sys.modules.items()):
        package, _, rest = label.partition(".")
        is_deciding = package == _PACKAGE and rest.split(".")[0] in DECIDING
        if is_deciding and isinstance(module, ModuleType) and module.__file__:
            found += _replaced_in(module, module.__file__)
    return found


def _replaced_in(module: ModuleType, file: str) -> Iterator[str]:
    for name, source, original in _written(file):
        owner: Any = module
        *path, last = name.split(".")
        for step in path:
            owner = vars(owner).get(step)
        if path and not isinstance(owner, type):
            continue  # its class has been named already
        value = vars(owner).get(last)
        if source is None:
            is_right = _is_defined(value, module, name)
        elif source not in sys.modules:
            continue
        else:
            home = sys.modules[source]
            expected = vars(home).get(original, sys.modules.get(f"{source}.{original}"))
            is_right = value is expected
        if not is_right:
            yield f"{module.__name__}.{name}"


def _is_defined(value: object, module: ModuleType, name: str) -> bool:
    """A definition of ``module``, through the decorators of Python's library and of torch."""
    while inside := _INSIDE.get(type(value)):
        value = getattr(value, inside)
    if isinstance(value, FunctionType) and _is_wrapper(value):
        return _is_defined(getattr(value, "__wrapped__", None), module, name)
    if isinstance(value, type):
        return value.__module__ == module.__name__ and value.__qualname__ == name
    return _is_of(value, module, name)


def _is_wrapper(function: FunctionType) -> bool:
    """A function that ``contextlib.contextmanager``, or a base class of torch, put around one."""
    home = sys.modules.get(str(function.__globals__.get("__name__")))
    return (
        home is not None
        and (home is contextlib or home.__name__.startswith("torch."))
        and function.__globals__ is vars(home)
        and _ends_like(function.__code__.co_filename, home)
    )


@functools.cache
def _written(file: str) -> tuple[tuple[str, str | None, str], ...]:
    """What a module's source binds at its top: name, whence it is imported, and its name there.

    Whence is None for what the module defines, methods of its classes included. Names that are
    assigned to as well are left out, and so is a source that cannot be read.
    """
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return ()
    names: dict[str, tuple[str | None, str]] = {}
    assigned: set[str] = set()
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = (None, node.name)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = (None, node.name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    names[f"{node.name}.{inner.name}"] = (None, inner.name)
        elif isinstance(node, ast.Assign) and (bound := _original_of(node)):
            names[bound[0]] = (__name__, bound[1])
        elif isinstance(node, ast.Assign):
            assigned |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return tuple((name, *where) for name, where in names.items() if name not in assigned)


def _original_of(node: ast.Assign) -> tuple[str, str] | None:
    """``name = originals.original`` at the top of a module, as (name, original)."""
    match node:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Attribute(value=ast.Name(id="originals"), attr=original),
        ):
            return name, original
    return None
