"""What a candidate could change around the gate: settings, torch's functions, the gate's own.

Python lets any code replace any function. So everything that the reference, the clock and the
verdict run through is noted by identity before the candidate exists, and compared afterwards.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pytest_fastlayer import records
from pytest_fastlayer.probes import lazy, namespaces, state


class Watch:
    """Notes settings and functions now; says later what has changed since.

    Take it before the candidate exists, and take the bound ``changes`` (or ``probe``) at the same
    time: what they use is held in closures and checked for replacement itself, so a candidate
    that replaces methods of this class is named like any other. Covered are process-wide
    settings, the functions of Python and torch that arms share, and every name in the loaded
    modules of this plugin with the functions of other modules that those call. Modules loaded
    later, and attributes that lazy imports add, are no change. Settings that a test wants belong
    before its watch: in its conftest, or in a fixture that is set up earlier.

    Attributes:
        changes: A phrase for each change, empty if there is none.
        probe: The same as a record, by default under the name ``global_state``.
        settings: Names (and values) of changed settings.
        functions: Names that lead to another function, class or constant of the gate now.
    """

    __slots__ = ("changes", "functions", "probe", "settings")

    changes: Callable[[], list[str]]
    probe: Callable[..., records.Probe]
    settings: Callable[[], list[str]]
    functions: Callable[[], list[str]]

    def __init__(self) -> None:
        for name, value in _sealed().items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Watch cannot be edited: {name}")


def _sealed() -> dict[str, Callable[..., Any]]:
    """The four questions of a Watch, as closures over the present state."""
    intact = _guard(sys.modules[__name__], namespaces, state, lazy, builtins)
    spaces, bodies = namespaces.snapshot()
    modules = namespaces.own_modules()
    decided, as_decided = lazy.is_decided(), lazy.as_decided
    before = state.global_state()
    compare, read, judge = namespaces.replaced, state.global_state, state.changed
    make_record = records.Probe

    def functions() -> list[str]:
        edited = intact()
        # What answers the question has itself been replaced: nothing else can be believed.
        return edited if edited else compare(spaces, bodies, modules)

    def settings() -> list[str]:
        return [] if intact() else judge(before if decided else as_decided(before), read())

    def changes() -> list[str]:
        found = []
        for one in functions():
            found.append(f"{one} replaced")
        for one in settings():
            found.append(f"{one} changed")
        return found

    def probe(name: str = "global_state") -> records.Probe:
        found = changes()
        more = f", and {len(found) - 5} more" if len(found) > 5 else ""
        text = (
            f"changed while the pair was judged: {', '.join(found[:5])}{more}; the reference and "
            "the verdict depend on them (what the test itself wants set belongs in a fixture or "
            "conftest, before the pair)"
        )
        return make_record(name=name, passed=not found, message=text if found else "")

    return {"changes": changes, "probe": probe, "settings": settings, "functions": functions}


def _guard(*modules: ModuleType) -> Callable[[], list[str]]:
    """A check of a few modules that calls nothing which could have been replaced."""
    kept: list[tuple[str, dict[str, object], dict[str, object], frozenset[str]]] = []
    bodies: list[tuple[str, FunctionType, CodeType]] = []
    known = frozenset(vars(builtins))
    for module in modules:
        names = {k: v for k, v in vars(module).items() if namespaces.is_fixed(k)}
        free = known - vars(module).keys()
        kept.append((module.__name__, vars(module), names, free))
        for name, value in names.items():
            if isinstance(value, FunctionType):
                bodies.append((f"{module.__name__}.{name}", value, value.__code__))

    def intact() -> list[str]:
        found: list[str] = []
        for label, live, names, free in kept:
            for name, value in names.items():
                if name not in live or live[name] is not value:
                    found.append(f"{label}.{name}")
            for name in live:
                if name in free:  # hides a builtin
                    found.append(f"{label}.{name}")
        for name, function, code in bodies:
            if function.__code__ is not code:
                found.append(f"the code of {name}")
        return found

    return intact
