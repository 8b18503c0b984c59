"""What a callable's code reads besides its arguments: constants, settings, helper functions.

``ITERS = 1`` at the top of a module decides a function's cost as much as the function's own text.
Here such values are found and marked, so that a later look can tell which of them has changed.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

#: Objects looked into, and entries of a container marked one by one.
MAX_OBJECTS, MAX_ENTRIES = 1000, 10_000

_PLAIN = (bool, int, complex, str, bytes, type(None))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_STDLIB = sysconfig.get_path("stdlib")
#: Methods by which code fills a container of its own.
_FILLING = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "setdefault", "sort", "update"}
)
#: Functions that build an object: what they assign is not state that calls change.
_BUILDERS = frozenset({"__init__", "__new__", "__post_init__", "__set_name__"})
_STORES = (ast.Store, ast.Del)


class _Same:
    """An object of which only the identity counts."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def values_read(target: object, known: set[int]) -> dict[str, object]:
    """Marks of what the code of ``target`` reads, by a phrase that names it.

    Looked at are globals and closure variables that the code names, defaults, attributes of the
    objects it belongs to, and the same of every function and class it names in turn, outside
    installed libraries. Two marks are equal if the values are: plain values and containers of
    them by value, functions by code, tensors by contents, anything else by identity. Left out
    are names that this code itself assigns or fills when it is called (counters, caches), and
    tensors whose ``id`` is in ``known`` (watched elsewhere).
    """
    walk = _Walk(known)
    walk.enter(target)
    return walk.marks()


class _Walk:
    """One traversal of code and the values that it names."""

    def __init__(self, known: set[int]) -> None:
        self.known = known
        self.seen: dict[int, object] = {}  #: also keeps what it has seen alive
        self.found: list[tuple[str, str, object]] = []  #: phrase, bare name, mark
        self.own: set[str] = set()  #: names that the code itself assigns or fills

    def marks(self) -> dict[str, object]:
        named: dict[str, object] = {}
        for phrase, name, mark in self.found:
            if name in self.own:
                continue
            key, count = phrase, 2
            while key in named:
                key, count = f"{phrase} (number {count})", count + 1
            named[key] = mark
        return named

    def note(self, phrase: str, name: str, value: object) -> None:
        if id(value) not in self.known:
            self.found.append((phrase, name, _mark(value)))
        self.enter(value)

    def enter(self, value: object) -> None:
        """Look into a function, a class, or an object of one, outside of libraries."""
        if isinstance(value, (*_PLAIN, float, ModuleType, BuiltinFunctionType)):
            return
        if id(value) in self.seen or len(self.seen) >= MAX_OBJECTS:
            return
        self.seen[id(value)] = value
        if isinstance(value, functools.partial):
            for i, one in enumerate(value.args):
                self.note(f"argument {i} of a partial", "", one)
            for name, one in value.keywords.items():
                self.note(f"argument {name} of a partial", "", one)
            self.enter(value.func)
        elif isinstance(value, MethodType):
            self.enter(value.__func__)
            self.enter(value.__self__)
        elif isinstance(value, FunctionType):
            if not _in_library(value.__code__.co_filename):
                self.function(value)
            else:  # a decorator of a library, torch.compile's for one
                self.enter(getattr(value, "__wrapped__", None))
        elif isinstance(value, staticmethod | classmethod):
            self.enter(value.__func__)
        elif isinstance(value, property):
            self.enter(value.fget)
        elif isinstance(value, type):
            if _is_ours(value):
                self.type_(value)
        elif isinstance(getattr(value, "__wrapped__", None), FunctionType):
            self.enter(value.__wrapped__)  # type: ignore[attr-defined]
        elif _is_module(value) or _is_ours(type(value)):
            self.instance(value)

    def function(self, function: FunctionType) -> None:
        label = function.__qualname__
        codes = list(_nested(function.__code__))
        if function.__name__ not in _BUILDERS:
            self.own |= {name for code in codes for name in _assigned(code)}
            self.own |= _filled(function.__code__)
        names = sorted({name for code in codes for name in code.co_names})
        space = function.__globals__
        for name in names:
            if name in space:
                self.note(f"the global {name} of {label}", name, space[name])
        for module in [space[n] for n in names if isinstance(space.get(n), ModuleType)]:
            if not _in_library(getattr(module, "__file__", None) or ""):
                for name in names:
                    if name in vars(module):
                        self.note(f"{module.__name__}.{name}", name, vars(module)[name])
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self.note(f"the variable {name} of {label}", name, cell.cell_contents)
            except ValueError:  # a cell not filled yet
                continue
        defaults = function.__defaults__ or ()
        first = function.__code__.co_argcount - len(defaults)
        parameters = function.__code__.co_varnames[max(0, first) :]
        given: Mapping[str, object] = function.__kwdefaults__ or {}
        for name, value in (*zip(parameters, defaults, strict=False), *given.items()):
            own = name if isinstance(value, list | dict | set) else ""
            self.note(f"the default of {name} of {label}", own, value)

    def type_(self, cls: type) -> None:
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType | staticmethod | classmethod | property):
                self.note(f"the method {name} of {cls.__qualname__}", "", value)
            elif not name.startswith("__") and _is_plain(value):
                self.note(f"the attribute {name} of {cls.__qualname__}", name, value)
        for base in cls.__bases__:
            self.enter(base)

    def instance(self, value: object) -> None:
        from torch import Tensor

        cls = type(value)
        self.enter(cls)
        internal = _module_internals() if _is_module(value) else frozenset()
        for name, one in list(getattr(value, "__dict__", {}).items()):
            if name in internal:
                continue
            phrase = f"the attribute {name} of {cls.__qualname__}"
            if _is_plain(one) or isinstance(one, FunctionType | BuiltinFunctionType | Tensor):
                self.note(phrase, name, one)
            elif not name.startswith("_"):
                self.enter(one)
        if _is_module(value):
            module: Any = value
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.note(f"the tensor {name} of {cls.__qualname__}", name, tensor)
            for child in module.children():
                self.enter(child)


