"""What routing may know of a device: a frozen value, so that choices are tested without one."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of one device. Sizes in bytes; zero where a fact has no meaning (a CPU's SM count)."""

    type: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    shared_memory_per_block: int = 0


@cache
def _probe_cpu() -> Device:
    return Device(type="cpu", name=_cpu_name(), memory_bytes=_cpu_limit_bytes())


@cache
def _probe_cuda(index: int) -> Device:
    import torch

    facts = torch.cuda.get_device_properties(index)
    return Device(
        type="cuda",
        name=facts.name,
        memory_bytes=facts.total_memory,
        capability=(facts.major, facts.minor),
        multiprocessors=facts.multi_processor_count,
        shared_memory_per_block=getattr(facts, "shared_memory_per_block_optin", 0),
    )


def probe(device: torch.device | str) -> Device:
    """The facts of ``device``, looked up once per process and device.

    A device of a kind that fastlayer has no facts about keeps its type as its name, and no memory.
    """
    import torch

    where = torch.device(device)
    if where.type == "cpu":
        return _probe_cpu()
    if where.type == "cuda":
        index = torch.cuda.current_device() if where.index is None else where.index
        return _probe_cuda(index)
    return Device(type=where.type, name=where.type, memory_bytes=0)


def free_bytes(device: torch.device | str) -> int:
    """Bytes that a new allocation on ``device`` may take now.

    On CUDA this counts what the driver has free and what torch's allocator holds unused; on a CPU
    what the kernel calls available, within the control group's limit.
    """
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        unused = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return free + max(0, unused)
    if where.type == "cpu":
        return min(_meminfo("MemAvailable") or _cpu_limit_bytes(), _cpu_limit_bytes())
    return 0


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "cpu"


def _meminfo(field: str) -> int:
    """One field of /proc/meminfo in bytes, zero where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return 0


@cache
def _cpu_limit_bytes() -> int:
    """Physical memory, or the control group's limit where that is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = _meminfo("MemTotal") or 2**33
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
