"""``python -m fastlayer.extreme`` at lengths a CPU can do: what a GPU session will run."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastlayer import extreme, extreme_options, polynomial, usage
from fastlayer.extreme_options import FACTORS

SMALL = ["--width", "64", "--exact-rows", "256", "--chunk", "128", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    assert extreme.main([*arguments, *SMALL]) == status
    return json.loads(capsys.readouterr().out)


def test_calibration_measures_a_curve_and_refuses_a_coarse_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a thousand tokens the polynomial serves less; the curve must show it."""
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "curve.json", tmp_path / "curve.svg"
    before = torch.get_float32_matmul_precision()
    arguments = [
        "calibrate", "--tokens", "1024", "--factors", "0.1", "0.4", "1", "--out", str(out),
        "--plot", str(picture), *SMALL,
    ]  # fmt: skip
    assert extreme.main(arguments) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "no threshold: calibration curve of 3 points" in said.err
    assert torch.get_float32_matmul_precision() == before
    assert json.loads(out.read_text()) == found
    assert picture.stat().st_size > 1000
    spreads = [point["sigma"] for point in found["points"]]
    assert spreads == sorted(spreads)
    assert spreads[2] == pytest.approx(10 * spreads[0], rel=0.3)
    worst = found["points"][-1]
    assert worst["exact"]["budget_used"] < 0.6 < worst["rows"]["budget_used"]
    assert worst["rows"]["rms"] < worst["hermite"]["rms"] < worst["taylor"]["rms"]


def measured(sigmas: list[float]) -> dict:
    """What a calibration finds where the budget is a power of the spread and 0.6 at 0.43."""
    budgets = [0.6 * (sigma / 0.43) ** 3 if sigma < 1.1 else None for sigma in sigmas]
    points = [
        {"sigma": sigma, "rows": {"budget_used": budget}}
        for sigma, budget in zip(sigmas, budgets, strict=True)
    ]
    return {"device": "a GPU", "points": points}


def test_a_threshold_is_installed_with_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extreme, "__file__", str(tmp_path / "extreme.py"))
    installed = tmp_path / "polynomial_guard.json"
    found = measured([0.344 * factor for factor in FACTORS])
    seen = argparse.Namespace(out=Path("curve.json"), install=False)
    assert extreme._install(found, seen) == 0
    assert not installed.exists()
    seen.install = True
    assert extreme._install(found, seen) == 0
    guard = polynomial.read_guard(installed.read_text())
    assert guard.threshold == pytest.approx(0.43, abs=0.003)
    assert guard.provenance == "calibrated on a GPU, curve.json"
    installed.unlink()
    assert extreme._install(measured([0.0, 3300.0]), seen) == 1
    assert not installed.exists()


INSTALL = ["calibrate", "--install", "--tokens", "32768"]


def test_the_default_options_may_install() -> None:
    options = extreme_options.parse(["calibrate", "--install"], "cuda", Path(__file__))
    assert (options.tokens, tuple(options.factors)) == ([32_768], FACTORS)


