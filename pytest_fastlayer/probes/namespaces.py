"""Namespaces under watch: what every name led to, and which lead elsewhere now."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

#: Modules whose functions and classes arms, clocks and comparison have in common. A label is the
#: first name that leads to a class, so the public modules come first.
_SHARED = (
    "builtins",
    "time",
    "gc",
    "math",
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.cuda",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch.autograd",
    "torch.functional",
    "torch._tensor",
    "torch._VF",
    "torch._C._nn",
    "torch.ops.aten",
    "torch.overrides",
    "torch.autograd.grad_mode",
    "torch.cuda.streams",
    "torch.backends.cuda",
    "torch.backends.cudnn",
)
_PACKAGE = "pytest_fastlayer"
#: Names that tools set as a matter of course: gettext, consoles, site.
_NOT_WATCHED = frozenset({"_", "print", "open", "input", "breakpoint", "help", "exit", "quit"})
#: What torch.compile replaces on its first use, by wrappers of torch's own.
_TORCH_REPLACES = frozenset(
    {"torch.manual_seed", "torch.nn.Module.__init__", "torch.nn.Module.__setstate__"}
)
_TORCH_HOME = str(Path(torch.__file__).parent)
#: Wrapped functions are followed this far: decorators, partials, properties.
_WRAPPERS = 3
_MISSING = object()
#: CPython's type flags (Py_TPFLAGS_HEAPTYPE and _IMMUTABLETYPE): other classes cannot be edited.
_HEAP_TYPE = 1 << 9
_CAN_CHANGE = _HEAP_TYPE | 1 << 8


class Space(NamedTuple):
    """A namespace under watch: its live mapping, and what its names were."""

    label: str
    live: Mapping[str, object]
    kept: Mapping[str, object]  #: the values that must stay
    names: frozenset[str]  #: all names that there were
    owner: object  #: of the names: a module or a class; None for a table

    def path(self, name: object) -> str:
        """A name in here, as an expression."""
        return f"{self.label}[{name!r}]" if self.owner is None else f"{self.label}.{name}"

    def hides(self, name: str) -> bool:
        """Whether an added name hides an inherited one, a builtin or what a lazy module gives."""
        if isinstance(self.owner, type):
            return any(name in vars(base) for base in self.owner.__mro__[1:])
        if self.owner is torch._VF:
            return hasattr(torch._C._VariableFunctions, name)
        return self.owner is not None and hasattr(builtins, name)


class Body(NamedTuple):
    """What a Python function ran when it was noted."""

    label: str
    function: FunctionType
    code: CodeType
    defaults: object
    keywords: Mapping[str, object]


def is_fixed(name: str) -> bool:
    """Whether a name in a module is to stay what it is."""
    return not name.startswith("__") and name not in _NOT_WATCHED


def own_modules() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == _PACKAGE and isinstance(module, ModuleType)
    }


def snapshot() -> tuple[list[Space], list[Body]]:
    """Every namespace that the gate and its arms run through, and the functions in them."""
    spaces: list[Space] = []
    bodies: dict[int, Body] = {}
    seen: set[int] = set()

    def note(space: Space) -> None:
        spaces.append(space)
        for name, value in space.kept.items():
            if type(value) is BuiltinFunctionType:
                continue
            for function in _functions_in(value):
                bodies.setdefault(
                    id(function),
                    Body(
                        space.path(name),
                        function,
                        function.__code__,
                        function.__defaults__,
                        dict(_keywords(function)),
                    ),
                )

    def visit(label: str, owner: object, home: str, *, whole: bool) -> None:
        live: Mapping[str, object] = vars(owner)
        kept = {
            name: value
            for name, value in list(live.items())
            if (whole or callable(value)) and is_fixed(name) and not _is_stale(value)
        }
        note(Space(label, live, kept, frozenset(live), owner))
        for name, value in kept.items():
            if (
                isinstance(value, type)
                and getattr(value, "__module__", "").partition(".")[0] == home
                and value.__flags__ & _CAN_CHANGE == _HEAP_TYPE
                and id(value) not in seen
            ):
                seen.add(id(value))
                note(_class_space(f"{label}.{name}", value, whole=whole))
            elif whole and isinstance(value, dict) and id(value) not in seen:
                seen.add(id(value))
                for table in _tables(f"{label}.{name}", value):
                    note(table)

    for path in _SHARED + tuple(n for n in list(sys.modules) if n.startswith("torch.nn.modules.")):
        owner = sys.modules.get(path) or _follow(path)
        if owner is not None:
            visit(path, owner, path.partition(".")[0], whole=False)
    for path, module in own_modules().items():
        visit(path, module, _PACKAGE, whole=True)
        for space in _used_elsewhere(module):
            note(space)
    return spaces, list(bodies.values())


def _is_stale(value: object) -> bool:
    """Whether a module is no longer the loaded one: its next import replaces it everywhere."""
    return isinstance(value, ModuleType) and sys.modules.get(value.__name__) is not value


def _follow(path: str) -> Any:
    """An object by its dotted name, where part of it is no module."""
    first, *steps = path.split(".")
    found: Any = sys.modules[first]
    for step in steps:
        found = getattr(found, step, None)
    return found


def _class_space(label: str, cls: type, *, whole: bool) -> Space:
    """A class's own attributes. One that is added over an inherited one replaces it."""
    live = vars(cls)
    kept = {
        name: value
        for name, value in live.items()
        if callable(value)
        or isinstance(value, property | staticmethod | classmethod | functools.cached_property)
        or (whole and (not name.startswith("_") or name.startswith("__pydantic_")))
    }
    return Space(label, live, kept, frozenset(live), cls)


