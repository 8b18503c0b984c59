"""Where and under which settings something was measured: device, software, precision, revision."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pytest_fastlayer import records
from pytest_fastlayer.nvml import NvmlMonitor, driver_version

__all__ = [
    "NvmlMonitor",
    "device_record",
    "git_commit",
    "possible_devices",
    "precision_record",
    "software_record",
]

_MIB = 1024 * 1024


def device_record(device: torch.device | str) -> records.Device:
    """Identity of a device. Raises ValueError for types other than cuda and cpu."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return records.Device(
            type="cuda",
            name=properties.name,
            capability=(properties.major, properties.minor),
            multiprocessors=properties.multi_processor_count,
            memory_mib=properties.total_memory // _MIB,
        )
    if device.type == "cpu":
        return records.Device(
            type="cpu",
            name=cpu_name(),
            multiprocessors=torch.get_num_threads(),
            memory_mib=_memory_bytes() // _MIB,
        )
    raise ValueError(f"device is {device}: expected a cuda or cpu device")


def cpu_name(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """Model name of the processor: Linux's cpuinfo, else what ``platform`` knows."""
    try:
        lines = Path(cpuinfo).read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "cpu"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return 0


class DeviceUnavailableError(RuntimeError):
    """The device that was asked for is not there."""


def choose_device(asked: str) -> str:
    """``"cuda"`` or ``"cpu"`` for ``"auto"``, ``"cuda"`` or ``"cpu"``.

    Raises DeviceUnavailableError for ``"cuda"`` where torch sees none.
    """
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise DeviceUnavailableError(
            "--fastlayer-device=cuda: torch sees no CUDA device; install a CUDA build of torch "
            "and a driver, or use --fastlayer-device=cpu"
        )
    if asked == "auto":
        return "cuda" if available else "cpu"
    return asked


def possible_devices(asked: str) -> list[records.Device]:
    """Devices that a run may measure on, the chosen one first.

    The CPU is always among them: a test may hold its tensors there, whatever was asked for.
    """
    gpus = torch.cuda.device_count() if choose_device(asked) == "cuda" else 0
    return [device_record(f"cuda:{i}") for i in range(gpus)] + [device_record("cpu")]


def software_record() -> records.Software:
    """Versions of what runs. None for what is absent; importing triton is not attempted."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return records.Software(
        python=platform.python_version(),
        platform=platform.platform(),
        torch=torch.__version__,
        triton=installed("triton"),
        pytest_fastlayer=installed("pytest-fastlayer"),
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        driver=driver_version() if torch.version.cuda else None,
    )


def precision_record() -> records.Precision:
    """The float32 settings in force now."""
    precision: Any = torch.get_float32_matmul_precision()
    try:
        tf32 = torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set through the newer fp32_precision, which the old getter refuses
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return records.Precision(float32_matmul_precision=precision, allow_tf32=bool(tf32))


def git_commit(path: str | Path = ".") -> str | None:
    """Revision of the repository around ``path``, "-dirty" appended when it has changes.

    None outside a repository, without git, or where git does not answer within ten seconds.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(path), *arguments),
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return f"{revision}-dirty" if git("status", "--porcelain") else revision
    except (OSError, subprocess.SubprocessError):
        return None
