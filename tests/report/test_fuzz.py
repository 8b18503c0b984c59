"""From any file to any artefact: refused with file and place, or shown without becoming markup.

One property over readers and writers together. A full record is damaged in a few places, as a
hostile or broken file would be; whatever still reads must come out of every format as text. A
plain run takes some examples; ``FASTLAYER_FUZZ=100000`` takes so many, from fresh seeds.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from makers import accuracy, base, obeyed, run, timing, unsupported
from test_html import ATTACKS, Page, full_case
from test_terminal import change

from pytest_fastlayer.baselines import BaselineError, parse
from pytest_fastlayer.records import (
    Clocks,
    ForwardsPerBlock,
    RootMeanSquare,
    RunRecord,
    Settings,
    Stress,
    StressCell,
    Verdict,
    Work,
)
from pytest_fastlayer.report import explain, github, html, junit, markdown, plots, terminal
from pytest_fastlayer.report import text as texts

LONG = int(os.environ.get("FASTLAYER_FUZZ", "0"))
fuzz = settings(
    max_examples=LONG or 50,
    derandomize=not LONG,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def full_record() -> RunRecord:
    """A record in which every optional part is there."""
    everything = full_case(
        work=Work(flops=1e9, bytes=1e6),
        notes=("the guard measured 0.3",),
        stress=Stress.of(
            [
                StressCell(label="wide", elements=9, failed=0, budget_used=0.5, seed=3, route="r"),
                StressCell(label="wild", elements=9, failed=2, gated=False),
            ],
            seeds=[1, 2],
            note="scale 2",
        ),
        accuracy=accuracy(rms_vs_float64=RootMeanSquare(candidate=1e-4, reference=2e-4)),
        timing=timing(
            dropped_pairs=2,
            dropped_reasons=("clock moved (2)",),
            warnings=("hot",),
            extensions=1,
            forwards_per_block=ForwardsPerBlock(reference=12, candidate=50),
            clocks=Clocks(sm_mhz_min=1700, sm_mhz_max=1980, throttle_reasons=("power",)),
        ),
        comparison=change(changed_since=("torch 1 -> 2",), provenance="published"),
    )
    return run(
        {
            "a": everything,
            "huge": unsupported(),
            "b": full_case(verdict=Verdict.SLOWER, base=base()),
            "c": full_case(base=base(None, status="crashed", reason="it died", tail=("last",))),
        },
        notes=("a note",),
        settings=Settings(pairs=6, settle_s=1, block_ms=50, min_effect=0.01),
    )


DOCUMENT: dict[str, Any] = json.loads(full_record().to_json())


def places(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON document, as the keys that lead to it."""
    found = []
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        found.append((*prefix, key))
        if isinstance(value, dict | list):
            found += places(value, (*prefix, key))
    return found


hostile_text = st.one_of(
    st.sampled_from(ATTACKS),
    st.text(max_size=12),
    st.text(alphabet="a|<>`\"'\n\r\\*_[](){}@#!&;:%$=~- #\x00\x1b\u202e\u2028\ud800é", max_size=16),
)
numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from(
        [0.0, -0.0, 1e308, 5e-324, 1e-300, 2**53, 10**30, 10**400, float("nan"), float("inf")]
    ),
)
values = st.recursive(
    st.none() | st.booleans() | numbers | hostile_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hostile_text, inner, max_size=4),
    max_leaves=8,
)
PLACES = st.sampled_from(places(DOCUMENT))
damage = st.lists(
    st.one_of(
        st.tuples(st.just("set"), PLACES, values),
        st.tuples(st.just("text"), PLACES, hostile_text),
        st.tuples(st.just("number"), PLACES, numbers),
        st.tuples(st.just("scale"), PLACES, st.sampled_from([0.0, -1.0, 1e3, 1e-3, 1e300, 1e-300])),
        st.tuples(st.just("remove"), PLACES, st.none()),
        st.tuples(st.just("rename"), PLACES, hostile_text),
        st.tuples(st.just("copy"), PLACES, PLACES),
    ),
    min_size=1,
    max_size=5,
)
Damage = list[tuple[str, tuple[Any, ...], Any]]


