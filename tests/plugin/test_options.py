"""Bad settings: a usage error that names what was given and what was expected."""

from __future__ import annotations

import hashlib

import pytest
import torch

PASSING = """
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
"""


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--fastlayer-pairs=1", "*at least 2*"),
        ("--fastlayer-seeds=0", "*at least 1*"),
        ("--fastlayer-pairs=many", "*many*"),
        ("--fastlayer-block-ms=-1", "*above 0*"),
        ("--fastlayer-block-ms=inf", "*finite*"),
        ("--fastlayer-settle=nan", "*finite*"),
        ("--fastlayer-alpha=2", "*between 0 and 1*"),
        ("--fastlayer-json=.", "*expected a file, got a folder*"),
        ("--fastlayer-l2=tepid", "*warm*cold*"),
        ("--fastlayer-device=tpu", "*auto*cpu*cuda*"),
    ],
)
def test_bad_flag(project, pytester, flag, expected):
    project(PASSING)
    result = pytester.runpytest_inprocess(flag)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([expected])


def test_bad_ini_value_names_the_option(project, pytester):
    project(PASSING)
    pytester.makeini("[pytest]\nfastlayer_pairs = few")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*fastlayer_pairs*few*"])


def test_command_line_may_tighten_but_not_loosen(project, pytester):
    project(PASSING)
    assert pytester.runpytest_inprocess("--fastlayer-atol=0.001").ret == 0
    result = pytester.runpytest_inprocess("--fastlayer-atol=0.5")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*--fastlayer-atol=0.5 would loosen*"])


def test_unknown_marker_field(project, pytester):
    project("import pytest\n@pytest.mark.tolerance(abs=1)" + PASSING)
    result = pytester.runpytest_inprocess()
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*pytest.mark.tolerance*'abs'*atol, mode, rtol*"])


def test_pinned_file_that_changed_is_refused(project, pytester):
    root = project(PASSING)
    digest = hashlib.sha256((root / "pair.py").read_bytes()).hexdigest()
    pytester.makeini(f"[pytest]\nfastlayer_pins = pair.py {digest}")
    assert pytester.runpytest_inprocess().ret == 0
    with (root / "pair.py").open("a") as file:
        file.write("# changed\n")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*pair.py*"])


def test_malformed_pin(project, pytester):
    project(PASSING)
    pytester.makeini("[pytest]\nfastlayer_pins = pair.py abc")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*64 hex digits*"])


def test_reference_from_another_file(project, bench, record):
    project(
        """
def test_layer_norm(paired):
    module = paired.reference_class(Eager)()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
""",
        mine="from pair import Eager\nclass Mine(Eager):\n    pass\n",
    )
    assert bench("--fastlayer-reference=mine.py:Mine").ret == 0
    stored = record()["cases"]["layer_norm"]["reference_sha256"]
    assert len(stored) == 64


@pytest.mark.parametrize("given", ["mine.py", "absent.py:Mine", "mine.py:Absent"])
def test_bad_reference(project, bench, given):
    project(
        """
def test_layer_norm(paired):
    module = paired.reference_class(Eager)()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
""",
        mine="from pair import Eager\nclass Mine(Eager):\n    pass\n",
    )
    result = bench(f"--fastlayer-reference={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--fastlayer-reference*{given.partition(':')[0]}*"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_where_there_is_none(project, pytester):
    project(PASSING)
    result = pytester.runpytest_inprocess("--fastlayer-device=cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fastlayer-device=cuda*no CUDA device*"])


def test_unwritable_outputs_do_not_cost_the_results(project, bench):
    spoilt = PASSING + "    open('out', 'w').close()  # where a folder is wanted\n"
    project(spoilt)
    result = bench("--fastlayer-json=out/r.json", "--fastlayer-markdown=out/m.md")
    assert result.ret == 1
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*r.json was not written*", "*m.md was not written*"])


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("trace", "test_pair.py"),
        ("trace", "test_pair.py/traces"),
        ("trace", "/proc/fastlayer/traces"),
        ("json", "test_pair.py/r.json"),
        ("markdown", "test_pair.py/m.md"),
        ("html", "/proc/fastlayer/r.html"),
    ],
)
def test_places_that_cannot_be_written_are_refused_at_the_start(project, bench, option, place):
    project(PASSING)
    result = bench(f"--fastlayer-{option}={place}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--fastlayer-{option}=*{place}: files cannot be written there*"])


def test_trying_a_place_leaves_nothing_there(project, bench, pytester):
    project(PASSING)
    assert bench("--fastlayer-html=new/deep/r.html", "--collect-only").ret == 0
    assert not (pytester.path / "new").exists()


def test_help_markers_and_fixtures_explain(pytester):
    text = pytester.runpytest_inprocess("--help").stdout.str()
    assert "--fastlayer-bench" in text
    assert "fastlayer_pairs" in text
    assert "paired_timing(" in pytester.runpytest_inprocess("--markers").stdout.str()
    assert (
        "Gate a (reference, candidate) pair"
        in pytester.runpytest_inprocess("--fixtures").stdout.str()
    )
