"""Command line and ini file -> one frozen ``Settings``. Nothing heavy is imported here.

Every setting is one row of ``OPTIONS``; a row with ``ini=True`` also has an ini default of the
same name with underscores (``--fastlayer-pairs`` -> ``fastlayer_pairs``). The command line wins
over a marker, a marker over the ini file, the ini file over the device's own default. Tolerances
are the exception: the command line may tighten them, never loosen them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest


def _positive(kind: Callable[[str], Any], minimum: float, open_interval: bool) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        finite = value - value == 0  # neither NaN nor an infinity
        if not (finite and (value > minimum or (value == minimum and not open_interval))):
            bound = "above" if open_interval else "at least"
            raise argparse.ArgumentTypeError(
                f"expected a finite number {bound} {minimum:g}, got {text!r}"
            )
        return value

    parse.__name__ = kind.__name__  # argparse names the type in its message
    return parse


_seconds = _positive(float, 0.0, open_interval=False)
_positive_float = _positive(float, 0.0, open_interval=True)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a fraction between 0 and 1, got {text!r}")
    return value


_count = _positive(int, 1, open_interval=False)
_pairs = _positive(int, 2, open_interval=False)  # one AB/BA quad


@dataclass(frozen=True)
class Option:
    """One row: how an option is spelled, read and explained."""

    name: str  #: without the ``--fastlayer-`` prefix
    help: str
    parse: Callable[[str], Any] | None = None  #: None: a flag
    ini: bool = False
    append: bool = False
    choices: tuple[str, ...] | None = None
    metavar: str | None = None

    @property
    def flag(self) -> str:
        return f"--fastlayer-{self.name}"

    @property
    def dest(self) -> str:
        return "fastlayer_" + self.name.replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("bench", "time the tests that use 'paired' or 'paired_timing', and run only those"),
    Option("json", "write the run's record to this file", str, metavar="FILE"),
    Option("markdown", "write the run's table as Markdown to this file", str, metavar="FILE"),
    Option("html", "write a self-contained HTML report to this file", str, metavar="FILE"),
    Option(
        "baseline",
        "baseline file, or folder of <device>.json files (default: baselines)",
        str,
        ini=True,
        metavar="PATH",
    ),
    Option("update-baseline", "store this run as the baseline, if every case is green"),
    Option("accept", "accept this case's worse figure by name", str, append=True, metavar="CASE"),
    Option("require-baseline", "a case with no comparable baseline fails", ini=True),
    Option("require-quiet", "another process on the device fails the run", ini=True),
    Option(
        "reference",
        "a class taking the config, used as the immutable reference",
        str,
        metavar="FILE.py:CLASS",
    ),
    Option(
        "device",
        "device that the pairs run on",
        str,
        ini=True,
        choices=("auto", "cpu", "cuda"),
    ),
    Option("admit", "measure every variant of each pair and keep the fastest that passes"),
    Option(
        "variant",
        "with --fastlayer-admit, measure only variants that match this glob",
        str,
        append=True,
        metavar="GLOB",
    ),
    Option(
        "base",
        "also time the candidate of this git revision (or of the checkout at this path), in the "
        "same schedule, and fail what is slower than it",
        str,
        metavar="REV",
    ),
    Option(
        "base-timeout",
        "seconds that a process of --fastlayer-base may take for one answer (default: 300)",
        _positive_float,
        ini=True,
        metavar="S",
    ),
    Option("rival", "also time this named rival of each pair", str, append=True, metavar="NAME"),
    Option("trace", "write a profiler trace for each case and arm", str, metavar="DIR"),
    Option("aa", "a full-length A/A control for every case"),
    Option("pairs", "timed pairs per case", _pairs, ini=True, metavar="N"),
    Option(
        "settle",
        "seconds that both arms run, alternating, before timing",
        _seconds,
        ini=True,
        metavar="S",
    ),
    Option("block-ms", "length of a timed block", _positive_float, ini=True, metavar="MS"),
    Option(
        "budget",
        "seconds of timing that a case should fit in; fewer pairs are taken if it does not",
        _positive_float,
        ini=True,
        metavar="S",
    ),
    Option(
        "max-case",
        "a case whose shortest valid run exceeds these seconds is UNSUPPORTED",
        _positive_float,
        ini=True,
        metavar="S",
    ),
    Option("l2", "state of the L2 cache in timed blocks", str, ini=True, choices=("warm", "cold")),
    Option("min-effect", "smallest effect that counts (0.01 = 1%%)", _seconds, ini=True),
    Option("min-speedup", "speedup that a candidate must clear", _positive_float, ini=True),
    Option("alpha", "error rate of the whole run", _fraction, ini=True),
    Option("memory-tolerance", "peak memory allowed above the baseline", _seconds, ini=True),
    Option("seeds", "accuracy trials per case", _count, ini=True, metavar="N"),
    Option(
        "stress",
        "also check every pair that has a stress grid, on this many seeds in each of its cells",
        _count,
        ini=True,
        metavar="SEEDS",
    ),
    Option("atol", "tighten the absolute tolerance", _seconds, ini=True),
    Option("rtol", "tighten the relative tolerance", _seconds, ini=True),
)

_INI_ONLY = {
    "fastlayer_pins": "files that the gate refuses to run without: '<path> <sha256>' a line",
}


@dataclass(frozen=True)
class Settings:
    """What the run was asked to do. ``None`` means: by marker, or by the device's default."""

    bench: bool = False
    json: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    baseline: Path = Path("baselines")
    baseline_given: bool = False
    update_baseline: bool = False
    accept: frozenset[str] = frozenset()
    require_baseline: bool = False
    require_quiet: bool = False
    reference: str | None = None
    device: str = "auto"
    admit: bool = False
    variants: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    base: str | None = None
    base_timeout_s: float = 300.0
    trace: Path | None = None
    aa: bool = False
    pairs: int | None = None
    settle_s: float | None = None
    block_ms: float | None = None
    budget_s: float | None = None
    max_case_s: float | None = None
    l2: str | None = None
    min_effect: float | None = None
    min_speedup: float = 1.0
    alpha: float = 0.05
    memory_tolerance: float = 0.02
    seeds: int | None = None
    stress: int | None = None
    atol: float | None = None
    rtol: float | None = None
    ini: dict[str, Any] = field(default_factory=dict)
    pins: tuple[tuple[Path, str], ...] = ()

    def choose(self, name: str, marked: Any, default: Any) -> Any:
        """Command line, then marker, then ini, then ``default``."""
        for value in (getattr(self, name), marked, self.ini.get(name)):
            if value is not None:
                return value
        return default


