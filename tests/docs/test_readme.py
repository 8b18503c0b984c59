"""What the README says is run here: its example, its commands, its figures."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import matplotlib
import pytest

from pytest_fastlayer import baselines
from pytest_fastlayer.records import RunRecord
from pytest_fastlayer.report import figures

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_gates_a_kernel(pytester):
    (example,) = [code for code in blocks("python") if "def test_rmsnorm" in code]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    on_cpu = example.replace('"cuda"', '"cpu"').replace("4096, 8192", "64, 128")
    pytester.makepyfile(test_example=on_cpu)
    lean = ("-p", "no:hypothesispytest", "--assert=plain")  # quicker to start
    pytester.runpytest_subprocess(*lean).assert_outcomes(passed=1)


def test_fast_transformer_example(capsys):
    (example,) = [code for code in blocks("python") if "FastTransformer" in code]
    exec("import torch\nx = torch.randn(1, 128, 128)\n" + example, {"__name__": "example"})
    assert "route:" in capsys.readouterr().out


def test_options_named_are_options_there_are():
    from pytest_fastlayer.options import OPTIONS

    named = set(re.findall(r"--fastlayer-[a-z0-9-]+", README))
    known = {option.flag for option in OPTIONS}
    assert named
    assert named <= known


def test_paths_named_exist():
    for path in re.findall(r"`((?:baselines|tests|fastlayer|pytest_fastlayer)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path


def regeneration() -> list[str]:
    """The arguments of the command that the README gives for its tables and pictures."""
    (line,) = [
        line for block in blocks("console") for line in block.splitlines() if " figures " in line
    ]
    return shlex.split(line)[1:]


@functools.cache
def records() -> dict[Path, RunRecord]:
    named = [ROOT / part for part in regeneration() if part.endswith(".json")]
    return {path: baselines.load(path) for path in named}


@functools.cache
def pictures() -> dict[str, str]:
    return {
        name: svg
        for path, run in records().items()
        for name, svg in figures.pictures(path.stem, run).items()
    }


def test_tables_are_what_the_records_say():
    """The README's command renews them."""
    assert len(re.findall(r"<!-- table:begin", README)) == len(records()) > 0
    assert (
        figures.with_tables(README, {path.name: run for path, run in records().items()}) == README
    )


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs").glob("*.svg")))
def test_pictures_are_what_the_records_say(name):
    """Byte for byte; by its texts where another matplotlib would lay the same figures out."""
    stored = (ROOT / "docs" / name).read_text(encoding="utf-8")
    if f"matplotlib {matplotlib.__version__} " in stored.partition("\n")[0]:
        assert stored == pictures()[name]
    else:
        first, second = (
            re.findall(r"<text[^>]*>([^<]+)<", svg) for svg in (stored, pictures()[name])
        )
        assert [t for t in first if t[0].isalpha()] == [t for t in second if t[0].isalpha()]


def test_pictures_shown_are_the_pictures_there_are():
    shown = set(re.findall(r'src="docs/([^"]+)"', README))
    assert shown == set(pictures()) == {path.name for path in (ROOT / "docs").glob("*.svg")}


def test_the_command_writes_all_of_it():
    command = regeneration()
    assert command[0] == "figures"
    assert command[-4:] == ["--document", "README.md", "--pictures", "docs"]


def test_no_figure_without_a_record():
    """Speedups stand only in generated tables and in the one line that shows the form."""
    prose = re.sub(r"<!-- table:begin.*?table:end -->", "", README, flags=re.DOTALL)
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    assert not re.findall(r"\b\d+(?:\.\d+)?x\b", prose)


def test_exit_codes_are_the_command_s():
    from pytest_fastlayer import cli

    listed = set(re.findall(r"^\| (\d+) \|", README, re.MULTILINE))
    known = set(re.findall(r"^  (\d+) ", cli.EXIT_CODES, re.MULTILINE))
    assert listed == known - {"1"}  # 1 is the check of the README itself


def test_commands_named_are_commands_there_are():
    from pytest_fastlayer import cli

    used = set(re.findall(r"fastlayer-gate ([a-z]+)", "\n".join(blocks("console"))))
    assert {"show", "compare", "explain", "report", "figures"} <= used
    for command in used:
        assert cli.main([command, "--help"]) == 0


def test_runner_section_says_what_the_workflow_asks_for():
    section = README[README.index("## Set up your own runner") : README.index("## FastTransformer")]
    workflow = (ROOT / ".github/workflows/gpu.yml").read_text(encoding="utf-8")
    for part in ("rtx-5080", "pull-request/", "update-baseline", "devices", "contents: read"):
        assert part in section
        assert part in workflow
    for topic in ("driver", "Container or virtual environment", "Labels", "Runner group", "never"):
        assert topic in section