def look(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        data = data[key]
    return data


def damaged(changes: Damage) -> dict[str, Any]:
    """The full document after the changes; a change whose place is gone is passed over."""
    data = copy.deepcopy(DOCUMENT)
    for kind, place, value in changes:
        try:
            parent, key = look(data, place[:-1]), place[-1]
            old = parent[key]
            if kind in ("set", "number"):
                parent[key] = value
            elif kind == "text":
                parent[key] = value if isinstance(old, str) else old
            elif kind == "scale":
                parent[key] = old * value if isinstance(old, int | float) else old
            elif kind == "copy":
                parent[key] = copy.deepcopy(look(data, value))
            elif kind == "rename" and isinstance(parent, dict):
                parent[value] = parent.pop(key)
            elif kind == "remove":
                del parent[key]
        except (KeyError, IndexError, TypeError, OverflowError):
            continue
    return data


def read(text: str) -> RunRecord | None:
    """The record, or None for a proper refusal. Anything else is a failure of the reader."""
    try:
        record = parse(text, source="fuzz.json")
    except BaselineError as error:
        for line in str(error).split("\n"):
            assert re.match(r"fuzz\.json(:\d+:\d+)?: ", line), line
            assert line.isprintable()
            assert len(line) < 1000
            assert not obeyed(line)
        return None
    assert parse(record.to_json(), source="again") == record
    return record


def as_lines(lines: list[str]) -> None:
    """Nothing that a terminal or a CI runner would obey."""
    for line in lines:
        assert line.isprintable()
        assert not obeyed(line)
        line.encode()


def shown_everywhere(record: RunRecord) -> None:
    """Every format shows the record, and nothing in it has become markup."""
    as_lines(terminal.summary(record))
    for command in github.commands(record):
        assert command.isprintable()
        assert re.match(r"::(error|notice) (file=[^,:]*,)?title=[^,:]*::", command)
        assert "##[" not in command
    for name, case in record.cases.items():
        as_lines(explain.explain(name, case))
    document = markdown.table(record)
    assert not obeyed(document)
    assert not obeyed(record.to_json())
    assert not obeyed(junit.render(record))
    rows = [line for line in document.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) <= 1
    assert not re.search(r"<(?!/?sub>)|\x1b|`", document)
    suite = ET.fromstring(junit.render(record).encode()).find("testsuite")
    assert suite is not None
    assert len(suite.findall("testcase")) == len(record.cases)
    source = html.render([record])
    assert "\x1b" not in source
    page = Page(source)
    assert page.count("script") == 1
    assert {tag for tag, _ in page.tags} <= harmless()
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action"):
            address = attributes.get(name) or "#"
            assert address.startswith(("#", "data:,")), (tag, name, address)


@functools.cache
def harmless() -> set[str]:
    """The tags of an honest record's page."""
    return {tag for tag, _ in Page(html.render([full_record()])).tags}


DRAWN = {
    name: getattr(plots, name)
    for name in ("intervals", "pairs", "shares", "roofline", "trace", "history")
}


@pytest.fixture(scope="module", autouse=True)
def _no_drawing():
    """matplotlib is what takes the time, and has a property of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in DRAWN:
            patch.setattr(plots, name, lambda *_, **__: "<svg></svg>")
        yield


def test_the_full_record_is_shown():
    record = read(json.dumps(DOCUMENT))
    assert record == full_record()
    shown_everywhere(record)


@fuzz
@given(damage)
@example([("number", ("cases", "a", "timing", "log_ratios", 0), 710.0)])
@example([("set", ("cases", "a", "label"), ":")])
@example([("set", ("cases", "a", "reason"), "slow ##[error]x")])
@example([("rename", ("cases", "a"), "##[error]x")])
@example([("set", ("cases", "a", "workload"), {"##[error]x": "::error::y ##[error]z"})])
@example([("rename", ("device",), "##[error]x")])
def test_damaged_records(changes):
    record = read(json.dumps(damaged(changes)))
    if record is not None:
        shown_everywhere(record)


COUNTED = [place for place in places(DOCUMENT) if type(look(DOCUMENT, place)) is int]


@pytest.mark.parametrize("place", COUNTED, ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize("huge", [10**400, -(10**400), 2**64])
def test_no_integer_beyond_64_bits(place, huge):
    """They would overflow wherever they meet a float: in a table, in a comparison."""
    text = json.dumps(damaged([("set", place, huge)]))
    if "workload" in place or "launch" in place:
        shown_everywhere(parse(text, source="fuzz.json"))
        return
    with pytest.raises(BaselineError, match=rf"^fuzz\.json: \$.*{place[0]}") as caught:
        parse(text, source="fuzz.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("huge", [2**63 - 1, 0, 1])
def test_the_largest_integers_are_shown(huge):
    for place in COUNTED:
        record = read(json.dumps(damaged([("set", place, huge)])))
        if record is not None:
            shown_everywhere(record)


numeric = st.lists(
    st.one_of(
        st.tuples(st.just("number"), PLACES, st.floats(allow_nan=False, allow_infinity=False)),
        st.tuples(st.just("scale"), PLACES, st.sampled_from([0.0, 1e3, 1e-3, 1e300, 1e-300])),
        st.tuples(st.just("rename"), st.just(("cases", "a")), hostile_text),
    ),
    min_size=1,
    max_size=3,
)


@settings(fuzz, max_examples=max(3, LONG // 60))
@given(numeric)
def test_damaged_records_are_drawn(changes):
    record = read(json.dumps(damaged(changes)))
    if record is not None:
        with pytest.MonkeyPatch.context() as patch:
            for name, draw in DRAWN.items():
                patch.setattr(plots, name, draw)
            page = Page(html.render([record, record]))
        assert page.count("script") == 1


@fuzz
@given(hostile_text, hostile_text)
def test_hostile_text_in_every_place(one, two):
    """Every string of the record at once, so that each way out meets it."""

    def poisoned(value: Any, keep: bool = False) -> Any:
        if isinstance(value, dict):
            return {k: poisoned(v, k in CLOSED) for k, v in value.items()}
        if isinstance(value, list):
            return [poisoned(v) for v in value]
        return value if keep or not isinstance(value, str) else f"{one}{two}"

    data = poisoned(DOCUMENT)
    data["cases"] = {f"{two}{i}": case for i, case in enumerate(data["cases"].values())}
    for case in data["cases"].values():
        case["workload"] = {one: two, "nested": {two: [one]}}
        case["objections"] = {one: [two]}
    record = read(json.dumps(data))
    if record is not None:
        shown_everywhere(record)


#: Fields whose values are from a closed list, so that text in them is refused, not shown.
CLOSED = frozenset(
    {
        "verdict",
        "type",
        "float32_matmul_precision",
        "mode",
        "clock",
        "l2",
        "arm",
        "provenance",
        "reference_kind",
        "status",
        "reference_sha256",
    }
)


@fuzz
@given(st.integers(0, len(json.dumps(DOCUMENT))), hostile_text, st.integers(0, 40))
def test_truncated_and_overwritten(cut, junk, lost):
    text = json.dumps(DOCUMENT)
    read(text[:cut])
    record = read(text[:cut] + junk + text[cut + lost :])
    if record is not None:
        shown_everywhere(record)


@fuzz
@given(values)
@example([])
@example({"schema_version": 1})
def test_foreign_json(value):
    record = read(json.dumps(value))
    assert record is None


@fuzz
@given(st.text(max_size=80) | hostile_text)
@example("\x1b[2J\x1b]0;x\x07")
@example("0 \x1b 0")
def test_plain_is_idempotent(given_text):
    once = texts.plain(given_text, 100)
    assert texts.plain(once, 100) == once
