"""What the records themselves forbid and keep."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pytest_fastlayer.records import (
    Accuracy,
    Arm,
    BaseArm,
    CaseRecord,
    Device,
    Method,
    NoiseFloor,
    RunRecord,
    Software,
    Timing,
    ToleranceRecord,
    Verdict,
    Work,
    natural_key,
)

DEVICE = Device(type="cpu", name="A CPU", multiprocessors=2, memory_mib=1000)


def timing(**changes):
    method = Method(clock="cpu_clock", settle_s=0, block_ms=1)
    values = {"method": method, "reference_s": 2, "candidate_s": 1, "speedup": 2, "ci": (1.9, 2.1)}
    return Timing(**(values | {"noise_floor": 0.01, "pairs": 6} | changes))


def accuracy(failed=0, total=10):
    return Accuracy(
        trials=1,
        seeds=(1,),
        failed=failed,
        nonfinite=0,
        total=total,
        tolerance=ToleranceRecord(atol=0, rtol=0),
    )


@pytest.mark.parametrize("model", [CaseRecord, lambda **k: Arm(name="arm", **k)])
@pytest.mark.parametrize(
    "arguments",
    [
        {"verdict": Verdict.INCORRECT, "accuracy": accuracy(failed=1)},
        {"verdict": Verdict.DISHONEST, "accuracy": accuracy()},
        {"verdict": Verdict.PASS, "accuracy": accuracy(failed=1)},
        {"verdict": Verdict.PASS, "accuracy": accuracy(total=0)},
        {"verdict": Verdict.PASS, "accuracy": None},
    ],
)
def test_no_speed_without_a_pass(model, arguments):
    model(**arguments)
    with pytest.raises(ValidationError):
        model(**arguments, timing=timing())


@pytest.mark.parametrize(
    "changes",
    [
        {"speedup": float("nan")},
        {"candidate_s": 0},
        {"reference_s": -1},
        {"ci": (2.1, 1.9)},
        {"floor_sources": NoiseFloor(within_quad=0.5, control=0, resolution=0, min_effect=0)},
        {"candidate_ms": 1},
    ],
)
def test_impossible_timings_do_not_construct(changes):
    with pytest.raises(ValidationError):
        timing(**changes)


def test_work_is_positive_and_optional():
    assert CaseRecord(verdict=Verdict.PASS).work is None
    work = CaseRecord(verdict=Verdict.PASS, work={"flops": 2e9, "bytes": 1e6}).work
    assert work == Work(flops=2e9, bytes=1e6)
    for wrong in ({"flops": 0, "bytes": 1}, {"flops": 1}, {"flops": 1, "bytes": float("inf")}):
        with pytest.raises(ValidationError):
            CaseRecord(verdict=Verdict.PASS, work=wrong)


MEASURED = {
    "rev": "main",
    "commit": "a" * 40,
    "status": "measured",
    "verdict": Verdict.SLOWER,
    "accuracy": accuracy(),
    "timing": timing(speedup=0.9, ci=(0.88, 0.92)),
    "reference_s": 3,
    "head": {"value": 1.5, "ci": (1.4, 1.6)},
    "base": {"value": 1.6},
    "p_value": 0.001,
}


def test_a_measured_base_travels_through_json():
    case = CaseRecord(verdict=Verdict.SLOWER, accuracy=accuracy(), base=MEASURED)
    assert CaseRecord.model_validate_json(case.model_dump_json()) == case
    assert CaseRecord.model_validate({"verdict": "PASS"}).base is None


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "crashed"},
        {"status": "incorrect", "verdict": Verdict.INCORRECT, "accuracy": accuracy(failed=1)},
        {"accuracy": accuracy(failed=1)},
        {"accuracy": None},
        {"timing": None},
        {"p_value": None},
        {"reference_s": None},
        {"head": None},
        {"verdict": None},
        {"verdict": Verdict.NO_BASELINE},
        {"verdict": Verdict.INCORRECT},
    ],
)
def test_no_figure_for_a_base_that_did_not_earn_it(changes):
    with pytest.raises(ValidationError):
        BaseArm(**MEASURED | changes)


def test_a_base_may_be_measured_without_a_dear_reference():
    assert BaseArm(**MEASURED | {"reference_s": None, "head": None, "base": None}).timing


def test_a_refused_base_says_so_without_a_figure():
    arm = BaseArm(rev="main", status="incorrect", verdict="INCORRECT", accuracy=accuracy(failed=1))
    assert arm.timing is None
    with pytest.raises(ValidationError, match="incorrect in status and verdict"):
        BaseArm(rev="main", status="incorrect")


def test_cases_come_in_natural_order():
    cases = {name: CaseRecord(verdict=Verdict.PASS) for name in ("10", "2", "1", "b", "1a")}
    software = Software(python="3", platform="p")
    record = RunRecord(created="now", device=DEVICE, software=software, cases=cases)
    assert list(record.cases) == ["1", "1a", "2", "10", "b"]
    again = RunRecord.model_validate_json(record.to_json())
    assert list(again.cases) == list(record.cases)


@pytest.mark.parametrize("ordered", [["", "a"], ["9", "10"], ["a9", "a10"], ["a1b2", "a1b10"]])
def test_natural_key(ordered):
    shuffled = list(ordered)
    shuffled.reverse()
    assert sorted(shuffled, key=natural_key) == ordered


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"memory_mib": 1010}, True),  # a driver reserves a little more
        ({"memory_mib": 1100}, False),
        ({"name": "Another CPU"}, False),
        ({"multiprocessors": 4}, False),
        ({"capability": (9, 0)}, False),
    ],
)
def test_a_device_is_its_full_identity(changes, same):
    assert DEVICE.matches(DEVICE.model_copy(update=changes)) is same


def test_slug_is_a_file_name():
    assert Device(
        type="cuda", name="NVIDIA H200 (NVL)/2", multiprocessors=1, memory_mib=1
    ).slug == ("nvidia-h200-nvl-2")
