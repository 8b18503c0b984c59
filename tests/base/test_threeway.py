"""``--fastlayer-base`` from the command line to the record, in a stranger's repository."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from repository import build, git

OPTIONS = (
    *("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--assert=plain"),
    "--fastlayer-device=cpu",
    "--fastlayer-pairs=24",
    "--fastlayer-settle=0",
    "--fastlayer-block-ms=1",
    "--fastlayer-seeds=2",
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
LIMIT_S = 120


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("threeway") / "repo")


def command(*arguments):
    return [sys.executable, "-m", "pytest", *OPTIONS, *arguments]


def run(folder, *arguments):
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def left_behind(folder):
    return git(folder, "worktree", "list").splitlines()[1:]


@pytest.fixture(scope="module")
def outcome(repository, tmp_path_factory):
    """One run over every case, in a worker; its record, output and exit code."""
    path = tmp_path_factory.mktemp("record") / "run.json"
    done = run(
        repository, "-n1", "-k", "not hang", "--fastlayer-base=HEAD~1", f"--fastlayer-json={path}"
    )
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())["cases"], done


def test_an_identical_base_reads_one(outcome):
    cases, _ = outcome
    base = cases["same"]["base"]
    assert base["status"] == "measured"
    assert cases["same"]["verdict"] == "NO_BASELINE"  # seen beside the base's PASS
    assert base["verdict"] == "PASS"
    timing = base["timing"]
    assert abs(timing["speedup"] - 1) <= timing["noise_floor"]
    assert timing["aa"]["arm"] == "candidate"
    assert abs(timing["aa"]["speedup"] - 1) < 0.01
    for arm in ("head", "base"):
        assert base[arm]["value"] == pytest.approx(10, rel=0.02)
    assert base["accuracy"]["failed"] == 0
    assert base["accuracy"]["rms_vs_float64"]["candidate"] < 1e-6


def test_a_slowed_head_is_slower_than_its_base(outcome, repository):
    cases, done = outcome
    case = cases["slower"]
    assert case["verdict"] == case["base"]["verdict"] == "SLOWER"
    assert case["base"]["timing"]["speedup"] == pytest.approx(1 / 1.05, rel=0.01)
    assert case["base"]["timing"]["ci"][1] < 0.98
    assert len(case["base"]["process_ratios"]) == len(case["base"]["process_controls"]) == 2
    assert case["base"]["commit"] == git(repository, "rev-parse", "HEAD~1")
    assert "SLOWER: slower: the speed is 0.95" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("name", "status", "verdict", "reason"),
    [
        ("incorrect", "incorrect", "INCORRECT", "2 of 128 elements are out of tolerance"),
        ("missing", "missing", None, "it has no such test"),
        ("import", "import_error", None, "No module named 'a_package_that_is_gone'"),
    ],
)
def test_a_base_that_cannot_serve_is_told_and_given_no_speed(
    outcome, name, status, verdict, reason
):
    cases, _ = outcome
    base = cases[name]["base"]
    assert base["status"] == status
    assert reason in base["reason"]
    assert base.get("verdict") == verdict
    assert "timing" not in base
    assert cases[name]["verdict"] == "NO_BASELINE"
    assert f"({status}: " in cases[name]["reason"]
    assert "held against the stored baseline alone" in cases[name]["reason"]


def test_the_table_and_nothing_else_is_left(outcome, repository):
    shown = outcome[1].stdout
    assert "vs base" in shown
    assert re.search(r"0\.9\d\dx \[0\.9\d\d, 0\.9\d\d\] SLOWER", shown)
    assert "no figure of the base for import" in shown
    assert left_behind(repository) == []
    assert git(repository, "status", "--porcelain", "--untracked-files=no") == ""


def arms_in(folder):
    """Processes of arms whose tree lies in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text(errors="replace")
            found += [process.name] * (f"{folder}/" in words and "child.py" in words)
    return found


def test_an_interrupted_run_leaves_neither_worktree_nor_process(repository, tmp_path):
    """Interrupted by ^C while it waits for a base that hangs."""
    process = subprocess.Popen(
        command("-k", "hang", "-v", "--fastlayer-base=HEAD~1"),
        cwd=repository,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "base: accuracy" in line:
                break
        assert len(left_behind(repository)) == 1
        assert len(arms_in(tmp_path)) == 1
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, rest
    assert left_behind(repository) == []
    assert arms_in(tmp_path) == []
    assert not list(tmp_path.glob("fastlayer-*"))


USAGE = pytest.ExitCode.USAGE_ERROR


@pytest.fixture
def usage_error(pytester):
    def start(*arguments):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        assert result.ret == USAGE
        return " ".join(result.errlines)

    return start


def test_an_unknown_revision_is_a_usage_error(pytester, usage_error):
    pytester.makepyfile(test_a="def test_a(paired): pass")
    git(pytester.path, "init", "--quiet")
    said = usage_error("--fastlayer-base=no-such-branch")
    assert "--fastlayer-base=no-such-branch" in said
    assert "has no such revision" in said
    assert "--fastlayer-base=--upload-pack=x" in usage_error("--fastlayer-base=--upload-pack=x")


def test_outside_a_repository_only_a_path_will_do(pytester, usage_error, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(Path(pytester.path).parent))
    said = usage_error("--fastlayer-base=HEAD")
    assert "git sees no repository at" in said
    assert "it said: fatal: not a git repository" in said


def test_without_git_a_revision_is_a_usage_error(usage_error, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "No such file or directory: 'git'" in usage_error("--fastlayer-base=HEAD")


def test_variants_of_one_tree_are_not_held_against_another(usage_error):
    assert "admit first, then compare" in usage_error("--fastlayer-base=.", "--fastlayer-admit")
