"""Which device a process may use, and who may use it now.

Under xdist each worker gets one GPU of the caller's own ``CUDA_VISIBLE_DEVICES`` list, by its
number modulo the length of that list, before torch reads the variable. Work on a device is
guarded by a reader/writer lock per physical device: checks of accuracy share it, a timed block
owns it. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path


class DeviceAssignmentError(RuntimeError):
    """``CUDA_VISIBLE_DEVICES`` cannot be divided among the workers."""


def nvml_device_ids() -> list[str]:
    """UUIDs of the machine's GPUs in NVML's order; empty where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return [u.decode() if isinstance(u, bytes) else u for u in uuids]
    finally:
        pynvml.nvmlShutdown()


def worker_number(worker_id: str) -> int:
    """``gw3`` -> 3. A replaced worker carries on counting (gw2 on a two-GPU box)."""
    match = re.fullmatch(r"gw(\d+)", worker_id)
    if match is None:
        raise DeviceAssignmentError(
            f"expected an xdist worker id such as 'gw0', got {worker_id!r}; "
            "run without -n, or report the xdist version"
        )
    return int(match.group(1))


def assign_gpu(
    environ: MutableMapping[str, str],
    device_ids: Callable[[], list[str]] = nvml_device_ids,
) -> str | None:
    """Narrow ``CUDA_VISIBLE_DEVICES`` to this xdist worker's GPU and return it.

    Args:
        environ: The process environment; changed in place.
        device_ids: The machine's GPUs, asked only when the caller set no list.

    Returns:
        The GPU chosen, or None outside xdist, and where no GPU is visible.
    """
    worker = environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return None
    number = worker_number(worker)
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    visible = device_ids() if listed is None else [d.strip() for d in listed.split(",")]
    visible = [d for d in visible if d and d != "-1"]
    if not visible:
        return None
    chosen = visible[number % len(visible)]
    environ["CUDA_VISIBLE_DEVICES"] = chosen
    return chosen


def physical_key(device_type: str, visible: str | None, device_ids: list[str]) -> str:
    """A name for the physical device that any process on this machine agrees on."""
    if device_type != "cuda":
        return "cpu"
    first = (visible or "0").split(",")[0].strip()
    if first.isdigit() and int(first) < len(device_ids):
        return device_ids[int(first)]
    return first


@contextmanager
def device_lock(key: str, *, exclusive: bool, folder: Path | None = None) -> Iterator[None]:
    """Hold the physical device: shared for checks, exclusive for timing.

    The lock lives in the user's own temporary folder, so that two pytest runs of one user on one
    machine also wait for each other.
    """
    from filelock import ReadWriteLock

    if folder is None:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = Path(tempfile.gettempdir()) / f"pytest-fastlayer-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / (re.sub(r"[^A-Za-z0-9]+", "-", key) + ".lock")
    lock = ReadWriteLock(path, is_singleton=False)
    with lock.write_lock() if exclusive else lock.read_lock():
        yield


def lock_key_for(device_type: str) -> str:
    """:func:`physical_key` of the device that this process sees first."""
    ids = nvml_device_ids() if device_type == "cuda" else []
    return physical_key(device_type, os.environ.get("CUDA_VISIBLE_DEVICES"), ids)
