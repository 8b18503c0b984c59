"""The search: what it tries, what it refuses, what it proposes. Compilation stands in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fastlayer import CASES, tune
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launches import MEASURED

FITS = {"registers": 255, "stack": 0, "shared": 90_000}


@pytest.mark.parametrize("case", MEASURED[9, 0])
def test_the_space_holds_several_able_launches(case: int) -> None:
    found = list(tune.space(CASES[case]))
    assert len(found) >= 8
    assert len(set(found)) == len(found)
    assert not any(launch.objections(sizes_for(launch, CASES[case])) for launch in found)


def test_the_space_of_some_forms() -> None:
    found = list(tune.space(CASES[7], ["wavefront", "strips"]))
    assert {launch.form for launch in found} == {"wavefront", "strips"}


def test_a_form_that_cannot_compute_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--case", "13", "--form", "single", "--capability", "90"]) == 2
    assert "no launch of form single can compute" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ([FITS], ""),
        ([FITS, {**FITS, "shared": 101_377}], "101,377 bytes of shared memory exceed 101,376"),
        ([{**FITS, "stack": 321}], "321 bytes of stack a thread exceed 320"),
    ],
)
def test_verdicts(resources: list[dict[str, int]], reason: str) -> None:
    assert tune.verdict(resources, 101_376) == reason


def test_pruning_keeps_what_compiles_and_fits() -> None:
    fits, spills, broken = (tune.Trial(Launch("wavefront", stages=n)) for n in (1, 2, 3))

    def compiled(launch: Launch) -> list[dict[str, int]]:
        if launch.stages == 3:
            raise RuntimeError("first line\nPTXAS error: too bad\n")
        return [{**FITS, "stack": 500 * (launch.stages - 1)}]

    tune.prune([fits, spills, broken], compiled, 101_376)
    assert fits.refused == ""
    assert fits.resources == [FITS]
    assert "500 bytes of stack" in spills.refused
    assert broken.refused == "it does not compile: PTXAS error: too bad"


def test_the_proposal_is_the_fastest_and_its_near_equal() -> None:
    trials = [
        tune.Trial(Launch("wavefront", stages=2), milliseconds=0.0515),
        tune.Trial(Launch("wavefront"), milliseconds=0.0501),
        tune.Trial(Launch("single"), milliseconds=0.0502),
        tune.Trial(Launch("layers")),
    ]
    assert tune.proposal(9, trials) == [
        "9: Row(Launch('wavefront'), \"0.0501 ms\"),",
        "9: Row(Launch('single'), \"0.0502 ms\"),",
    ]


def test_a_machine_without_a_gpu_prunes_for_a_named_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two launches compiled for real, in processes of their own."""
    pair = [Launch("wavefront"), Launch("wavefront", stages=2)]
    monkeypatch.setattr(tune, "space", lambda config, forms: iter(pair))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    log = tmp_path / "log.json"
    assert tune.main(["--case", "7", "--capability", "120", "--log", str(log)]) == 0
    assert "2 launches are worth a run; no sm_120 device here" in capsys.readouterr().out
    trials = json.loads(log.read_text())["trials"]
    assert [trial["launch"] for trial in trials] == [launch.as_dict() for launch in pair]
    assert all(trial["resources"][0]["shared"] > 0 for trial in trials)


def test_no_capability_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tune.main(["--case", "7"]) == 2
    assert "pass --capability" in capsys.readouterr().out
