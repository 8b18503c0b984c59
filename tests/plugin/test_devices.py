"""Each worker takes its GPU from the caller's own list."""

from __future__ import annotations

import threading
import time

import pytest

from pytest_fastlayer import devices


def none_asked() -> list[str]:
    raise AssertionError("the machine was asked although the caller gave a list")


@pytest.mark.parametrize(
    ("worker", "listed", "expected"),
    [
        ("gw0", "1", "1"),  # the caller's choice stands: not overwritten by 0
        ("gw1", "1", "1"),
        ("gw0", "2,5", "2"),
        ("gw1", "2,5", "5"),
        ("gw2", "2,5", "2"),  # a replaced worker on a two-GPU box
        ("gw3", "GPU-a, GPU-b", "GPU-b"),
    ],
)
def test_caller_list_is_divided(worker, listed, expected):
    environ = {"PYTEST_XDIST_WORKER": worker, "CUDA_VISIBLE_DEVICES": listed}
    assert devices.assign_gpu(environ, none_asked) == expected
    assert environ["CUDA_VISIBLE_DEVICES"] == expected


def test_without_a_list_the_machine_is_asked():
    environ = {"PYTEST_XDIST_WORKER": "gw3"}
    assert devices.assign_gpu(environ, lambda: ["GPU-a", "GPU-b"]) == "GPU-b"


@pytest.mark.parametrize("listed", ["", "-1"])
def test_hidden_gpus_stay_hidden(listed):
    environ = {"PYTEST_XDIST_WORKER": "gw0", "CUDA_VISIBLE_DEVICES": listed}
    assert devices.assign_gpu(environ, none_asked) is None
    assert environ["CUDA_VISIBLE_DEVICES"] == listed


def test_nothing_changes_outside_xdist():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert devices.assign_gpu(environ, none_asked) is None
    assert environ == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_unknown_worker_id_is_named():
    with pytest.raises(devices.DeviceAssignmentError, match="'master'"):
        devices.assign_gpu({"PYTEST_XDIST_WORKER": "master"}, none_asked)


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "GPU-a"), ("1", "GPU-b"), ("GPU-b", "GPU-b"), ("7", "7")]
)
def test_lock_is_named_by_the_physical_device(visible, expected):
    assert devices.physical_key("cuda", visible, ["GPU-a", "GPU-b"]) == expected
    assert devices.physical_key("cpu", visible, ["GPU-a"]) == "cpu"


def test_timing_excludes_every_other_use(tmp_path):
    """Readers share; a writer waits for them and keeps them out."""
    events: list[str] = []
    started = threading.Event()

    def reader() -> None:
        with devices.device_lock("cpu", exclusive=False, folder=tmp_path):
            events.append("reader in")
            started.set()
            time.sleep(0.1)
            events.append("reader out")

    thread = threading.Thread(target=reader)
    thread.start()
    started.wait()
    with devices.device_lock("cpu", exclusive=True, folder=tmp_path):
        events.append("writer")
    thread.join()
    assert events == ["reader in", "reader out", "writer"]