@pytest.mark.parametrize(
    ("device", "arguments", "said"),
    [
        ("cpu", INSTALL, "given --install on a CPU; expected a GPU"),
        ("cuda", [*INSTALL[:-1], "32767"], "given --install with --tokens 32767; expected at"),
        ("cuda", [*INSTALL, "--width", "512"], "with --width 512; expected the default 1024"),
        ("cuda", [*INSTALL, "--chunk", "512"], "with --chunk 512; expected the default 1024"),
        ("cuda", [*INSTALL, "--exact-rows", "1024"], "1024; expected the default 4096"),
        ("cuda", [*INSTALL, "--factors", "1", "2"], "with 2 --factors; expected at least 8"),
        ("cuda", ["time", "--install"], "given --install with time; expected it with calibrate"),
        ("cuda", ["time", "--chunk", "64"], "given --chunk 64; expected a multiple of 128"),
    ],
)
def test_what_a_gpu_is_asked(
    device: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        extreme_options.parse(arguments, device, Path(__file__))
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("scaling --tokens 300 300", "given --tokens 300 300; expected different lengths"),
        ("time --tokens 300 400", "given 2 lengths for time; expected one --tokens"),
        ("time --tokens 0", "argument --tokens: given '0'; expected an integer of at least 1"),
        ("time --tokens 3.5", "argument --tokens: given '3.5'; expected an integer"),
        ("time --batch -1", "argument --batch: given '-1'; expected an integer of at least 1"),
        ("time --repeats 0", "argument --repeats: given '0'"),
        ("accuracy --trials 0", "argument --trials: given '0'"),
        ("time --chunk 0", "argument --chunk: given '0'"),
        ("time --exact-rows x", "argument --exact-rows: given 'x'"),
        ("time --exact-rows 100", "given --exact-rows 100 with --chunk 1024"),
        ("time --width 65", "given --width 65; expected a multiple of 64"),
        ("time --width 32", "given --width 32; expected a multiple of 64"),
        ("time --attention sparse", "invalid choice: 'sparse'"),
        ("time --backend foo", "invalid choice: 'foo'"),
        ("time --backend FA3", "given --backend FA3; expected one that works here"),
        ("time --memory-gib 1", "given --memory-gib on a CPU; expected a CUDA device"),
        ("time --memory-gib nan", "argument --memory-gib: given 'nan'; expected a finite number"),
        ("calibrate --factors 0 1e4", "argument --factors: given '0'; expected a finite number"),
        ("calibrate --factors inf", "argument --factors: given 'inf'"),
        ("calibrate --tokens 4096", "given --tokens 4096 with --exact-rows 4096; expected more"),
        ("time --out /nonexistent/x", "given '/nonexistent/x'; expected a file in a folder that"),
        ("time --out .", "given '.', a folder; expected a file"),
        ("scaling --plot /nonexistent/x.svg", "argument --plot: given '/nonexistent/x.svg'"),
        ("scaling --plot x.doc", "expected "),
        ("time --plot x.svg", "given --plot with time; expected it with calibrate or scaling"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_measured(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(extreme, "make_model", None)
    with pytest.raises(SystemExit) as stopped:
        extreme.main(arguments.split())
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_pictures_need_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(usage.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        extreme.main(["scaling", "--plot", "x.svg"])
    assert "without matplotlib; expected it installed" in capsys.readouterr().err


def test_what_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit):
        extreme.main(["time", "--out", str(tmp_path / "x.json")])
    assert "expected a file that may be written" in capsys.readouterr().err


def test_commands_and_their_names_agree() -> None:
    assert tuple(extreme._COMMANDS) == extreme_options.COMMANDS


def test_failed_elements_are_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = extreme.compare
    monkeypatch.setattr(extreme, "compare", lambda ours, theirs: compare(ours + 1, theirs))
    arguments = ("accuracy", "--tokens", "300", "--batch", "1", "--trials", "1")
    found = run(capsys, *arguments, status=1)
    assert 0 < found["failed"] <= found["total"]


def test_what_turns_out_not_to_fit_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_long(*_: object) -> None:
        raise ValueError("route 'prefix_stream': room for blocks of 0 rows")

    monkeypatch.setitem(extreme._COMMANDS, "time", too_long)
    assert extreme.main(["time", *SMALL]) == 1
    assert capsys.readouterr().err == "time: route 'prefix_stream': room for blocks of 0 rows\n"


def test_accuracy_counts_every_element(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "accuracy", "--tokens", "300", "--batch", "2", "--trials", "2")
    assert found["total"] == 2 * 2 * 300 * 64
    assert found["failed"] == 0
    assert 0 < found["budget_used"] <= 0.6
    assert len(found["notes"]) == 2
    assert "guard: worst score spread" in found["notes"][0]


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


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fastlayer.extreme", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("calibrate", "accuracy", "time", "stream", "scaling"):
        assert name in done.stdout
