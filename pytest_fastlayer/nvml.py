"""NVML telemetry (nvidia-ml-py): clocks, throttle reasons, other processes. A no-op without it.

Every reading is optional: a driver that refuses one query leaves that figure out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

#: Bits of nvmlClocksEventReasons* (NVML API reference) by the names people read.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
#: Reasons that say nothing of the measured work: an idle moment, a fixed setting.
BENIGN = frozenset({"gpu_idle", "applications_clocks_setting", "display_clock_setting"})


@dataclass(frozen=True)
class ClockReading:
    """SM clock in MHz and the throttle reasons in force at one moment."""

    sm_mhz: int
    reasons: frozenset[str] = frozenset()

    @property
    def telling(self) -> frozenset[str]:
        """The reasons that slow the measured work itself."""
        return self.reasons - BENIGN


def _load() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return]


def driver_version(nvml: Any = None) -> str | None:
    """NVIDIA driver version, or None where NVML does not answer."""
    nvml = nvml if nvml is not None else _load()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        found = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return None
    return found.decode() if isinstance(found, bytes) else str(found)


class NvmlMonitor:
    """Readings of one CUDA device. ``available`` is False, and readings None, without NVML."""

    def __init__(self, device: torch.device | str, nvml: Any = None) -> None:
        """``nvml`` replaces the pynvml module (tests)."""
        self._nvml: Any = nvml if nvml is not None else _load()
        self._handle: Any = None
        device = torch.device(device)
        if self._nvml is None or device.type != "cuda":
            return
        try:
            self._nvml.nvmlInit()
            self._handle = self._find(device)
        except self._nvml.NVMLError:
            self._handle = None

    @property
    def available(self) -> bool:
        return self._handle is not None

    def _find(self, device: torch.device) -> Any:
        """NVML's handle by UUID: NVML does not know CUDA_VISIBLE_DEVICES."""
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def read(self) -> ClockReading | None:
        """Clock and throttle reasons now; None where NVML does not answer."""
        if self._handle is None:
            return None
        nvml = self._nvml
        try:
            mhz = int(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        except nvml.NVMLError:
            return None
        query = getattr(
            nvml,
            "nvmlDeviceGetCurrentClocksEventReasons",
            getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
        )
        mask = 0
        if query is not None:
            try:
                mask = int(query(self._handle))
            except nvml.NVMLError:
                mask = 0
        return ClockReading(mhz, frozenset(name for bit, name in REASONS.items() if mask & bit))

    def other_processes(self) -> int:
        """Compute processes on the device besides this one.

        In a container NVML reports the host's process numbers, so ours may not be recognised:
        with a context of our own on the device, one entry is then taken to be us.
        """
        if self._handle is None:
            return 0
        try:
            running: Sequence[Any] = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return 0
        pids = {int(process.pid) for process in running}
        if os.getpid() in pids or (pids and torch.cuda.is_initialized()):
            return len(pids) - 1
        return len(pids)
