"""Where a served pair's modules came from: a base that runs the head's code measures nothing."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pytest_fastlayer.base.trees import is_environment
from pytest_fastlayer.immutable import held_objects

if TYPE_CHECKING:
    from pytest_fastlayer.base.arms import ServedPair

#: The gate's own package is meant to be the head's, wherever that is.
_OWN = Path(__file__).resolve().parents[1]


def _file(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) else None


def foreign(pair: ServedPair, tree: Path, other: Path) -> list[str]:
    """Modules in use that are not the tree's own though they should be, each with its file.

    Two ways lead there: a module of the ``other`` tree (the head), as an import hook of an
    editable install gives it; and the project itself, installed for good, where the tree's own
    copy of it lies where nothing on the path leads to.
    """
    found = dict(_leaked(tree, other))
    project = _project_name(tree)
    for name in _packages(pair) if project else ():
        file = _file(sys.modules[name])
        if file is None or file.is_relative_to(tree) or name in found:
            continue
        if project in [_normal(one) for one in metadata.packages_distributions().get(name, ())]:
            found[name] = file
    return [f"{name} ({file})" for name, file in sorted(found.items())]


def _leaked(tree: Path, other: Path) -> Iterator[tuple[str, Path]]:
    inner = tree.is_relative_to(other)
    for name, module in list(sys.modules.items()):
        file = _file(module)
        if file is None or file.is_relative_to(_OWN) or is_environment(file):
            continue
        mine = file.is_relative_to(tree) and (inner or not file.is_relative_to(other))
        if file.is_relative_to(other) and not mine:
            yield name, file


def _packages(pair: ServedPair) -> set[str]:
    """Top-level packages of what the candidate and its inputs are made of."""
    names = set()
    for one in (*held_objects(pair.candidate), *held_objects(pair.inputs)):
        named = one if hasattr(one, "__module__") else type(one)
        module = one.__name__ if isinstance(one, ModuleType) else named.__module__
        names.add(str(module).partition(".")[0])
    return names & sys.modules.keys() - {_OWN.name}


def _project_name(tree: Path) -> str | None:
    """The distribution that the tree builds, as its ``pyproject.toml`` names it."""
    try:
        with (tree / "pyproject.toml").open("rb") as file:
            name = tomllib.load(file).get("project", {}).get("name")
    except (OSError, tomllib.TOMLDecodeError):
        return None
    return _normal(name) if isinstance(name, str) else None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
