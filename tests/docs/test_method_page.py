"""docs/method.md says what the code does: its names exist, its constants have their values."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from pytest_fastlayer import measurement
from pytest_fastlayer.options import OPTIONS
from pytest_fastlayer.records import Verdict

ROOT = Path(__file__).parents[2]
METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")
#: `module.name`, as the page writes functions, classes and constants.
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]\w*)+)`", METHOD)))
CONSTANTS = dict(re.findall(r"^\| `([\w.]+)` \| ([\d.]+) \|$", METHOD, re.MULTILINE))


def resolve(name: str) -> object:
    """The object that a dotted name below the package means."""
    parts = name.split(".")
    module, rest = importlib.import_module("pytest_fastlayer"), parts
    while rest:
        try:
            module = importlib.import_module(f"{module.__name__}.{rest[0]}")
        except ModuleNotFoundError:
            break
        rest = rest[1:]
    found: object = module
    for attribute in rest:
        found = getattr(found, attribute)
    return found


def test_there_are_names_to_check():
    assert len(NAMES) > 40
    assert len(CONSTANTS) > 10
    with pytest.raises(AttributeError):
        resolve("gate.no_such_function")


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith((".md", ".json"))])
def test_name_exists(name):
    assert resolve(name) is not None


@pytest.mark.parametrize(("name", "value"), CONSTANTS.items())
def test_constant_has_its_value(name, value):
    assert resolve(name) == float(value)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_defaults_are_the_defaults(device):
    (row,) = re.findall(rf"^\| {device} \| (.*) \|$", METHOD, re.MULTILINE)
    shown = [float(cell.strip().rstrip("%")) for cell in row.split("|")]
    known = measurement.DEFAULTS[device]
    names = ("pairs", "settle_s", "block_ms", "budget_s")
    assert shown == [*(known[name] for name in names), 100 * known["min_effect"]]


def test_options_and_verdicts_exist():
    options = set(re.findall(r"--fastlayer-[a-z0-9-]+", METHOD))
    assert options <= {option.flag for option in OPTIONS}
    prose = re.sub(r"`[^`]*`", "", METHOD)
    shouted = set(re.findall(r"\b(?=\w{4})[A-Z]+(?:_[A-Z]+)*\b", prose)) - {"NVML", "CUDA"}
    assert shouted <= {verdict.value for verdict in Verdict}
    assert {verdict.value for verdict in Verdict} <= shouted


def test_probes_named_are_probes_there_are():
    rows = re.findall(r"^\| (`.*?) \|", METHOD[METHOD.index("| probe |") :], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in [
            *(ROOT / "pytest_fastlayer/probes").glob("*.py"),
            *(ROOT / "pytest_fastlayer/pairing").glob("*.py"),
            *(ROOT / "pytest_fastlayer").glob("*.py"),
        ]
    )
    assert len(named) >= 17
    for name in named:
        assert f'"{name}"' in source, name


def test_paths_named_exist():
    for path in re.findall(r"`((?:baselines|tests|docs)/[\w./-]+)`", METHOD):
        assert (ROOT / path).exists(), path
