"""The shell of gpu.yml, run here with stand-ins for ``gh`` and ``nvidia-smi``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from makers import case, run
from test_workflows import ROOT, jobs

from pytest_fastlayer.baselines import load, save
from pytest_fastlayer.records import RunRecord, Verdict

GPU = ROOT / ".github/workflows/gpu.yml"
#: Writes its arguments to a log, one call a line; answers what the variable of its first
#: arguments holds.
STAND_IN = """#!{python}
import json, os, pathlib, sys
files = [a.partition("=@")[2] for a in sys.argv if "=@" in a]
texts = {{name: pathlib.Path(name).read_text() for name in files}}
with open(os.environ["LOG"], "a") as log:
    print(json.dumps([pathlib.Path(sys.argv[0]).name, sys.argv[1:], texts]), file=log)
if "--paginate" in sys.argv:
    print(os.environ.get("COMMENTS", ""))
if any("compute-apps" in a for a in sys.argv):
    print(os.environ.get("OTHERS", ""))
"""
GATE = """#!{python}
import sys
sys.path.insert(0, {root!r})
from pytest_fastlayer.cli import main
sys.exit(main())
"""


def script(job: str, step: str) -> str:
    (found,) = [s["run"] for s in jobs(GPU)[job]["steps"] if s.get("name", "").startswith(step)]
    return found


class Shell:
    """A folder with stand-ins on PATH, in which a step's script is run as the runner would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("gh", STAND_IN), ("nvidia-smi", STAND_IN), ("fastlayer-gate", GATE)):
            path = folder / "bin" / name
            path.write_text(text.format(python=sys.executable, root=str(ROOT)))
            path.chmod(0o755)

    def __call__(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LOG": str(self.folder / "log"),
            "HOME": str(self.folder),
            "GITHUB_REPOSITORY": "owner/name",
            "GITHUB_RUN_ID": "77",
            "DEVICE": "rtx-5080",
        }
        # What GitHub's runner uses for `shell: bash` steps on Linux.
        return subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def artifact(self, record: RunRecord) -> None:
        save(record, self.folder / "artifact" / "run.json")


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def test_idle_device_is_taken(shell):
    done = shell(script("gate", "Device"))
    assert done.returncode == 0, done.stderr


def test_busy_device_is_refused(shell):
    done = shell(script("gate", "Device"), OTHERS="4711, python")
    assert done.returncode == 1
    assert "another process uses the device: 4711, python" in done.stdout


def test_first_comment_is_posted(shell):
    shell.artifact(run())
    done = shell(script("comment", "Validate"), GITHUB_REF_NAME="pull-request/12")
    assert done.returncode == 0, done.stderr
    _, arguments, files = shell.calls()[-1]
    assert arguments[:4] == ["api", "--method", "POST", "repos/owner/name/issues/12/comments"]
    assert files["comment.md"].startswith("<!-- fastlayer-gate rtx-5080 -->\n### fastlayer")


def test_next_comment_edits_the_first(shell):
    shell.artifact(run())
    done = shell(script("comment", "Validate"), GITHUB_REF_NAME="pull-request/12", COMMENTS="99\n5")
    assert done.returncode == 0, done.stderr
    arguments = shell.calls()[-1][1]
    assert arguments[:4] == ["api", "--method", "PATCH", "repos/owner/name/issues/comments/99"]


@pytest.mark.parametrize("branch", ["main", "pull-request/1;id", "pull-request/", "pull-request/x"])
def test_other_branches_comment_nowhere(shell, branch):
    shell.artifact(run())
    assert shell(script("comment", "Validate"), GITHUB_REF_NAME=branch).returncode == 1
    assert shell.calls() == []


def test_invalid_record_is_not_posted(shell):
    (shell.folder / "artifact").mkdir()
    (shell.folder / "artifact" / "run.json").write_text('{"schema_version": 1, "evil": true}')
    done = shell(script("comment", "Validate"), GITHUB_REF_NAME="pull-request/12")
    assert done.returncode == 2
    assert shell.calls() == []


@pytest.fixture
def repository(shell):
    """A checkout with a stored baseline, and the run of the artefact."""
    save(run(), shell.folder / "baselines" / "nvidia-h200.json")
    commands = (
        "git init -q . && git add baselines && "
        "git -c user.name=t -c user.email=t@example.org commit -q -m start"
    )
    assert shell(commands).returncode == 0
    return shell


def update(shell: Shell, accept: str = "") -> list[subprocess.CompletedProcess[str]]:
    merged = shell(script("baseline", "Merge"), ACCEPT=accept)
    if merged.returncode:
        return [merged]
    opened = shell(script("baseline", "Open"), GITHUB_SHA="f" * 40, GITHUB_REF_NAME="main")
    return [merged, opened]


def test_baseline_pull_request(repository):
    repository.artifact(run({"a": case(speedup=5), "b": case(Verdict.SLOWER)}))
    results = update(repository, accept="b a")
    assert [done.returncode for done in results] == [0, 0], results[-1].stderr
    branch, contents, opened = repository.calls()
    assert "ref=refs/heads/baseline/rtx-5080-77" in branch[1]
    assert "repos/owner/name/contents/baselines/nvidia-h200.json" in contents[1]
    assert any(argument.startswith("sha=") for argument in contents[1])
    assert opened[1][:2] == ["pr", "create"]
    assert set(load(repository.folder / "baselines/nvidia-h200.json").cases) == {"a", "b"}


def test_baseline_of_a_new_device_has_no_previous_blob(repository):
    save(run(), repository.folder / "baselines" / "nvidia-b200.json")
    opened = repository(script("baseline", "Open"), GITHUB_SHA="f" * 40, GITHUB_REF_NAME="main")
    assert opened.returncode == 0, opened.stderr
    contents = repository.calls()[1]
    assert "repos/owner/name/contents/baselines/nvidia-b200.json" in contents[1]
    assert not any(argument.startswith("sha=") for argument in contents[1])


def test_red_run_opens_nothing(repository):
    repository.artifact(run({"a": case(Verdict.SLOWER), "b": case(Verdict.SLOWER)}))
    (merged,) = update(repository, accept="a")
    assert merged.returncode == 10
    assert "refused b" in merged.stderr
    assert repository.calls() == []


def test_unchanged_baseline_opens_nothing(repository):
    opened = repository(script("baseline", "Open"), GITHUB_REF_NAME="main")
    assert opened.returncode == 0
    assert "nothing to open" in opened.stdout
    assert repository.calls() == []
