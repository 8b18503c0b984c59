"""Admissions as a file, and the committed rows against their evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastlayer import Admission, AdmissionError, Admissions, Refusal
from fastlayer.admissions import COMMITTED, committed
from fastlayer.contract import Precision
from fastlayer.routes import ROUTE_NAMES

HIGH = Precision("high", True)
ROW = Admission("A GPU", HIGH, 3, "sdpa", {"execution": "graph"}, "baselines/a-gpu.json#3")
NO = Refusal("A GPU", HIGH, 3, "dense", {}, "slower")
ROOT = Path(__file__).resolve().parents[2]


def test_a_file_survives_the_round_trip(tmp_path):
    path = tmp_path / "admissions.json"
    rows = Admissions((ROW,), (NO,))
    rows.save(path)
    assert Admissions.load(path) == rows
    assert [item.name for item in tmp_path.iterdir()] == ["admissions.json"]
    Admissions.load(path).save(path)
    assert Admissions.load(path) == rows


def test_admitting_replaces_and_refusing_withdraws():
    faster = Admission("A GPU", HIGH, 3, "fused", {}, "baselines/a-gpu.json#3")
    rows = Admissions().admit(ROW).admit(faster)
    assert rows.admitted == (faster,)
    refused = Refusal("A GPU", HIGH, 3, "fused", {}, "INCORRECT")
    rows = rows.refuse(refused)
    assert rows.admitted == ()
    assert rows.refused == (refused,)
    assert rows.admit(faster).refused == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema_version=99), "schema_version: given 99; expected 1"),
        (lambda data: data.pop("refused"), "KeyError"),
        (lambda data: data.update(admitted={}), "expected a list of rows"),
        (lambda data: data["admitted"][0].pop("route"), "given the fields"),
        (lambda data: data["admitted"][0].update(speed=2), "speed"),
        (lambda data: data["admitted"][0].update(precision="high"), "expected two objects"),
        (lambda data: data["admitted"][0].update(case="3"), "expected an integer"),
        (lambda data: data["admitted"].append(data["admitted"][0]), "two rows"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused(tmp_path, change, message):
    data = json.loads(json.dumps(Admissions((ROW,), (NO,)).to_dict()))
    change(data)
    path = tmp_path / "admissions.json"
    path.write_text(json.dumps(data))
    with pytest.raises((AdmissionError, KeyError), match=message):
        Admissions.load(path)


def test_a_file_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "admissions.json"
    path.write_text("{")
    with pytest.raises(AdmissionError, match=r"admissions\.json.*--fastlayer-admit"):
        Admissions.load(path)


def test_the_committed_file_is_in_normal_form():
    assert json.loads(COMMITTED.read_text()) == json.loads(json.dumps(committed().to_dict()))


@pytest.mark.parametrize("row", committed().admitted, ids=lambda row: f"{row.device}-{row.case}")
def test_a_committed_row_has_evidence(row):
    """The baseline exists, passed, and was measured on this device, precision, route and launch."""
    path, _, case = row.evidence.partition("#")
    baseline = json.loads((ROOT / path).read_text())
    measured = baseline["cases"][case]
    assert row.route in ROUTE_NAMES
    assert baseline["provenance"] == "measured"
    assert baseline["device"]["name"] == row.device
    assert Precision(**baseline["precision"]) == row.precision
    assert measured["verdict"] in ("PASS", "FASTER")
    assert measured["accuracy"]["failed"] == 0
    assert measured["route"] == row.route
    assert (measured["launch"] or {}) == dict(row.launch)
