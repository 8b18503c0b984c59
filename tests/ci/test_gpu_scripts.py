"""The shell of gpu.yml, run here with stand-ins for ``gh`` and ``nvidia-smi``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from makers import case, obeyed, run
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
if "--jq" in sys.argv and "--paginate" not in sys.argv:
    print(os.environ.get("FACTS", ""))
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
        programs = {"gh": STAND_IN, "nvidia-smi": STAND_IN, "pytest": STAND_IN}
        for name, text in (programs | {"fastlayer-gate": GATE}).items():
            path = folder / "bin" / name
            path.write_text(text.format(python=sys.executable, root=str(ROOT)))
            path.chmod(0o755)

    def __call__(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LOG": str(self.folder / "log"),
            "HOME": str(self.folder),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_REPOSITORY": "owner/name",
            "GITHUB_RUN_ID": "77",
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_SHA": "f" * 40,
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

    def artifact(self, record: RunRecord, device: str = "rtx-5080") -> None:
        """As the baseline job finds it, and as the comment job does."""
        save(record, self.folder / "artifact" / "run.json")
        save(record, self.folder / "artifacts" / f"gpu-{device}" / "run.json")

    def git(self, *commands: str) -> str:
        """Runs git commands in the folder; returns what the last one printed."""
        name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        said = ""
        for command in commands:
            said = subprocess.run(
                ["git", *name, *command.split()],
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
        return said


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


# the merge base, and what the timing gate is told of it


def merge_base(shell: Shell, **variables: str) -> str:
    given = {"DEFAULT_BRANCH": "main", "BEFORE": "", "GITHUB_REF_NAME": "main"}
    done = shell(script("gate", "Merge base"), **(given | variables))
    assert done.returncode == 0, done.stderr
    return (shell.folder / "output").read_text().strip().removeprefix("revision=")


def test_base_of_a_mirror_branch_is_where_it_left_the_default_branch(shell):
    shell.git("init -q -b main", "commit -q --allow-empty -m one")
    left = shell.git("rev-parse HEAD")
    shell.git("switch -q -c pull-request/7", "commit -q --allow-empty -m theirs", "switch -q main")
    shell.git("commit -q --allow-empty -m ours", "update-ref refs/remotes/origin/main main")
    shell.git("switch -q pull-request/7")
    assert merge_base(shell, GITHUB_REF_NAME="pull-request/7") == left


def test_base_of_the_default_branch_is_its_last_state(shell):
    shell.git("init -q -b main", "commit -q --allow-empty -m one")
    before = shell.git("rev-parse HEAD")
    shell.git("commit -q --allow-empty -m two", "update-ref refs/remotes/origin/main main")
    assert merge_base(shell) == before


def test_base_of_a_push_of_several_commits_is_what_was_there_before(shell):
    shell.git("init -q -b main", "commit -q --allow-empty -m one")
    before = shell.git("rev-parse HEAD")
    shell.git("commit -q --allow-empty -m two", "commit -q --allow-empty -m three")
    shell.git("update-ref refs/remotes/origin/main main")
    assert merge_base(shell, BEFORE=before) == before
    # A mirror branch that main already holds has a before of its own, which says nothing.
    last = shell.git("rev-parse HEAD^1")
    (shell.folder / "output").unlink()
    assert merge_base(shell, BEFORE=before, GITHUB_REF_NAME="pull-request/7") == last


@pytest.mark.parametrize("kind", ["replaced", "itself", "unknown", "zeros", "none", "option"])
def test_a_state_before_that_is_no_ancestor_is_no_base(shell, kind):
    shell.git("init -q -b main", "commit -q --allow-empty -m one", "switch -q -c old")
    replaced = shell.git("commit -q --allow-empty -m gone", "rev-parse HEAD")
    shell.git("switch -q main", "commit -q --allow-empty -m two")
    last = shell.git("rev-parse HEAD")
    head = shell.git("commit -q --allow-empty -m three", "rev-parse HEAD")
    shell.git("update-ref refs/remotes/origin/main main")
    before = {"unknown": "a" * 40, "zeros": "0" * 40, "none": "", "option": "--all"}
    given = before | {"replaced": replaced, "itself": head}
    assert merge_base(shell, BEFORE=given[kind]) == last


@pytest.mark.parametrize("branch", ["", "gone", "unrelated"])
def test_no_merge_base_is_said_clearly(shell, branch):
    shell.git("init -q -b main", "commit -q --allow-empty -m one", "checkout -q --orphan other")
    shell.git("commit -q --allow-empty -m two", "update-ref refs/remotes/origin/unrelated main")
    variables = {"DEFAULT_BRANCH": branch, "BEFORE": "", "GITHUB_REF_NAME": "main"}
    done = shell(script("gate", "Merge base"), **variables)
    assert done.returncode == 1
    assert (
        f"::error title=no merge base::HEAD shares no commit with 'origin/{branch}'" in done.stdout
    )
    assert not (shell.folder / "output").exists()


@pytest.mark.parametrize("fork", ["true", "false"])
def test_the_repository_is_asked_for(shell, fork):
    facts = f"fork={fork}\ndefault-branch=main"
    done = shell(script("repository", "Ask"), FACTS=facts)
    assert done.returncode == 0, done.stderr
    assert (shell.folder / "output").read_text() == f"{facts}\n"
    ((program, arguments, _),) = shell.calls()
    assert (program, arguments[:2]) == ("gh", ["api", "repos/owner/name"])


@pytest.mark.parametrize(
    "facts",
    [
        "",
        "fork=null\ndefault-branch=main",
        "fork=false\ndefault-branch=",
        "fork=false\ndefault-branch=a\nb=c",
    ],
)
def test_a_repository_without_facts_is_refused(shell, facts):
    done = shell(script("repository", "Ask"), FACTS=facts)
    assert done.returncode == 1
    assert "::error title=unknown repository::" in done.stdout
    assert not (shell.folder / "output").exists()


def test_a_first_commit_has_no_base(shell):
    shell.git("init -q -b main", "commit -q --allow-empty -m one")
    shell.git("update-ref refs/remotes/origin/main main")
    assert merge_base(shell) == ""


@pytest.mark.parametrize("base", ["", "a" * 40])
def test_timing_gate_is_given_the_base_where_there_is_one(shell, base):
    done = shell(script("gate", "Timing"), BASE=base)
    assert done.returncode == 0, done.stderr
    ((program, arguments, _),) = shell.calls()
    assert program == "pytest"
    assert [a for a in arguments if "base=" in a] == ([f"--fastlayer-base={base}"] if base else [])
    assert "" not in arguments


# the comment


def comment(shell: Shell, **variables: str) -> subprocess.CompletedProcess[str]:
    return shell(
        script("comment", "Validate"), **({"GITHUB_REF_NAME": "pull-request/12"} | variables)
    )


def test_first_comment_is_posted(shell):
    shell.artifact(run())
    done = comment(shell)
    assert done.returncode == 0, done.stderr
    _, arguments, files = shell.calls()[-1]
    assert arguments[:4] == ["api", "--method", "POST", "repos/owner/name/issues/12/comments"]
    body = files["comment.md"]
    assert body.startswith("<!-- fastlayer-gate -->\n### fastlayer")
    assert "(https://github.example/owner/name/actions/runs/77), commit " + "f" * 40 in body


def test_next_comment_edits_the_first(shell):
    shell.artifact(run())
    done = comment(shell, COMMENTS="99\n5")
    assert done.returncode == 0, done.stderr
    arguments = shell.calls()[-1][1]
    assert arguments[:4] == ["api", "--method", "PATCH", "repos/owner/name/issues/comments/99"]


def test_several_devices_share_one_comment(shell):
    shell.artifact(run())
    other = run(device=run().device.model_copy(update={"name": "NVIDIA B200"}))
    shell.artifact(other, device="b200")
    assert comment(shell).returncode == 0
    posted = [call for call in shell.calls() if "POST" in call[1]]
    ((_, _, files),) = posted
    assert files["comment.md"].count("### fastlayer: NVIDIA") == 2


def test_a_gate_without_a_record_says_so(shell):
    assert comment(shell).returncode == 0
    assert "did not get as far as a record" in shell.calls()[-1][2]["comment.md"]


def test_a_long_table_is_cut_to_what_a_comment_holds(shell):
    many = {f"case {i}": case(Verdict.SLOWER, label="é" * 60, reason="x" * 300) for i in range(300)}
    shell.artifact(run(many))
    assert comment(shell).returncode == 0
    body = shell.calls()[-1][2]["comment.md"]
    assert 55_000 < len(body.encode()) < 65_536
    assert "Run, artefacts" in body


def test_hostile_names_stay_text_in_the_comment(shell):
    shell.artifact(run({"<img src=x>|`@all`\n::error::x": case()}))
    done = comment(shell)
    assert done.returncode == 0, done.stderr
    body = shell.calls()[-1][2]["comment.md"]
    assert "<img" not in body
    assert "@all" not in body


@pytest.mark.parametrize("branch", ["main", "pull-request/1;id", "pull-request/", "pull-request/x"])
def test_other_branches_comment_nowhere(shell, branch):
    shell.artifact(run())
    assert comment(shell, GITHUB_REF_NAME=branch).returncode == 1
    assert shell.calls() == []


def test_invalid_record_is_not_posted_but_told(shell):
    """It replaces what an earlier, green run said, and spoils no other device's table."""
    shell.artifact(run())
    shell.artifact(run(), device="b200")
    path = shell.folder / "artifacts" / "gpu-rtx-5080" / "run.json"
    path.write_text('{"schema_version": 1, "evil ##[error]": "<img> @all"}')
    done = comment(shell, COMMENTS="99")
    assert done.returncode == 1
    assert "::error title=no valid record::" in done.stdout
    assert not obeyed(done.stderr)
    _, arguments, files = shell.calls()[-1]
    assert arguments[:4] == ["api", "--method", "PATCH", "repos/owner/name/issues/comments/99"]
    body = files["comment.md"]
    assert body.startswith("<!-- fastlayer-gate -->\n**gpu-rtx-5080: no valid record.**")
    assert body.count("### fastlayer: NVIDIA") == 1
    assert "evil" not in body
    assert "Run, artefacts" in body


