"""A stranger's repository with two commits: a base that goes wrong in every way, and a head."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

#: As ``tests/plugin``: time that passes only when a forward says so, in every process alike.
CONFTEST = """
import pytest

@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch):
    from clock import Virtual
    from pytest_fastlayer import timing
    monkeypatch.setattr(timing, "clock_for", lambda device: Virtual())
"""
CLOCK = '''
import random

class Virtual:
    """Time that passes only when a forward says so."""
    name, resolution_s, settle_s = "cpu_clock", 1e-9, 0.0
    now = 0.0
    noise = random.Random()

    @classmethod
    def spend(cls, seconds):
        cls.now += seconds * cls.noise.gauss(1, 0.002)

    def synchronize(self):
        pass

    def block(self, fn, forwards, *, cold=False):
        from pytest_fastlayer.clocks import BlockTime
        begin = Virtual.now
        for _ in range(forwards):
            fn()
        return BlockTime(seconds=Virtual.now - begin, wall_s=Virtual.now - begin)
'''
KERNELS = '''
import os, signal
import torch
from clock import Virtual

COST = {cost}

def reference(x):
    Virtual.spend(1e-3)
    return x * torch.sigmoid(x)

class Candidate:
    """The fast one, with whatever ails it in this tree."""

    def __init__(self, name):
        self.name, self.calls = name, 0

    def __call__(self, x):
        self.calls += 1
        Virtual.spend(COST.get(self.name, 1e-4))
        y = torch.nn.functional.silu(x)
        {ailment}
        return y
'''
AILMENT = """
        if self.name == "incorrect":
            y[3] += 1.0
        if self.name == "crash" and os.fork() == 0 and self.calls > 1:
            signal.pause()
        if self.name == "crash" and self.calls > 1:
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(7)
        if self.name == "hang" and self.calls > 1:
            signal.pause()
"""
PAIRS = """
import pytest
import torch
from kernels import Candidate, reference

def inputs(seed):
    return (torch.randn(64, generator=torch.Generator().manual_seed(seed)),)

@pytest.mark.parametrize("name", {names})
def test_pair(paired, name):
    paired(name, reference=reference, candidate=Candidate(name), inputs=inputs)
"""
IMPORTING = """
{imports}
from test_pairs import Candidate, inputs, reference

def test_import(paired):
    paired("import", reference=reference, candidate=Candidate("import"), inputs=inputs)
"""
#: A gate as the base's own tree might hold it: never the one that measures.
DECOY = "raise ImportError('the base must be measured by the gate of the head')\n"


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
    return subprocess.run(
        ("git", "-C", str(folder), *identity, *arguments),
        check=True,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
    ).stdout.strip()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_name(f"{path.name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def build(folder: Path) -> Path:
    """Both commits; the working tree is the head."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    write(
        folder,
        conftest=CONFTEST,
        clock=CLOCK,
        kernels=KERNELS.format(cost={}, ailment=AILMENT.strip()),
        test_pairs=PAIRS.format(names=["same", "slower", "incorrect", "crash", "hang"]),
        test_import=IMPORTING.format(imports="import a_package_that_is_gone"),
    )
    (folder / "pytest_fastlayer").mkdir()
    (folder / "pytest_fastlayer" / "__init__.py").write_text(DECOY)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "base")
    write(
        folder,
        kernels=KERNELS.format(cost={"slower": 1.05e-4}, ailment="pass"),
        test_pairs=PAIRS.format(names=["same", "slower", "incorrect", "hang", "missing"]),
        test_import=IMPORTING.format(imports=""),
    )
    git(folder, "rm", "-r", "--quiet", "--force", "pytest_fastlayer")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "head")
    return folder
