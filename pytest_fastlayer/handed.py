"""What a test hands over, looked at before anything is measured.

A record is written when every test has run: what it cannot hold must be refused where it was
given, or one test's slip would show only then. The rules are tables: from the name of an argument
to what it must be and how that is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError

from pytest_fastlayer.comparison import Tolerance
from pytest_fastlayer.records import Facts, Model, ReferenceKind, Work

_FACTS: TypeAdapter[dict[str, Any]] = TypeAdapter(Facts)
#: How much of a wrong value is quoted.
SHOWN = 80
#: Bytes of JSON that a candidate may say of itself: a record of many cases must stay readable.
MAX_DESCRIPTION = 1 << 20


class HandedError(ValueError):
    """A test gave something else than what is documented."""


class Rule(NamedTuple):
    """A property, and how it is said."""

    holds: Callable[[Any], bool]
    expected: str


class Description(Model):
    """What ``describe`` may say of a candidate that ran."""

    route: str | None = None
    launch: Facts | None = None
    objections: dict[str, list[str]] | None = None
    notes: tuple[str, ...] = ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_factories(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and callable(factory) for name, factory in value.items()
    )


def _optional(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.expected}, or None")


def _validates(adapter: TypeAdapter[Any]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        try:
            adapter.validate_python(value)
        except ValidationError:
            return False
        return True

    return holds


def one_of(*values: str) -> Rule:
    return Rule(lambda value: value in values, " or ".join(map(repr, values)))


TEXT = Rule(lambda value: isinstance(value, str), "a str")
NAME = Rule(lambda value: isinstance(value, str) and value != "", "a str that is not empty")
CALLABLE = Rule(callable, "a callable")
FACTS = Rule(
    _validates(_FACTS), "a mapping from str to what JSON can hold, numbers among it finite"
)
FACTORIES = Rule(_are_factories, "a mapping from names to callables that build one each")
NOT_NEGATIVE = Rule(lambda v: _is_number(v) and v >= 0, "a finite number of at least 0")
POSITIVE = Rule(lambda v: _is_number(v) and v > 0, "a finite number above 0")

#: The arguments of ``paired``; ``stress`` is judged where it is made a grid.
PAIR = {
    "name": NAME,
    "reference": CALLABLE,
    "candidate": CALLABLE,
    "inputs": CALLABLE,
    "label": TEXT,
    "workload": _optional(FACTS),
    "work": _optional(
        Rule(_validates(TypeAdapter(Work)), 'a Work, or {"flops": ..., "bytes": ...} above 0')
    ),
    "reference_kind": one_of(*get_args(ReferenceKind)),
    "tolerance": _optional(Rule(lambda v: isinstance(v, Tolerance), "a Tolerance")),
    "float64": _optional(CALLABLE),
    "describe": _optional(CALLABLE),
    "rivals": _optional(FACTORIES),
    "variants": _optional(FACTORIES),
}
REFUSAL = {"name": NAME, "reason": NAME, "label": TEXT, "workload": _optional(FACTS)}
CELL = {
    "label": NAME,
    "inputs": CALLABLE,
    "workload": FACTS,
    "gated": Rule(lambda value: isinstance(value, bool), "True or False"),
}
STRESS = {
    "cells": Rule(lambda v: isinstance(v, Sequence) and not isinstance(v, str), "a list of Cell"),
    "arms": _optional(CALLABLE),
    "describe": _optional(CALLABLE),
    "note": TEXT,
}
#: Keywords of the markers; any other is refused.
MARKERS = {
    "tolerance": {"atol": NOT_NEGATIVE, "rtol": NOT_NEGATIVE, "mode": one_of("either", "sum")},
    "paired_timing": {
        "pairs": Rule(lambda v: _is_count(v) and v >= 2, "an int of at least 2"),
        "settle_s": NOT_NEGATIVE,
        "block_ms": POSITIVE,
        "min_effect": NOT_NEGATIVE,
        "l2": one_of("warm", "cold"),
        "budget_s": POSITIVE,
        "max_case_s": POSITIVE,
    },
}


def shown(value: object) -> str:
    """A wrong value as messages quote it, with its type."""
    text = repr(value)
    return f"{text if len(text) <= SHOWN else text[: SHOWN - 3] + '...'} ({type(value).__name__})"


def check(where: str, rules: Mapping[str, Rule], given: Mapping[str, Any]) -> None:
    """Hold what was given against its rules.

    Raises:
        HandedError: the first that breaks its rule: what was given, what was expected.
    """
    for name, value in given.items():
        if not rules[name].holds(value):
            raise HandedError(
                f"{where}: {name}: given {shown(value)}; expected {rules[name].expected}"
            )


def described(given: object, where: str) -> Description:
    """What a pair's ``describe`` returned.

    Raises:
        HandedError: it is no mapping, or one of its entries is not what is documented.
    """
    expected = (
        "a mapping that may hold 'route' (a str), 'launch' (a mapping of what JSON can hold), "
        "'objections' ({route: [reason, ...]}) and 'notes' (a list of str)"
    )
    if not isinstance(given, Mapping):
        raise HandedError(f"{where}: describe gave {shown(given)}; expected {expected}")
    try:
        found = Description.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise HandedError(
            f"{where}: describe gave {shown(first['input'])} for {place}: {first['msg']}; "
            f"expected {expected}"
        ) from None
    size = len(json.dumps(found.model_dump(mode="json")))
    if size > MAX_DESCRIPTION:
        raise HandedError(
            f"{where}: describe gave {size / 2**20:.1f} MiB of text; expected at most "
            f"{MAX_DESCRIPTION / 2**20:.0f} MiB: give the figures, not the data"
        )
    return found