def test_a_device_without_a_record_is_told_beside_the_others(shell):
    shell.artifact(run())
    (shell.folder / "artifacts" / "gpu-b200<img>`@all`").mkdir()
    assert comment(shell).returncode == 0
    body = shell.calls()[-1][2]["comment.md"]
    assert "**gpu-b200-img---all-: no record.** The gate did not get that far.\n\n###" in body
    assert "### fastlayer: NVIDIA" in body


# the baseline's pull request


TABLE = "<!-- table:begin nvidia-h200.json -->\n<!-- table:end -->\n"


@pytest.fixture
def repository(shell):
    """A checkout with stored baselines and what the README shows, and the run of the artefact."""
    save(run(), shell.folder / "baselines" / "nvidia-h200.json")
    published = run({}, device=run().device.model_copy(update={"name": "NVIDIA GeForce RTX 5080"}))
    save(published, shell.folder / "baselines" / "nvidia-geforce-rtx-5080.json")
    (shell.folder / "README.md").write_text(TABLE)
    shell.git("init -q -b main", "add baselines README.md", "commit -q -m start")
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
    branch, *contents, opened = repository.calls()
    assert "ref=refs/heads/baseline/rtx-5080-77" in branch[1]
    written = {call[1][3].removeprefix("repos/owner/name/contents/"): call[1] for call in contents}
    assert set(written) == {
        "README.md",
        "baselines/nvidia-h200.json",
        "docs/nvidia-h200-budget.svg",
        "docs/nvidia-h200-speedup.svg",
    }
    replaced = {name for name, call in written.items() if any(a.startswith("sha=") for a in call)}
    assert replaced == {"README.md", "baselines/nvidia-h200.json"}
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