def _tables(label: str, table: dict[Any, Any]) -> Iterator[Space]:
    """The entries of a constant table, and of tables in it."""
    yield Space(label, table, dict(table), frozenset(table), None)
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _tables(f"{label}[{key!r}]", value)


def _used_elsewhere(module: ModuleType) -> Iterator[Space]:
    """Functions of other modules that this module's code names: numpy's, scipy's, ..."""
    codes = [
        function.__code__
        for value in list(vars(module).values())
        for holder in (value, *(vars(value).values() if _is_class_of(value, module) else ()))
        for function in _functions_in(holder)
    ]
    names = {name for code in codes for one in _nested(code) for name in one.co_names}
    pending = [v for v in list(vars(module).values()) if isinstance(v, ModuleType)]
    done: set[int] = set()
    while pending:
        other = pending.pop()
        home = other.__name__.partition(".")[0]
        if id(other) in done or home in (_PACKAGE, "torch") or other.__name__ in _SHARED:
            continue
        done.add(id(other))
        live = vars(other)
        used = {name: live[name] for name in names & live.keys()}
        pending += [value for value in used.values() if isinstance(value, ModuleType)]
        kept = {name: value for name, value in used.items() if callable(value)}
        if kept:
            yield Space(other.__name__, live, kept, frozenset(live), other)


def _is_class_of(value: object, module: ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _functions_in(value: object, depth: int = _WRAPPERS) -> Iterator[FunctionType]:
    """The Python functions behind a function, method, property, partial or decorator."""
    inner_values: tuple[object, ...]
    if isinstance(value, FunctionType):
        yield value
        inner_values = tuple(_contents(cell) for cell in value.__closure__ or ())
        inner_values = tuple(one for one in inner_values if isinstance(one, FunctionType))
    elif isinstance(value, staticmethod | classmethod):
        inner_values = (value.__func__,)
    elif isinstance(value, property):
        inner_values = (value.fget, value.fset)
    elif isinstance(value, functools.partial | functools.cached_property):
        inner_values = (value.func,)
    elif isinstance(value, functools._lru_cache_wrapper):
        inner_values = (value.__wrapped__,)
    else:
        return
    if depth:
        for inner in inner_values:
            yield from _functions_in(inner, depth - 1)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def replaced(
    spaces: list[Space], bodies: list[Body], modules: Mapping[str, ModuleType]
) -> list[str]:
    """Names that lead elsewhere now, in the order of the snapshot."""
    found = [name for name, module in modules.items() if sys.modules.get(name) is not module]
    for space in spaces:
        live = space.live
        for name, value in space.kept.items():
            now = live.get(name, _MISSING)
            if now is not value and not _by_torch(space.path(name), now):
                found.append(space.path(name))
        if len(live) != len(space.names):
            found += sorted(
                space.path(name)
                for name in live.keys() - space.names
                if space.hides(name) and (is_fixed(name) or isinstance(live[name], FunctionType))
            )
    found += [
        f"the code of {body.label}"
        for body in bodies
        if body.function.__code__ is not body.code
        or body.function.__defaults__ is not body.defaults
        or not _same(_keywords(body.function), body.keywords)
    ]
    return found


def _keywords(function: Any) -> Mapping[str, object]:
    defaults: Mapping[str, object] | None = function.__kwdefaults__
    return defaults or {}


def _same(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    return len(now) == len(before) and all(now.get(k, _MISSING) is v for k, v in before.items())


def _by_torch(name: str, now: object) -> bool:
    """Whether torch replaced one of the functions that it is known to replace."""
    code = getattr(now, "__code__", None)
    return name in _TORCH_REPLACES and getattr(code, "co_filename", "").startswith(_TORCH_HOME)
