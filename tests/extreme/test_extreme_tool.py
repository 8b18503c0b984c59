"""``python -m fastlayer.extreme`` at lengths a CPU can do: what a GPU session will run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastlayer import extreme, polynomial

SMALL = ["--width", "64", "--exact-rows", "256", "--chunk", "128", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert extreme.main([*arguments, *SMALL]) == 0
    return json.loads(capsys.readouterr().out)


def test_calibration_measures_a_curve_that_supports_its_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a thousand tokens the polynomial serves less; the curve must show it and say where."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(extreme, "__file__", str(tmp_path / "extreme.py"))
    out, picture = tmp_path / "curve.json", tmp_path / "curve.svg"
    before = torch.get_float32_matmul_precision()
    found = run(
        capsys, "calibrate", "--tokens", "1024", "--factors", "0.1", "0.4", "1", "--out", str(out),
        "--plot", str(picture), "--install",
    )  # fmt: skip
    assert torch.get_float32_matmul_precision() == before
    assert json.loads(out.read_text()) == found
    assert picture.stat().st_size > 1000
    spreads = [point["sigma"] for point in found["points"]]
    assert spreads == sorted(spreads)
    assert spreads[2] == pytest.approx(10 * spreads[0], rel=0.3)
    worst = found["points"][-1]
    assert worst["exact"]["budget_used"] < 0.6 < worst["rows"]["budget_used"]
    assert worst["rows"]["rms"] < worst["hermite"]["rms"] < worst["taylor"]["rms"]
    guard = polynomial.read_guard((tmp_path / "polynomial_guard.json").read_text())
    assert guard.threshold is not None
    assert spreads[0] < guard.threshold < spreads[2]
    assert str(out) in guard.provenance


def test_a_curve_that_never_crosses_installs_nothing() -> None:
    points = [{"sigma": s, "rows": {"budget_used": 0.4}} for s in (0.2, 0.4)]
    with pytest.raises(ValueError, match="calibration curve"):
        extreme.guard_data({"points": points}, "a GPU", "nowhere")


def test_accuracy_counts_every_element(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "accuracy", "--tokens", "300", "--batch", "2", "--trials", "2")
    assert found["total"] == 2 * 2 * 300 * 64
    assert found["failed"] == 0
    assert 0 < found["budget_used"] <= 0.6
    assert len(found["notes"]) == 2
    assert "the guard is" in found["notes"][0]


def test_compare_sees_failures_and_nan() -> None:
    expected = torch.ones(10_000, 4)
    candidate = expected.clone()
    candidate[9000, 1] = 1.1
    found = extreme.compare(candidate, expected)
    assert (found["failed"], found["total"]) == (1, 40_000)
    assert found["budget_used"] == pytest.approx(5.0, rel=1e-4)
    candidate[0, 0] = math.nan
    found = extreme.compare(candidate, expected)
    assert (found["failed"], found["budget_used"]) == (2, None)


@pytest.mark.parametrize("command", ["time", "stream"])
def test_timing_reports_what_ran(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, command, "--tokens", "300", "--batch", "5")
    assert found["seconds"] > 0
    assert "10 exact" in found["notes"][0]
    assert found["launch"]["attention"] == "guarded"


def test_scaling_fits_an_exponent_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    command = ("scaling", "--tokens", "300", "400", "--attention", "polynomial", "--plot")
    found = run(capsys, *command, str(pictures[0]))
    assert list(found["attention"]) == ["exact", "polynomial"]
    for line in found["attention"].values():
        assert [point["tokens"] for point in line["points"]] == [300, 400]
        assert math.isfinite(line["exponent"])
    extreme.plot(found, pictures[1])
    drawn = [picture.read_text() for picture in pictures]
    assert drawn[0] == drawn[1]
    assert "exact, exponent" in drawn[0]
    assert extreme.exponent([(1, 3.0), (2, 6.0), (8, 24.0)]) == pytest.approx(1.0)
    assert extreme.exponent([(1, 3.0)]) is None


def test_a_picture_of_what_has_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert extreme.main(["time", "--plot", "x.svg"]) == 2
    assert "--plot is for calibrate and scaling, not time" in capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fastlayer.extreme", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("calibrate", "accuracy", "time", "stream", "scaling"):
        assert name in done.stdout