def add_options(parser: pytest.Parser) -> None:
    """Register every row of ``OPTIONS`` with pytest."""
    group = parser.getgroup("fastlayer", "paired accuracy and speed gate")
    for option in OPTIONS:
        keywords: dict[str, Any] = {"dest": option.dest, "help": option.help}
        if option.parse is None:
            keywords |= {"action": "store_true", "default": None}
        else:
            keywords |= {"action": "append" if option.append else "store", "default": None}
            keywords |= {"type": option.parse}
            if option.choices:
                keywords["choices"] = option.choices
            elif option.metavar:
                keywords["metavar"] = option.metavar
        group.addoption(option.flag, **keywords)
        if option.ini:
            kind: Literal["bool", "string"] = "bool" if option.parse is None else "string"
            parser.addini(option.dest, f"default of {option.flag}", type=kind, default=None)
    for name, text in _INI_ONLY.items():
        parser.addini(name, text, type="linelist", default=[])


def _ini_value(config: pytest.Config, option: Option) -> Any:
    raw = config.getini(option.dest)
    if raw is None or raw == "":
        return None
    if option.parse is None:
        return raw
    if option.choices and raw not in option.choices:
        raise pytest.UsageError(
            f"ini option {option.dest}: expected one of {', '.join(option.choices)}, got {raw!r}"
        )
    try:
        return option.parse(raw)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise pytest.UsageError(f"ini option {option.dest}: {error}") from None


def _pins(config: pytest.Config) -> tuple[tuple[Path, str], ...]:
    pins = []
    for line in config.getini("fastlayer_pins"):
        path, _, digest = line.rpartition(" ")
        if not path.strip() or len(digest) != 64:
            raise pytest.UsageError(
                f"ini option fastlayer_pins: expected '<path> <64 hex digits>', got {line!r}"
            )
        pins.append((config.rootpath / path.strip(), digest.lower()))
    return tuple(pins)


def read_settings(config: pytest.Config) -> Settings:
    """The run's settings; a bad ini value is a usage error that names it."""
    given = {option.name: getattr(config.option, option.dest) for option in OPTIONS}
    ini = {option.name: _ini_value(config, option) for option in OPTIONS if option.ini}

    def path(name: str) -> Path | None:
        return config.invocation_params.dir / given[name] if given[name] else None

    def either(name: str, default: Any) -> Any:
        return next((v for v in (given[name], ini.get(name)) if v is not None), default)

    baseline = path("baseline") or config.rootpath / (ini["baseline"] or "baselines")
    return Settings(
        bench=any(given[name] for name in ("bench", "admit", "update-baseline", "base")),
        json=path("json"),
        markdown=path("markdown"),
        html=path("html"),
        baseline=baseline,
        baseline_given=given["baseline"] is not None,
        update_baseline=bool(given["update-baseline"]),
        accept=frozenset(given["accept"] or ()),
        require_baseline=bool(either("require-baseline", False)),
        require_quiet=bool(either("require-quiet", False)),
        reference=given["reference"],
        device=either("device", "auto"),
        admit=bool(given["admit"]),
        variants=tuple(given["variant"] or ()),
        rivals=tuple(given["rival"] or ()),
        base=given["base"],
        base_timeout_s=either("base-timeout", 300.0),
        trace=path("trace"),
        aa=bool(given["aa"]),
        pairs=given["pairs"],
        settle_s=given["settle"],
        block_ms=given["block-ms"],
        budget_s=given["budget"],
        max_case_s=given["max-case"],
        l2=given["l2"],
        min_effect=given["min-effect"],
        min_speedup=either("min-speedup", 1.0),
        alpha=either("alpha", 0.05),
        memory_tolerance=either("memory-tolerance", 0.02),
        seeds=given["seeds"],
        stress=either("stress", None),
        atol=given["atol"],
        rtol=given["rtol"],
        ini={
            "pairs": ini["pairs"],
            "settle_s": ini["settle"],
            "block_ms": ini["block-ms"],
            "budget_s": ini["budget"],
            "max_case_s": ini["max-case"],
            "l2": ini["l2"],
            "min_effect": ini["min-effect"],
            "seeds": ini["seeds"],
            "atol": ini["atol"],
            "rtol": ini["rtol"],
        },
        pins=_pins(config),
    )
