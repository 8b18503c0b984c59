"""Numbers and foreign strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import obeyed

from pytest_fastlayer.report import text
from pytest_fastlayer.runner_commands import defuse


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://evil\x1b\\link", "link"),
        ("a\nb\r\nc\td", "a b c d"),
        ("bell\x07 nul\x00 del\x7f c1\x9b", "bell nul del c1"),
        ("\u202egnp.exe", "gnp.exe"),
        ("zero\u200bwidth", "zerowidth"),
        ("lone\ud800surrogate", "lonesurrogate"),
        ("::error::pwned", "'::error::pwned"),
        ("\n ::add-mask::x", "'::add-mask::x"),
        ("##[error]x", "## [error]x"),
        ("case ###[add-mask]x, ##[error]y", "case ### [add-mask]x, ## [error]y"),
        ("#\u200b#\x07[error]x", "## [error]x"),
        ("\ufe0f\u034f::error::x", "'::error::x"),
        ("a b ::error::x", "a b ::error::x"),
        ("tests/t.py::test_x", "tests/t.py::test_x"),
        ("größe/ä ✓", "größe/ä ✓"),
        ("", ""),
        (3, "3"),
    ],
)
def test_plain(given, shown):
    assert text.plain(given) == shown


def test_plain_is_cut():
    assert text.plain("x" * 300, 10) == "xxxxxxx..."


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=60) | st.text("#[:] \n\x1b\u200b\ufe0f\u3164a", max_size=12))
def test_plain_is_one_safe_line(given):
    shown = text.plain(given)
    assert "\n" not in shown
    assert "\x1b" not in shown
    assert shown.isprintable()
    shown.encode()
    assert not obeyed(shown)


@pytest.mark.parametrize(
    ("given", "defused"),
    [
        ("fine: a::b [x] ##\nnext ::", "fine: a::b [x] ##\nnext ::"),
        ("one\n  ::error::x\r::stop-commands::y", "one\n'  ::error::x\r'::stop-commands::y"),
        ("\t::a::\n\n::b::", "'\t::a::\n\n'::b::"),
        ("at ##[error]x ##[b]", "at ## [error]x ## [b]"),
    ],
)
def test_defused_text_keeps_its_lines(given, defused):
    assert defuse(given) == defused
    assert not obeyed(defused)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.1609, "0.1609"), (504.1028, "504.1"), (13607.8, "13608"), (1.5, "1.500"), (0, "0")],
)
def test_significant(value, shown):
    assert text.significant(value) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (9999, "9999"), (81920, "82k"), (8_388_608, "8.4M"), (16_384_000_000, "16G")],
)
def test_count(number, shown):
    assert text.count(number) == shown


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [([2.0], "s"), ([0.0007, 0.2, 0.0006], "ms"), ([5e-6], "us"), ([3e-9], "ns"), ([], "ms")],
)
def test_unit(seconds, unit):
    assert text.unit_for(seconds)[0] == unit


@pytest.mark.parametrize(
    "show", [text.speedup, text.ratio, text.percent, text.mib, text.significant, text.decimal]
)
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e300, 12345678.9])
def test_no_figure_floods_a_table(show, value):
    assert len(show(value)) <= 14


def test_revision():
    assert text.revision("7d417ad614ac62370aa-dirty") == "7d417ad614-dirty"
    assert text.revision("abc1234") == "abc1234"


def test_speed_and_percent():
    assert text.speedup(15.8, (15.61, 15.98)) == "15.80x [15.61, 15.98]"
    assert text.ratio(0.982) == "0.982x"
    assert text.percent(0.009) == "0.9%"
    assert text.percent(0.001, signed=True) == "+0.1%"
    assert text.mib(None) == "-"
    assert text.listing("abcdefghij") == "a, b, c, d, e, f, g, h and 2 more"
