"""What can be known before measuring is refused before the first forward."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from pytest_fastlayer import baselines, environment
from pytest_fastlayer.options import Settings
from pytest_fastlayer.preflight import PreflightError, check_baseline, check_outputs
from pytest_fastlayer.records import RunRecord
from pytest_fastlayer.stored import Stored

#: Leaves a file when a forward runs, which must not happen.
LOUD = """
def test_layer_norm(paired):
    module = Eager()
    def candidate(x):
        open("ran", "w").close()
        return fast(module)(x)
    paired("layer_norm", reference=module, candidate=candidate, inputs=inputs)
"""
USAGE = pytest.ExitCode.USAGE_ERROR


@pytest.fixture
def refused(project, bench, pytester):
    """What is said by a run that ends before it measured anything."""
    project(LOUD)

    def start(*arguments: str) -> str:
        result = bench(*arguments)
        assert result.ret == USAGE
        assert not (pytester.path / "ran").exists()
        return " ".join(result.errlines)

    return start


def record(**changes: object) -> RunRecord:
    device = environment.device_record("cpu")
    found = RunRecord(created="", device=device, software=environment.software_record())
    return found.model_copy(update=changes)


def other_device() -> RunRecord:
    return record(device=environment.device_record("cpu").model_copy(update={"name": "PDP-11"}))


def test_a_folder_without_this_device_s_file(refused, pytester):
    baselines.save(other_device(), pytester.path / "base" / "pdp-11.json")
    said = refused("--fastlayer-baseline=base")
    own = environment.device_record("cpu").slug
    assert f"{own}.json does not exist (there are pdp-11.json)" in said
    assert "--fastlayer-baseline=" in said
    assert "create it with --fastlayer-update-baseline" in said


def test_an_empty_folder_under_workers(project, bench, pytester):
    pytest.importorskip("xdist")
    project(LOUD)
    (pytester.path / "base").mkdir()
    result = bench("-n2", "--fastlayer-baseline=base")
    assert result.ret == USAGE
    assert "does not exist; give a record or a folder" in " ".join(result.errlines)


@pytest.mark.parametrize("given", ["base.json", "base"])
def test_another_device_s_file(refused, pytester, given):
    own = environment.device_record("cpu").slug
    path = pytester.path / (given if given.endswith(".json") else f"base/{own}.json")
    baselines.save(other_device(), path)
    said = refused(f"--fastlayer-baseline={given}")
    assert "was measured on PDP-11 (" in said


@pytest.mark.parametrize("content", ["{", '{"schema_version": 999}', '{"name": "another tool"}'])
@pytest.mark.parametrize("flags", [("--fastlayer-baseline=base",), (), ("--fastlayer-admit",)])
def test_a_file_that_cannot_be_read(refused, pytester, content, flags):
    folder = pytester.mkdir("base" if "--fastlayer-baseline=base" in flags else "baselines")
    path = folder / f"{environment.device_record('cpu').slug}.json"
    path.write_text(content)
    said = refused(*flags)
    assert "--fastlayer-baseline: " in said
    assert path.name in said
    assert path.read_text() == content


def test_a_required_baseline_that_is_not_there(refused):
    said = refused("--fastlayer-require-baseline")
    assert "--fastlayer-require-baseline: " in said
    assert "so every case would fail" in said


def test_an_update_of_another_device_s_file(refused, pytester):
    baselines.save(other_device(), pytester.path / "base.json")
    said = refused("--fastlayer-baseline=base.json", "--fastlayer-update-baseline")
    assert "was measured on PDP-11" in said


@pytest.mark.parametrize("place", ["test_pair.py/base", "/proc/fastlayer", "/proc/fastlayer.json"])
def test_a_baseline_that_cannot_be_written(refused, place):
    said = refused("--fastlayer-update-baseline", f"--fastlayer-baseline={place}")
    assert "--fastlayer-update-baseline, --fastlayer-baseline=" in said
    assert "files cannot be written there" in said


@pytest.mark.parametrize("option", ["json", "markdown", "html", "trace", "baseline"])
@pytest.mark.parametrize("place", ["ring", "ring/a.json", "x" * 300, f"new/{'x' * 300}/a.json"])
def test_a_name_that_the_system_cannot_look_up(pytester, option, place):
    (pytester.path / "ring").symlink_to("ring")
    flag = f"--fastlayer-{option}={pytester.path / place}"
    settings = Settings(**{option: pytester.path / place}, baseline_given=option == "baseline")
    check = partial(check_baseline, stored=Stored(settings))
    check = check if option == "baseline" else check_outputs
    with pytest.raises(PreflightError, match="; give another name") as said:
        check(settings)
    assert str(said.value).startswith(f"{flag}: ")
    assert sorted(one.name for one in pytester.path.iterdir()) == ["ring"]


def test_a_name_that_is_too_long_is_a_usage_error(refused):
    assert "File name too long" in refused(f"--fastlayer-json={'x' * 300}")


def test_a_dangling_link_is_a_file_to_be(tmp_path):
    (tmp_path / "link.json").symlink_to("run.json")
    check_outputs(Settings(json=tmp_path / "link.json"))


def test_two_outputs_in_one_file(refused):
    said = refused("--fastlayer-html=run.json")
    assert "--fastlayer-json writes to the same file" in said


def test_a_report_that_lacks_what_it_needs(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'pytest-fastlayer[report]'" in refused("--fastlayer-html=r.html")


def test_other_threads_are_told_by_the_test_before_it_measures(project, bench, pytester):
    """A session's start cannot know how many threads a test will use; its first case can."""
    threads = environment.device_record("cpu").multiprocessors + 1
    device = environment.device_record("cpu").model_copy(update={"multiprocessors": threads})
    baselines.save(record(device=device), pytester.path / "base.json")
    project(LOUD)
    result = bench("--fastlayer-baseline=base.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"*was measured on *({threads} threads*this run is on *({threads - 1} threads*"]
    )
    assert not (pytester.path / "ran").exists()


def test_a_baseline_that_only_the_workers_miss(project, bench, pytester):
    """It went after the session began: every test says so at once."""
    pytest.importorskip("xdist")
    project(
        LOUD,
        conftest="""
import shutil
def pytest_collection_finish(session):
    if hasattr(session.config, "workerinput"):
        shutil.rmtree("base", ignore_errors=True)
""",
    )
    path = pytester.path / "base" / f"{environment.device_record('cpu').slug}.json"
    baselines.save(record(), path)
    result = bench("-n1", "--fastlayer-baseline=base")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*BaselineNotFoundError*base*does not exist*"])
    assert not (pytester.path / "ran").exists()


@pytest.mark.parametrize(
    ("body", "flags", "said"),
    [
        ("", ("--fastlayer-rival=other",), "--fastlayer-rival=other: layer_norm offers again"),
        ("", ("--fastlayer-atol=1",), "--fastlayer-atol=1 would loosen"),
        (", workload={'x': DEEP}", (), "the record of 'layer_norm'"),
    ],
)
def test_what_a_pair_shows_by_itself(project, bench, pytester, body, flags, said):
    deep = "DEEP = 1\nfor _ in range(80):\n    DEEP = [DEEP]\n"
    project(deep + LOUD.replace("inputs=inputs", f"inputs=inputs, rivals={{'again': Eager}}{body}"))
    result = bench(*flags)
    result.assert_outcomes(failed=1)
    assert said in result.stdout.str()
    assert not (pytester.path / "ran").exists()


def test_a_name_that_is_taken(project, bench, record):
    again = LOUD.replace("test_layer_norm", "test_again").replace("open(", "raise SystemExit(")
    project(LOUD + again)
    result = bench()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*'layer_norm' was measured by*test_layer_norm and again by*"])
    assert record()["cases"]["layer_norm"]["verdict"] == "NO_BASELINE"


def test_each_file_is_read_once(tmp_path):
    stored = Stored(Settings(baseline=tmp_path / "base.json", baseline_given=True))
    device = environment.device_record("cpu")
    baselines.save(record(), tmp_path / "base.json")
    first = stored.of(device)
    (tmp_path / "base.json").unlink()
    assert first is not None
    assert stored.of(device) is first


def test_a_cpu_file_serves_a_run_that_could_also_use_a_gpu(tmp_path):
    """Which device the pairs use is not known when the session starts."""
    cpu = environment.device_record("cpu")
    gpu = cpu.model_copy(update={"type": "cuda", "name": "NVIDIA H200"})
    stored = Stored(Settings(baseline=tmp_path, baseline_given=True))
    with pytest.raises(baselines.BaselineNotFoundError, match=r"nvidia-h200\.json does not exist"):
        stored.check([gpu, cpu])
    baselines.save(record(), tmp_path / f"{cpu.slug}.json")
    Stored(Settings(baseline=tmp_path, baseline_given=True)).check([gpu, cpu])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_possible_devices_of_a_machine_without_a_gpu():
    assert [one.type for one in environment.possible_devices("auto")] == ["cpu"]


def test_collecting_asks_for_no_device(project, bench, pytester):
    project(LOUD)
    pytester.mkdir("base")
    assert bench("--fastlayer-baseline=base", "--collect-only").ret == 0