def _mark(value: object) -> object:
    import torch

    if isinstance(value, torch.Tensor):
        from pytest_fastlayer.fingerprint import fingerprint

        return ("tensor", fingerprint(value), value.requires_grad)
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        return ("function", value.__code__)
    if isinstance(value, MethodType):
        return ("method", value.__func__.__code__, _Same(value.__self__))
    if _is_plain(value):
        return _plain_mark(value)
    return ("object", _Same(value))


def _plain_mark(value: object) -> object:
    """A copy that later edits do not reach, telling 1 from True and -0.0 from 0.0."""
    kind = type(value).__name__
    if isinstance(value, dict):
        items = [(_plain_mark(k), _plain_mark(v)) for k, v in value.items()]
        return (kind, tuple(items))
    if isinstance(value, set | frozenset):
        return (kind, tuple(sorted(repr(one) for one in value)))
    if isinstance(value, tuple | list):
        return (kind, tuple(_plain_mark(one) for one in value))
    return (kind, repr(value))


def _is_plain(value: object) -> bool:
    """Whether a value is a plain one, or a container of nothing else and of bounded size."""
    pending, count, inside = [value], 0, set()
    while pending:
        one = pending.pop()
        count += 1
        if type(one) in _CONTAINERS:
            if id(one) in inside or count + len(one) > MAX_ENTRIES:  # type: ignore[arg-type]
                return False
            inside.add(id(one))
            if isinstance(one, dict):
                pending += [*one.keys(), *one.values()]
            else:
                pending += list(one)  # type: ignore[call-overload]
        elif type(one) not in (*_PLAIN, float):
            return False
    return True


def _assigned(code: CodeType) -> Iterator[str]:
    """Globals, attributes and outer variables that bytecode assigns."""
    for step in dis.get_instructions(code):
        outer = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        if outer or step.opname in {"STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR"}:
            yield step.argval


def _filled(code: CodeType) -> set[str]:
    """Names of containers that a function's source text fills: ``CACHE[key] = ...`` and such."""
    found: set[str] = set()
    for function in _definitions("".join(linecache.getlines(code.co_filename))):
        if _first_line(function) != code.co_firstlineno:
            continue
        for node in ast.walk(function):
            target: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, _STORES):
                target = node.value
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _FILLING
            ):
                target = node.func.value
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name):
                found.add(target.id)
            elif isinstance(target, ast.Attribute):
                found.add(target.attr)
    return found


@functools.lru_cache(maxsize=32)
def _definitions(text: str) -> tuple[ast.AST, ...]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return tuple(node for node in ast.walk(tree) if isinstance(node, kinds))


def _first_line(node: Any) -> int:
    lines = [one.lineno for one in (node, *getattr(node, "decorator_list", ()))]
    return int(min(lines))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _in_library(file: str) -> bool:
    parts = Path(file).parts
    installed = not {"site-packages", "dist-packages"}.isdisjoint(parts)
    return installed or file.startswith((_STDLIB, "<frozen"))


def _is_ours(cls: type) -> bool:
    """Whether a class is defined outside of installed libraries, as far as its methods tell."""
    bodies = [one for one in vars(cls).values() if isinstance(one, FunctionType)]
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None) if module else None
    if file is None and bodies:
        file = bodies[0].__code__.co_filename
    return file is not None and not _in_library(file)


def _is_module(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


@functools.cache
def _module_internals() -> frozenset[str]:
    """Attributes that every torch module has, which torch keeps for itself."""
    import torch

    return frozenset(vars(torch.nn.Module()))
