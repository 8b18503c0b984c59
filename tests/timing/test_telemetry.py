"""What is noticed beside the samples: clocks, throttling, hidden work, company."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_clock import ScriptedClock

from pytest_fastlayer.clocks import BlockTime
from pytest_fastlayer.nvml import REASONS, ClockReading, NvmlMonitor, driver_version
from pytest_fastlayer.timing import Plan, Telemetry, measure


class FakeNvml:
    """The part of pynvml that is used, answering from a script."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.mhz: Any = 1980
        self.mask = 0
        self.pids: list[int] = []
        self.broken: set[str] = set()
        self.uuid: str | None = None

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.broken:
            raise self.NVMLError(name)
        return value() if callable(value) else value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._answer("driver", b"580.65")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        self.uuid = uuid
        return self._answer("handle", object())

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        return int(self._answer("clock", self.mhz))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: object) -> int:
        return int(self._answer("reasons", self.mask))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[Any]:
        return list(self._answer("processes", [SimpleNamespace(pid=pid) for pid in self.pids]))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab-34")
    )
    return FakeNvml()


def test_the_device_is_found_by_uuid(nvml: FakeNvml) -> None:
    assert NvmlMonitor("cuda:0", nvml).available
    assert nvml.uuid == "GPU-12ab-34"


def test_without_nvml_nothing_is_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not NvmlMonitor("cpu", nvml).available
    nvml.broken = {"init"}
    broken = NvmlMonitor("cuda:0", nvml)
    assert not broken.available
    assert broken.read() is None
    assert broken.other_processes() == 0
    assert driver_version(nvml) is None
    monkeypatch.setattr("pytest_fastlayer.nvml._load", lambda: None)
    assert not NvmlMonitor("cuda:0").available
    assert driver_version() is None


def test_readings_name_the_throttle_reasons(nvml: FakeNvml) -> None:
    nvml.mask = 0x1 | 0x4 | 0x40
    reading = NvmlMonitor("cuda:0", nvml).read()
    assert reading == ClockReading(
        1980, frozenset({"gpu_idle", "sw_power_cap", "hw_thermal_slowdown"})
    )
    assert reading.telling == {"sw_power_cap", "hw_thermal_slowdown"}
    assert driver_version(nvml) == "580.65"


def test_a_query_that_is_refused_leaves_its_figure_out(nvml: FakeNvml) -> None:
    monitor = NvmlMonitor("cuda:0", nvml)
    nvml.broken = {"reasons", "processes"}
    assert monitor.read() == ClockReading(1980)
    assert monitor.other_processes() == 0
    nvml.broken = {"clock"}
    assert monitor.read() is None


