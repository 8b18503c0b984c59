"""What people type at pytest every day keeps working, and costs nothing when unused."""

from __future__ import annotations

import subprocess
import sys

import pytest

ONE = """
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import pytest_fastlayer.plugin, sys; "
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)",
        # Neither package knows of the other.
        "import fastlayer, sys; assert not {'triton', 'pytest_fastlayer'} & set(sys.modules)",
        "import pytest_fastlayer, sys; assert not {'torch', 'fastlayer'} & set(sys.modules)",
        "import pytest_fastlayer.cli, sys; assert 'torch' not in sys.modules",
    ],
)
def test_cold_imports(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_plugin_can_be_disabled(pytester):
    pytester.makepyfile("def test_nothing():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "no:fastlayer")
    result.assert_outcomes(passed=1)


def test_collect_only_measures_nothing(project, bench, pytester):
    project(ONE)
    result = bench("--co", "-q")
    assert result.ret == 0
    assert not (pytester.path / "run.json").exists()


def test_exitfirst_stops_at_the_red_case(project, bench):
    wrong = ONE.replace("candidate=fast(module)", "candidate=lambda x: x")
    project(wrong + ONE.replace("layer_norm", "second"))
    bench("-x").assert_outcomes(failed=1)


def test_addopts_from_the_environment(project, pytester, monkeypatch):
    project(ONE)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--fastlayer-seeds=3 -v")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)


def test_odd_names_survive(project, bench, record):
    names = ["a/b", "größe", "x" * 300, "Case", "case", "<b>&amp;", "a|b", "a\\x1b[31m"]
    project(f"""
import pytest
@pytest.mark.parametrize("name", {names!r})
def test_named(paired, name):
    paired.unsupported(name, "reason with <html> & | pipes")
""")
    result = bench()
    result.assert_outcomes(skipped=len(names))
    assert sorted(record()["cases"]) == sorted(names)


def test_record_written_from_another_directory(project, pytester, monkeypatch):
    root = project(ONE)
    elsewhere = pytester.mkdir("elsewhere")
    monkeypatch.chdir(elsewhere)
    pytester.runpytest_inprocess(
        "--rootdir",
        root,
        root / "test_pair.py",
        "--fastlayer-bench",
        "--fastlayer-json=out/r.json",
        "--fastlayer-pairs=6",
        "--fastlayer-settle=0",
        "--fastlayer-block-ms=1",
        "--fastlayer-device=cpu",
    )
    assert (elsewhere / "out" / "r.json").exists()


def test_settings_from_conftest(project, pytester):
    project(
        ONE,
        conftest="""
def pytest_configure(config):
    config.addinivalue_line("markers", "mine: mine")
""",
    )
    pytester.makeini("[pytest]\nfastlayer_seeds = 2\nfastlayer_device = cpu")
    pytester.runpytest_inprocess("--strict-markers").assert_outcomes(passed=1)


def test_quiet_says_little(project, bench):
    project(ONE)
    assert "accuracy, seed" not in bench("-q").stdout.str()
    assert "accuracy, seed" in bench("-v").stdout.str()
