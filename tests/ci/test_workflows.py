"""The workflows hold to the rules for self-hosted GPUs, and their commands exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_fastlayer.options import OPTIONS

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Tools of this very environment first, wherever pytest was started from.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    # YAML 1.1 takes the key "on" for true.
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {("on" if key is True else key): value for key, value in document.items()}


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def scripts(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


def tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install -e '.[test]' brings it")
    return found


def test_both_workflows_exist():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "gpu.yml"]


def test_actionlint():
    done = subprocess.run(
        # Outside a git checkout actionlint does not look for its configuration.
        [
            tool("actionlint"),
            "-no-color",
            "-config-file=.github/actionlint.yaml",
            *map(str, WORKFLOWS),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_would_notice(tmp_path):
    """The check can fail: an unknown runner label and a wrong expression are found."""
    text = (ROOT / ".github/workflows/gpu.yml").read_text(encoding="utf-8")
    (tmp_path / "bad.yml").write_text(text.replace("steps.timing.outcome", "steps.tming.outcome"))
    done = subprocess.run(
        [tool("actionlint"), str(tmp_path / "bad.yml")], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"tming" in done.stdout


def test_zizmor():
    done = subprocess.run(
        [tool("zizmor"), "--offline", "--quiet", "--persona=pedantic", *map(str, WORKFLOWS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@workflows
def test_actions_are_pinned_to_commits(path):
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    for action, comment in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)


@workflows
def test_least_permission(path):
    assert read(path)["permissions"] == {}
    for job in jobs(path).values():
        assert job["permissions"]["contents"] in ("read", "write")
        assert set(job["permissions"]) <= {"contents", "pull-requests"}


@workflows
def test_every_job_ends_and_keeps_no_credentials(path):
    for job in jobs(path).values():
        assert 0 < job["timeout-minutes"] <= 120
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@workflows
def test_no_expression_inside_a_script(path):
    for script in scripts(path):
        assert "${{" not in script
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@workflows
def test_no_secrets_and_no_privileged_trigger(path):
    text = path.read_text(encoding="utf-8")
    assert "secrets." not in text
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(read(path)["on"])


def test_pull_requests_cannot_start_a_gpu_job():
    triggers = read(ROOT / ".github/workflows/gpu.yml")["on"]
    assert set(triggers) == {"push", "schedule", "workflow_dispatch"}
    assert triggers["push"]["branches"] == ["main", "pull-request/[0-9]+"]


def test_self_hosted_jobs():
    hosted_here = [
        (path.name, name, job)
        for path in WORKFLOWS
        for name, job in jobs(path).items()
        if "self-hosted" in job["runs-on"]
    ]
    ((file, name, job),) = hosted_here
    assert (file, name) == ("gpu.yml", "gate")
    assert job["runs-on"][:3] == ["self-hosted", "linux", "gpu"]
    assert "rtx-5080" in job["strategy"]["matrix"]["device"]
    assert job["permissions"] == {"contents": "read"}
    assert job["concurrency"]["group"] == "gpu-host-${{ matrix.device }}"
    assert job["concurrency"]["cancel-in-progress"] is False


def test_jobs_that_write_are_hosted_and_run_the_default_branch():
    for name, job in jobs(ROOT / ".github/workflows/gpu.yml").items():
        if "write" in job["permissions"].values():
            assert job["runs-on"].startswith("ubuntu-")
            (checkout,) = [s for s in job["steps"] if "checkout" in s.get("uses", "")]
            branch = "needs.repository.outputs.default-branch"
            guarded = f"github.ref_name == {branch} }}}}" in job["if"]
            default = checkout["with"].get("ref", "") == f"${{{{ {branch} }}}}"
            assert guarded or default, name
            assert "repository" in job["needs"]


@workflows
def test_no_fact_that_a_scheduled_event_lacks(path):
    """``github.event.repository`` is not there on a schedule: ``!null`` would let every fork in."""
    assert "github.event.repository" not in path.read_text(encoding="utf-8")


def test_no_fork_starts_a_gpu_job():
    gate = jobs(ROOT / ".github/workflows/gpu.yml")["gate"]
    assert gate["needs"] == "repository"
    # An answer that is missing is no "false".
    assert gate["if"] == "${{ needs.repository.outputs.fork == 'false' }}"
    outputs = jobs(ROOT / ".github/workflows/gpu.yml")["repository"]["outputs"]
    assert outputs == {
        name: f"${{{{ steps.facts.outputs.{name} }}}}" for name in ("fork", "default-branch")
    }


def test_the_readme_says_whose_workflow_a_mirror_branch_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "A mirror branch runs *its own* `gpu.yml`" in readme


@workflows
def test_options_exist(path):
    known = {option.flag for option in OPTIONS}
    used = set(re.findall(r"--fastlayer-[a-z0-9-]+", "\n".join(scripts(path))))
    assert used <= known
    assert "--fastlayer-bench" in used


def test_the_main_job_is_the_strict_one():
    gpu = "\n".join(scripts(ROOT / ".github/workflows/gpu.yml"))
    for option in (
        "--fastlayer-require-baseline",
        "--fastlayer-require-quiet",
        "--fastlayer-base",
        "--fastlayer-trace",
        "--junitxml",
    ):
        assert option in gpu


def test_gpu_steps_in_their_order_and_what_is_kept():
    gate = jobs(ROOT / ".github/workflows/gpu.yml")["gate"]
    names = [step.get("name", "") for step in gate["steps"]]
    order = ["Device", "Install", "Merge base", "Accuracy", "Timing", "Trace", "Step summary"]
    places = [next(i for i, name in enumerate(names) if name.startswith(start)) for start in order]
    assert places == sorted(places)
    upload = gate["steps"][-1]
    assert upload["with"]["path"].split() == [
        "run.json",
        "report.html",
        "accuracy.xml",
        "timing.xml",
        "traces",
    ]
    trace = gate["steps"][places[order.index("Trace")]]
    assert "failure()" in trace["if"]


def test_ci_covers_what_the_project_promises():
    ci = jobs(ROOT / ".github/workflows/ci.yml")
    assert ci["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    script = "\n".join(scripts(ROOT / ".github/workflows/ci.yml"))
    for command in (
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "lint-imports",
        "pytest tests/kernels tests/extreme",
        "python -m fastlayer.kernels.resources",
        "python -m fastlayer.kernels.polynomial_resources",
        "pytest --fastlayer-bench",
    ):
        assert command in script
    for job in ci.values():
        assert job["runs-on"].startswith("ubuntu-")


def test_the_baseline_job_renews_the_readme_by_its_own_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = [line for line in readme.splitlines() if line.startswith("fastlayer-gate figures")]
    lines = "\n".join(scripts(ROOT / ".github/workflows/gpu.yml")).splitlines()
    assert command in [line.strip() for line in lines]


def test_the_hosted_jobs_install_what_they_import():
    """``--no-deps`` leaves torch out; everything else that the reader needs is named."""
    modules = {"filelock", "jinja2", "junit_xml", "matplotlib", "numpy", "pydantic", "scipy"}
    for job, heavy in (("comment", False), ("baseline", True)):
        (script,) = [
            step["run"]
            for step in jobs(ROOT / ".github/workflows/gpu.yml")[job]["steps"]
            if "--no-deps" in step.get("run", "")
        ]
        named = set(re.findall(r"[a-z0-9-]+", script.partition("--no-deps .")[2]))
        absent = ["torch", *sorted(modules - {name.replace("-", "_") for name in named})]
        code = (
            "import sys\n"
            "class Block:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name.partition('.')[0] in {absent!r}:\n"
            "            raise ImportError(name)\n"
            "sys.meta_path.insert(0, Block())\n"
            "import pytest_fastlayer.cli, pytest_fastlayer.gate\n"
            "from pytest_fastlayer.report import junit\n"
        )
        if heavy:
            code += (
                "from pytest_fastlayer import baselines\n"
                "from pytest_fastlayer.report import figures, drawings\n"
                "with baselines.locked('x.json'): pass\n"
            )
        subprocess.run([sys.executable, "-c", code], check=True)


def test_the_hosted_job_runs_the_command_that_the_readme_gives():
    command = "pip install -e '.[test]' && pytest"
    assert any(s.startswith(command) for s in scripts(ROOT / ".github/workflows/ci.yml"))
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