@pytest.mark.parametrize(
    ("pids", "initialized", "others"),
    [
        ([], True, 0),
        ([-1], True, 0),  # -1 stands for this process
        ([-1, 5], True, 1),
        ([4], True, 0),  # in a container: the one entry must be us
        ([4, 5], True, 1),
        ([4], False, 1),
    ],
)
def test_other_processes(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    pids: list[int],
    initialized: bool,
    others: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    nvml.pids = [os.getpid() if pid == -1 else pid for pid in pids]
    assert NvmlMonitor("cuda:0", nvml).other_processes() == others


def run(
    nvml: FakeNvml, mhz: Any = None, mask: Any = None, pairs: int = 10
) -> tuple[Any, Telemetry]:
    """Ten pairs, NVML answering each block in turn from the given functions."""
    clock, telemetry, block = ScriptedClock(), Telemetry(), [-1]
    monitor = NvmlMonitor("cuda:0", nvml)

    def count() -> int:
        block[0] += 1
        return int(mhz(block[0]) if mhz else 1980)

    nvml.mhz = count
    nvml.mask = (lambda: mask(block[0])) if mask else 0  # type: ignore[assignment]
    samples = measure(
        clock.arm("A"),
        clock.arm("B"),
        clock=clock,
        plan=Plan(pairs=pairs, settle_s=0),
        telemetry=telemetry,
        monitor=monitor,
    )
    return samples, telemetry


def test_steady_clocks_keep_every_pair(nvml: FakeNvml) -> None:
    samples, telemetry = run(nvml, lambda block: 1980 - block % 3)
    assert samples.keep is None
    clocks = telemetry.clocks()
    assert clocks is not None
    assert (clocks.sm_mhz_min, clocks.sm_mhz_max) == (1978, 1980)
    assert telemetry.dropped_reasons() == ()


def test_a_pair_whose_clock_moved_is_dropped_and_counted(nvml: FakeNvml) -> None:
    samples, telemetry = run(nvml, lambda block: 1200 if block in (4, 5, 13) else 1980)
    assert samples.keep == tuple(pair not in (2, 6) for pair in range(10))
    assert telemetry.dropped_reasons() == ("SM clock moved by more than 5% (2)",)


def test_arms_that_settle_at_different_clocks_are_no_fault(nvml: FakeNvml) -> None:
    """Under a power cap the heavier arm runs slower, steadily; ABBA puts B at blocks 1, 2 of 4."""
    samples, telemetry = run(nvml, lambda block: 1500 if block % 4 in (1, 2) else 1980)
    assert samples.keep is None
    assert telemetry.dropped_reasons() == ()


def test_a_pair_under_another_throttle_reason_is_dropped(nvml: FakeNvml) -> None:
    thermal = next(bit for bit, name in REASONS.items() if name == "hw_thermal_slowdown")
    samples, telemetry = run(nvml, mask=lambda block: thermal if block == 7 else 0x1)
    assert samples.keep == tuple(pair != 3 for pair in range(10))
    assert telemetry.dropped_reasons() == ("throttle reason changed: hw_thermal_slowdown (1)",)
    clocks = telemetry.clocks()
    assert clocks is not None
    assert clocks.throttle_reasons == ("gpu_idle", "hw_thermal_slowdown")


def test_idle_moments_are_no_reason(nvml: FakeNvml) -> None:
    samples, _ = run(nvml, mask=lambda block: block % 2)
    assert samples.keep is None


def test_no_reading_keeps_the_pair(nvml: FakeNvml) -> None:
    nvml.broken = {"clock"}
    samples, telemetry = run(nvml)
    assert samples.keep is None
    assert telemetry.clocks() is None


def test_company_is_recorded_and_warned_of(nvml: FakeNvml) -> None:
    nvml.pids = [os.getpid(), 7]
    _, telemetry = run(nvml)
    clocks = telemetry.clocks()
    assert clocks is not None
    assert clocks.other_processes == 1
    assert any("1 other process" in warning for warning in telemetry.warnings())


@pytest.mark.parametrize(
    ("reference", "candidate", "passes"),
    [(0.0, 0.0, True), (0.0, 0.01, False), (0.01, 0.01, True), (0.0, 1e-4, True)],
)
def test_work_after_the_timed_stream_fails_the_probe(
    reference: float, candidate: float, passes: bool
) -> None:
    clock, telemetry = ScriptedClock(), Telemetry()
    clock.tail = {"A": reference, "B": candidate}
    measure(
        clock.arm("A"),
        clock.arm("B"),
        clock=clock,
        plan=Plan(pairs=6, settle_s=0),
        telemetry=telemetry,
    )
    probe = telemetry.probe()
    assert probe.name == "hidden_work"
    assert probe.passed is passes
    assert passes or "another stream" in probe.message


def test_wall_time_beyond_the_events_is_warned_of() -> None:
    telemetry = Telemetry()
    for _ in range(6):
        telemetry.note("A", BlockTime(0.05, 0.0501), cold=False)
        telemetry.note("B", BlockTime(0.05, 0.07), cold=False)
        telemetry.note("B", BlockTime(0.01, 5.0), cold=True)
    assert any("28% of the candidate's wall time" in one for one in telemetry.warnings())
