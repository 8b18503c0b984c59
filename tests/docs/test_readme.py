"""What the README says is run here: its example, its commands, its figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BEGIN, END = "<!-- table:begin {} -->", "<!-- table:end -->"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_gates_a_kernel(pytester):
    (example,) = [code for code in blocks("python") if "def test_rmsnorm" in code]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    on_cpu = example.replace('"cuda"', '"cpu"').replace("4096, 8192", "64, 128")
    pytester.makepyfile(test_example=on_cpu)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_fast_transformer_example():
    (example,) = [code for code in blocks("python") if "FastTransformer" in code]
    code = "import torch\nx = torch.randn(1, 128, 128)\n" + example
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "route:" in done.stdout


def test_options_named_are_options_there_are():
    from pytest_fastlayer.options import OPTIONS

    named = set(re.findall(r"--fastlayer-[a-z0-9-]+", README))
    known = {option.flag for option in OPTIONS}
    assert named
    assert named <= known


def test_paths_named_exist():
    for path in re.findall(r"`((?:baselines|tests|fastlayer|pytest_fastlayer)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", re.findall(r"<!-- table:begin (\S+) -->", README))
def test_tables_are_generated(name):
    """Regenerate one with ``fastlayer-gate show baselines/NAME --format markdown``."""
    command = ["show", f"baselines/{name}", "--format", "markdown"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_fastlayer.cli", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    start = README.index(BEGIN.format(name)) + len(BEGIN.format(name))
    assert README[start : README.index(END, start)].strip() == done.stdout.strip()


def test_no_figure_without_a_record():
    """Speedups stand only in generated tables and in the one line that shows the form."""
    prose = re.sub(r"<!-- table:begin.*?table:end -->", "", README, flags=re.DOTALL)
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    assert not re.findall(r"\b\d+(?:\.\d+)?x\b", prose)
