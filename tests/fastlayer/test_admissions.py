"""Admissions as a file, and the committed rows against their evidence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastlayer import (
    CASES,
    Admission,
    AdmissionError,
    Admissions,
    Refusal,
    TransformerConfig,
)
from fastlayer.admissions import COMMITTED, committed
from fastlayer.admit import main, propose
from fastlayer.cases import case_of
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
    (given_up,) = rows.refused
    assert (given_up.route, given_up.launch) == (ROW.route, ROW.launch)
    assert ROW.evidence in given_up.reason
    assert rows.admit(faster).refused == (given_up,)
    refused = Refusal("A GPU", HIGH, 3, "fused", {}, "INCORRECT")
    rows = rows.refuse(refused)
    assert rows.admitted == ()
    assert rows.refused == (given_up, refused)
    assert rows.admit(faster).refused == (given_up,)
    assert rows.admit(ROW).refused == (refused,)


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
    path, _, key = row.evidence.partition("#")
    baseline = json.loads((ROOT / path).read_text())
    measured = baseline["cases"][key]
    assert row.route in ROUTE_NAMES
    assert case_of(TransformerConfig.of(SimpleNamespace(**measured["workload"]))) == row.case
    assert baseline["provenance"] == "measured"
    assert baseline["device"]["name"] == row.device
    assert Precision(**measured["precision"]) == row.precision
    assert measured["verdict"] in ("PASS", "FASTER", "NO_BASELINE")
    assert measured["accuracy"]["failed"] == 0
    assert measured["route"] == row.route
    assert measured.get("launch", {}) == dict(row.launch)


def measured(case: int, speedup: float, **changes: object) -> dict[str, object]:
    config = CASES[case]
    names = TransformerConfig.__dataclass_fields__
    return {
        "verdict": "PASS",
        "workload": {name: getattr(config, name) for name in names},
        "precision": {"float32_matmul_precision": "high", "allow_tf32": True},
        "route": "sdpa",
        "launch": {"packed_qkv": True, "execution": "graph"},
        "timing": {"speedup": speedup, "candidate_s": 1e-4},
        **changes,
    }


def test_rows_follow_from_a_record(tmp_path, capsys):
    arms = [
        {
            "name": "sdpa packed_qkv=True execution=graph",
            "verdict": "PASS",
            "timing": {"speedup": 3.5, "candidate_s": 101e-6},
        },
        {
            "name": "sdpa packed_qkv=False execution=graph slice=16",
            "verdict": "PASS",
            "timing": {"speedup": 3.1, "candidate_s": 0.12},
        },
        {"name": "dense", "verdict": "BELOW_FLOOR", "reason": "1.00x does not clear 1.01"},
    ]
    record = {
        "provenance": "measured",
        "device": {"name": "A GPU"},
        "cases": {
            "case_3": measured(3, 3.6, variants=arms),
            "case_4": measured(4, 2.0, verdict="SLOWER", reason="slower than stored"),
            "case_5": measured(5, 1.0, route="dense", launch=None),
            "case_14": {"verdict": "UNSUPPORTED"},
        },
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    target = tmp_path / "admissions.json"
    assert main([str(path), "--evidence", "baselines/a-gpu.json", "--into", str(target)]) == 0
    rows = Admissions.load(target)
    launch = {"packed_qkv": True, "execution": "graph"}
    evidence = "baselines/a-gpu.json#case_3"
    assert rows.admitted == (Admission("A GPU", HIGH, 3, "sdpa", launch, evidence),)
    slower = {"packed_qkv": False, "execution": "graph", "slice": 16}
    why = "passed at 120,000.0 us (3.10x), the admitted at 101.0 us (3.50x)"
    assert set(map(repr, rows.refused)) == {
        repr(Refusal("A GPU", HIGH, 3, "sdpa", slower, why)),
        repr(Refusal("A GPU", HIGH, 3, "dense", {}, "BELOW_FLOOR: 1.00x does not clear 1.01")),
        repr(Refusal("A GPU", HIGH, 4, "sdpa", launch, "SLOWER: slower than stored")),
    }
    assert "1 admitted, 3 refused" in capsys.readouterr().out
    main([str(path), "--into", str(target)])
    assert len(Admissions.load(target).admitted) == 1


def test_published_figures_admit_nothing(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"provenance": "published", "device": {"name": "x"}, "cases": {}}))
    with pytest.raises(AdmissionError, match="published"):
        propose(Admissions(), path, "baselines/x.json")
