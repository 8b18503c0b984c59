"""Whatever a file holds, reading it gives a valid record or an error with file and place."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import case, run, timing

from pytest_fastlayer import baselines
from pytest_fastlayer.baselines import BaselineError, BaselineNotFoundError, load, parse, reading
from pytest_fastlayer.records import SCHEMA_VERSION, ForwardsPerBlock, Verdict


def document(**changes: Any) -> dict[str, Any]:
    return json.loads(run().to_json()) | changes


def edited(*path: str | int, value: Any) -> str:
    """The text of a valid record with one value replaced."""
    data = document()
    target: Any = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return json.dumps(data)


def refusal(text: str) -> str:
    with pytest.raises(BaselineError) as caught:
        parse(text, source="file.json")
    return str(caught.value)


@pytest.mark.parametrize("arm", ["reference_s", "candidate_s"])
def test_times_whose_quotient_overflows_are_refused(arm):
    data = document()
    figures = data["cases"]["a"]["timing"]
    figures |= {"reference_s": 1e300, "candidate_s": 1e300, arm: 1e-300}
    assert "$.cases.a.timing.speedup: 4 does not agree" in refusal(json.dumps(data))


def test_round_trip(tmp_path):
    record = run({"a": case(workload={"none": None, "nested": [None, {"x": 1}]}), "ü/b": case()})
    baselines.save(record, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == record


def test_nullable_figures_round_trip():
    record = run({"a": case(timing=timing(ci=None))})
    assert parse(record.to_json(), source="r") == record


def test_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(BaselineNotFoundError, match=r"none\.json: no such file.*--fastlayer-json"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("{", "truncated"),
        ('{"schema_version": 1, "cases": {"a": {"verd', "truncated"),
        ("<<<<<<< HEAD\n{}\n", "file.json:1:1"),
        ('{\n<<<<<<< HEAD\n"a": 1}', "merge conflict"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("[]", "expected a JSON object, got list"),
        ("3", "expected a JSON object, got int"),
        ("{}", "not a record of pytest-fastlayer"),
        ('{"machine_info": {}, "benchmarks": []}', "keys found: 'machine_info', 'benchmarks'"),
        ('{"schema_version": "1"}', "expected an integer, got '1'"),
        ('{"schema_version": true}', "expected an integer, got True"),
        ('{"schema_version": 1, "schema_version": 1}', "'schema_version' occurs twice"),
        ('{"schema_version": ' + "9" * 5000 + "}", "not valid JSON"),
        ("__import__('os').system('touch pwned')", "not valid JSON"),
        ('!!python/object/apply:os.system ["true"]', "not valid JSON"),
    ],
)
def test_foreign_text(text, said):
    message = refusal(text)
    assert message.startswith("file.json")
    assert said in message


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("cases", "a", "timing", "speedup"), float("nan"), "$.cases.a.timing.speedup: nan"),
        (("cases", "a", "timing", "ci", 1), float("inf"), "$.cases.a.timing.ci[1]: inf"),
        (("cases", "a", "timing", "reference_s"), 0, "$.cases.a.timing.reference_s"),
        (("cases", "a", "timing", "candidate_s"), -1.0, "$.cases.a.timing.candidate_s"),
        (("cases", "a", "timing", "noise_floor"), -0.1, "$.cases.a.timing.noise_floor"),
        (("cases", "a", "timing", "speedup"), "4.0", "$.cases.a.timing.speedup"),
        (("cases", "a", "timing", "reference_s"), 4.0, "both in seconds"),
        (("cases", "a", "timing", "reference_ms"), 4.0, "fields carry their unit"),
        (("cases", "a", "timing", "ci"), [6.0, 5.0], "ci must be (low, high)"),
        (("cases", "a", "accuracy", "failed"), 1, "a timing needs an accuracy"),
        (("cases", "a", "accuracy", "total"), True, "$.cases.a.accuracy.total"),
        (("cases", "a", "verdict"), "GREAT", "$.cases.a.verdict"),
        (("cases", "a", "workload", "x y"), float("-inf"), "$.cases.a.workload['x y']: -inf"),
        (("cases", "a", "workload", "s"), "\ud800", "surrogate"),
        (("cases", "a", "workload", "\ud800"), 1, "surrogate"),
        (("cases", "it's <b>"), {}, '$.cases["it\'s <b>"].verdict'),
        (("device", "memory_mib"), "143771", "$.device.memory_mib"),
        (("device",), None, "$.device"),
        (("surprise",), 1, "$.surprise"),
    ],
)
def test_bad_value_is_named_by_its_path(path, value, place):
    message = refusal(edited(*path, value=value))
    assert message.startswith("file.json: $")
    assert place in message


def test_milliseconds_in_both_arms_are_caught_by_the_block():
    data = document()
    data["cases"]["a"]["timing"] |= {
        "reference_s": 4.0,
        "candidate_s": 1.0,
        "forwards_per_block": {"reference": 12, "candidate": 50},
    }
    assert "in milliseconds?" in refusal(json.dumps(data))


def test_a_very_noisy_measurement_is_not_taken_for_an_error_of_unit():
    noisy = timing(
        reference_s=0.24,
        candidate_s=0.001,
        noise_floor=12.0,
        floor_sources=None,
        forwards_per_block=ForwardsPerBlock(reference=12, candidate=50),
    )
    record = run({"a": case(timing=noisy)})
    assert parse(record.to_json(), source="r") == record


def test_many_errors_are_counted():
    cases = {str(i): {} for i in range(20)}
    message = refusal(json.dumps(document(cases=cases)))
    assert message.count("\n") == reading.MAX_ERRORS
    assert "and 15 more" in message


@pytest.mark.parametrize("depth", [reading.MAX_DEPTH + 1, 100_000])
def test_deep_nesting(depth):
    text = '{"schema_version": 1, "notes": ' + "[" * depth + "]" * depth + "}"
    assert f"nested deeper than {reading.MAX_DEPTH} levels" in refusal(text)


def test_a_hundred_megabytes_are_refused_unread(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(BaselineError, match="100 MiB is larger than the 16 MiB"):
        load(path)


def test_other_kinds_of_file(tmp_path):
    with pytest.raises(BaselineError, match=r"regular file|directory"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(BaselineError, match="not a regular file"):
        load(tmp_path / "pipe.json")
    (tmp_path / "binary.json").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(BaselineError, match=r"not UTF-8 text \(byte 0\)"):
        load(tmp_path / "binary.json")
    with pytest.raises(BaselineError, match="cannot be read"):
        load("nul\0byte.json")


def test_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + run().to_json().encode())
    assert load(tmp_path / "bom.json") == run()


@pytest.mark.parametrize(
    ("software", "wanted"),
    [
        ({"pytest_fastlayer": "3.1.0"}, "pip install 'pytest-fastlayer>=3.1.0'"),
        ({"pytest_fastlayer": "1; rm -rf ~"}, "pip install --upgrade pytest-fastlayer"),
        (None, "pip install --upgrade pytest-fastlayer"),
    ],
)
def test_newer_schema_says_what_to_install(software, wanted):
    message = refusal(json.dumps({"schema_version": SCHEMA_VERSION + 1, "software": software}))
    assert "$.schema_version: 2 is newer than 1" in message
    assert message.endswith(wanted)


def test_older_schema_without_a_migration_is_refused():
    assert "no way to read version 0" in refusal(json.dumps(document(schema_version=0)))
    assert "no way to read version -5" in refusal(json.dumps(document(schema_version=-5)))


def test_older_schemas_are_migrated_step_by_step(monkeypatch):
    """Two invented steps: -1 called the cases ``entries``, 0 kept its figures in milliseconds."""

    def rename(data: dict[str, Any]) -> dict[str, Any]:
        entries = data.pop("entries")
        return data | {"cases": entries}

    def to_seconds(data: dict[str, Any]) -> dict[str, Any]:
        for entry in data["cases"].values():
            for arm in ("reference", "candidate"):
                entry["timing"][f"{arm}_s"] = entry["timing"].pop(f"{arm}_ms") / 1e3
        return data

    monkeypatch.setattr(reading, "MIGRATIONS", {-1: rename, 0: to_seconds})
    old = document(schema_version=-1)
    old["entries"] = old.pop("cases")
    figures = old["entries"]["a"]["timing"]
    figures |= {f"{arm}_ms": figures.pop(f"{arm}_s") * 1e3 for arm in ("reference", "candidate")}
    assert parse(json.dumps(old), source="old.json") == run()


def test_a_faulty_migration_is_still_validated(monkeypatch):
    monkeypatch.setattr(reading, "MIGRATIONS", {0: lambda data: data | {"surprise": 1}})
    assert "$.surprise" in refusal(json.dumps(document(schema_version=0)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def paths(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in items:
        found.append((*prefix, key))
        if isinstance(value, dict | list):
            found += paths(value, (*prefix, key))
    return found


def reads_or_refuses(text: str) -> None:
    try:
        record = parse(text, source="fuzz.json")
    except BaselineError as error:
        lines = str(error).split("\n")
    else:
        assert parse(record.to_json(), source="again") == record
        return
    assert all(line.startswith("fuzz.json") and line.isprintable() for line in lines)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(place=st.sampled_from(paths(document())), value=json_values)
def test_fuzz_one_value(place, value):
    reads_or_refuses(edited(*place, value=value))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cut=st.integers(0, 2000), junk=st.text(max_size=6))
def test_fuzz_truncation_and_junk(cut, junk):
    text = run().to_json()
    reads_or_refuses(text[:cut] + junk + text[cut + len(junk) :])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    data=st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))
)
def test_fuzz_bytes(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(data)
    with pytest.raises(BaselineError, match=r"fuzz\.json"):
        load(path)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=json_values)
def test_fuzz_any_json(data):
    reads_or_refuses(json.dumps(data))


def test_stored_verdicts_survive():
    record = run({v.value: case(v) for v in (Verdict.SLOWER, Verdict.NO_BASELINE, Verdict.FASTER)})
    assert parse(record.to_json(), source="r") == record
