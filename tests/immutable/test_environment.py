"""Records of device, software, precision and revision."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_fastlayer.environment import (
    cpu_name,
    device_record,
    git_commit,
    precision_record,
    software_record,
)


def test_cpu_identity() -> None:
    record = device_record("cpu")
    assert record.type == "cpu"
    assert record.name
    assert record.capability is None
    assert record.multiprocessors == torch.get_num_threads()
    assert record.memory_mib > 0
    assert record.matches(device_record("cpu"))


def test_cuda_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 << 30
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    record = device_record("cuda:0")
    assert record.slug == "nvidia-h200"
    assert record.capability == (9, 0)
    assert (record.multiprocessors, record.memory_mib) == (132, 150 * 1024)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="cuda or cpu"):
        device_record("meta")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD  Ryzen 9\nflags\t: x\n", "AMD Ryzen 9"),
        ("processor : 0\nModel\t\t: Raspberry Pi 4\n", "Raspberry Pi 4"),
    ],
)
def test_cpu_name_from_cpuinfo(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_name(tmp_path / "cpuinfo") == name
    assert cpu_name(tmp_path / "none")


def test_software_names_what_is_installed() -> None:
    record = software_record()
    assert record.torch == torch.__version__
    assert record.python.count(".") == 2
    if torch.version.cuda is None:
        assert record.cuda is None
        assert record.driver is None


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_in_force(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        record = precision_record()
        assert record.float32_matmul_precision == precision
        assert record.allow_tf32 is (precision != "highest")
    finally:
        torch.set_float32_matmul_precision(before)


def test_revision_and_dirt(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ("git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments),
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    assert git_commit(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    revision = git_commit(tmp_path)
    assert revision is not None
    assert len(revision) == 40
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == revision + "-dirty"
    assert git_commit(tmp_path / "absent") is None
