"""Numbers and foreign strings as people read them. Everything here is pure and plain ASCII."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from pytest_fastlayer.runner_commands import defuse

#: Terminal escape sequences: CSI, OSC (up to BEL or ST), and the two-character ones.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
#: Unicode classes that show nothing, reorder text, or cannot be encoded: controls, formats
#: (bidirectional overrides among them), surrogates, private use, unassigned.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})
#: Marks and letters that show nothing either (Unicode's Default_Ignorable_Code_Point): a search
#: that follows a culture's rules, as a CI runner's does, looks straight through them.
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_MAGNITUDES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plain(text: object, limit: int = 200) -> str:
    """``text`` as one visible line of at most ``limit`` characters, safe in any artefact.

    Escape sequences and control characters are removed, line breaks become spaces, and a CI
    runner's commands are defused.
    """
    line = re.sub(r"\s", " ", _IGNORABLE.sub("", _ESCAPE.sub("", str(text))))
    line = "".join(c for c in line if unicodedata.category(c) not in _INVISIBLE)
    line = defuse(re.sub(" +", " ", line).strip())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def unit_for(seconds: Iterable[float]) -> tuple[str, float]:
    """Unit (name, seconds) for a whole column: the largest in which the median is at least 0.1."""
    ordered = sorted(seconds)
    middle = ordered[len(ordered) // 2] if ordered else 1e-3
    return next((unit for unit in _UNITS if middle >= 0.1 * unit[1]), _UNITS[-1])


def significant(value: float, digits: int = 4) -> str:
    """``value`` to so many significant digits, as people write it: 0.1609, 504.1, 13608."""
    if value == 0:
        return "0"
    if not 1e-6 < abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    exponent = int(f"{abs(value):e}".partition("e")[2])
    return f"{value:.{min(max(digits - 1 - exponent, 0), 12)}f}"


def decimal(value: float, digits: int = 2) -> str:
    """So many decimals; an exponent where a wrong result makes the figure astronomical."""
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.1e}"


def speedup(
    value: float, ci: tuple[float, float] | None = None, *, diagnostic: bool = False
) -> str:
    """``15.80x [15.61, 15.98]``; over an oracle, which claims nothing, ``(15.80x diagnostic)``."""
    interval = "" if ci is None else f" [{decimal(ci[0])}, {decimal(ci[1])}]"
    shown = f"{decimal(value)}x{interval}"
    return f"({shown} diagnostic)" if diagnostic else shown


def ratio(value: float, ci: tuple[float, float] | None = None) -> str:
    """A ratio near one, to a tenth of a percent: ``0.982x [0.979, 0.985]``."""
    interval = "" if ci is None else f" [{decimal(ci[0], 3)}, {decimal(ci[1], 3)}]"
    return f"{decimal(value, 3)}x{interval}"


def percent(fraction: float, *, signed: bool = False) -> str:
    """``0.9%``, or with its sign ``+0.1%``."""
    shown = decimal(fraction * 100, 1)
    return f"+{shown}%" if signed and not shown.startswith("-") else f"{shown}%"


def count(number: int) -> str:
    """``8.4M``; exact below ten thousand."""
    if number < 10_000:
        return str(number)
    size, letter = next(m for m in _MAGNITUDES if number >= m[0])
    return f"{significant(number / size, 2)}{letter}"


def mib(value: float | None) -> str:
    """Mebibytes to a tenth, ``-`` where it could not be read."""
    return "-" if value is None else decimal(value, 1) if value < 1000 else significant(value)


def revision(commit: str) -> str:
    """A git revision as people quote it, with its ``-dirty`` mark."""
    name, dirty, _ = plain(commit).partition("-dirty")
    return name[:10] + dirty


def listing(names: Iterable[object], limit: int = 8) -> str:
    """``a, b, c and 4 more``."""
    shown = [plain(name, 60) for name in names]
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more
