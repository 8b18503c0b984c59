"""What may not touch a baseline: a run that is red anywhere, and a run that is not the whole."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_fastlayer import gate
from pytest_fastlayer.records import Verdict
from pytest_fastlayer.selection import Selection
from pytest_fastlayer.termination import Termination

CASE = """
def test_{0}(paired):
    module = Eager()
    paired("{0}", reference=module, candidate=fast(module), inputs=inputs)
"""
ONE, TWO = CASE.format("one"), CASE.format("two")
UPDATE = "--fastlayer-update-baseline"


@pytest.fixture
def update(bench, pytester) -> Callable[..., pytest.RunResult]:
    return lambda *more: bench(UPDATE, f"--fastlayer-baseline={pytester.path / 'base'}", *more)


@pytest.fixture
def stored(pytester) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        files = list((pytester.path / "base").glob("*.json"))
        return json.loads(files[0].read_text())["cases"] if files else {}

    return read


# -- a red run ----------------------------------------------------------------------------------

TEARDOWN = """
def test_one(paired, reference):
    import torch
    module = Eager()
    reference(module)
    paired("one", reference=Eager(), candidate=fast(module), inputs=inputs)
    with torch.no_grad():
        module.norm.weight.zero_()
"""


@pytest.mark.parametrize(
    ("body", "workers"),
    [
        (ONE + "    assert False\n", ()),
        (ONE + "    assert False\n", ("-n1",)),
        (TEARDOWN, ()),
        (TWO + "\ndef test_one(paired):\n    assert False\n", ()),
    ],
    ids=["call", "worker", "teardown", "another"],
)
def test_a_failed_test_blocks_the_update_and_is_named(project, update, stored, body, workers):
    if workers:
        pytest.importorskip("xdist")
    project(body)
    result = update(*workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*baseline was not updated*failed: test_pair.py::test_one*"])
    assert not stored()


@pytest.mark.parametrize("code", [0, 1, 7])
def test_a_run_that_was_ended_blocks_the_update(project, update, stored, code):
    project(ONE + f"\ndef test_two(paired):\n    import pytest\n    pytest.exit('bye', {code})\n")
    result = update()
    assert result.ret == (code or pytest.ExitCode.TESTS_FAILED)
    result.stdout.fnmatch_lines(["*not updated*not run to the end: test_pair.py::test_two*"])
    assert not stored()


def test_another_exit_status_blocks_the_update(project, update, stored):
    project(
        ONE,
        conftest="""
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    yield
    raise session.Failed("as a coverage threshold does")
""",
    )
    result = update()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*not updated: pytest ends with exit status 1;*"])
    assert not stored()


def test_a_run_that_ends_early_without_a_failure_is_not_green(project, bench):
    project(ONE + "\ndef test_two(paired):\n    import pytest\n    pytest.exit('bye', 0)\n")
    result = bench()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the run ended before test_pair.py::test_two came to an end*"])


def test_tampering_found_last_is_in_the_record(project, bench, record, monkeypatch):
    monkeypatch.setattr(gate, "MAX_EXTENSIONS", gate.MAX_EXTENSIONS)  # put back afterwards
    project("""
def tampering():
    from pytest_fastlayer import gate
    gate.MAX_EXTENSIONS = 9
    return fast(Eager())

def test_one(paired):
    module = Eager()
    paired("one", reference=module, candidate=fast(module), inputs=inputs,
           rivals={"odd": tampering})
""")
    assert bench("--fastlayer-rival=odd").ret == pytest.ExitCode.TESTS_FAILED
    case = record()["cases"]["one"]
    assert case["verdict"] == Verdict.DISHONEST
    assert "gate.MAX_EXTENSIONS replaced" in case["reason"]
    assert "timing" not in case
    assert not case["rivals"]
    assert [probe["name"] for probe in case["probes"] if not probe["passed"]] == [
        "state_at_the_end"
    ]


# -- a run that is not the whole ----------------------------------------------------------------


@pytest.fixture
def both(project, update, stored, pytester) -> None:
    """Two stored cases, of two files."""
    pytester.makeini("[pytest]\npythonpath = .\n")
    project(ONE)
    (pytester.path / "sub").mkdir()
    (pytester.path / "sub" / "test_two.py").write_text("from pair import *\n" + TWO)
    assert update().ret == 0
    assert stored().keys() == {"one", "two"}


def _prepend(path: Path, text: str) -> None:
    path.write_text(text + path.read_text())


WAYS: dict[str, str] = {
    "deselected": """
def pytest_collection_modifyitems(config, items):
    gone = [item for item in items if "two" in item.name]
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=gone)
""",
    "silently": """
def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if "two" not in item.name]
""",
    "ignored": "collect_ignore_glob = ['sub/*']\n",
    "skipped": """
def pytest_runtest_setup(item):
    if "two" in item.name:
        import pytest
        pytest.skip("no such card here")
""",
}


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_conftest_leaves_out_is_kept(update, stored, bench, pytester, way):
    _prepend(pytester.path / "conftest.py", WAYS[way])
    if way == "silently":  # nor is such a case called unused
        assert bench(f"--fastlayer-baseline={pytester.path / 'base'}").ret == 0
    result = update()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 kept: not in this run: two;*--complete*"])
    assert stored().keys() == {"one", "two"}
    assert "kept_from" in stored()["two"]
    assert "kept_from" not in stored()["one"]


@pytest.mark.usefixtures("both")
def test_what_an_option_leaves_out_is_kept(update, stored):
    for flags in (("--ignore-glob=*/sub/*",), ("-k", "one"), ("test_pair.py",)):
        assert update(*flags).ret == 0
        assert stored().keys() == {"one", "two"}


@pytest.mark.usefixtures("both")
def test_what_lies_outside_the_folder_is_kept(update, stored, pytester, monkeypatch):
    monkeypatch.chdir(pytester.path / "sub")
    result = update()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 kept: not in this run: one;*"])
    assert stored().keys() == {"one", "two"}


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    "body",
    ["import pytest\npytest.skip('not here', allow_module_level=True)\n", None],
    ids=["skipped", "gone"],
)
def test_a_file_that_was_not_collected_proves_nothing(update, stored, pytester, body):
    path = pytester.path / "sub" / "test_two.py"
    path.unlink() if body is None else path.write_text(body)
    assert update().ret == 0
    assert stored().keys() == {"one", "two"}


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "worker"])
def test_a_test_that_its_file_no_longer_has_is_removed(update, stored, pytester, workers):
    if workers:
        pytest.importorskip("xdist")
        _prepend(pytester.path / "conftest.py", "import torch\ntorch.set_num_threads(1)\n")
    (pytester.path / "sub" / "test_two.py").write_text("def test_else():\n    pass\n")
    result = update(*workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 unused*unused: two*"])
    assert stored().keys() == {"one"}


def test_what_is_certain_to_be_gone():
    seen = Selection(files={"a.py", "b.py"}, broken={"b.py"}, collected={"a.py::test_x"})
    assert seen.lacks("a.py::test_y")
    assert seen.lacks("a.py::test_y@group")
    # Collected, in whatever group; of a broken file; of one that was not seen; of nobody knows.
    for kept in ("a.py::test_x", "a.py::test_x@group", "b.py::test_y", "c.py::test_y", None):
        assert not seen.lacks(kept)


# -- a run that is broken off -------------------------------------------------------------------

BREAKS_OFF = """
class Breaking:
    def __init__(self, function, last):
        self.function, self.calls, self.last = function, 0, last
    def __call__(self, x):
        self.calls += 1
        if self.calls == self.last:
            stop()
        return self.function(x)

def test_two(paired):
    module = Eager()
    paired("two", reference=module, candidate=Breaking(fast(module), LAST), inputs=inputs)
"""
#: Not KeyboardInterrupt itself, which pytester passes on to the test that it serves.
CTRL_C = "class Stop(KeyboardInterrupt): pass\ndef stop(): raise Stop('no more')\n"
EXIT = "import pytest\ndef stop(): pytest.exit('no more', 3)\n"


@pytest.mark.parametrize(
    ("how", "last", "code", "reason", "workers"),
    [
        (CTRL_C, 30, 2, "Stop: no more, raised while the case was timed; what had been", ()),
        (CTRL_C, 1, 2, "Stop: no more, raised while the case was checked; nothing had been", ()),
        (EXIT, 30, 3, "Exit: no more, raised while the case was timed; what had been", ()),
        (EXIT, 30, None, "Exit: no more, raised while the case was timed", ("-n1",)),
    ],
    ids=["interrupt", "interrupt-early", "exit", "exit-worker"],
)
def test_the_case_that_was_running_is_recorded(
    project, bench, record, how, last, code, reason, workers
):
    if workers:
        pytest.importorskip("xdist")
    project(ONE + how + BREAKS_OFF.replace("LAST", str(last)))
    result = bench(*workers)
    assert result.ret == code or (code is None and result.ret)
    cases = record()["cases"]
    assert cases["one"]["verdict"] == "NO_BASELINE"
    assert cases["two"]["verdict"] == "UNJUDGED"
    assert cases["two"]["reason"].startswith(reason)
    assert ("accuracy" in cases["two"]) is (last > 1)


def test_a_candidate_that_skips_is_not_green(project, bench, record):
    skips = "import pytest\ndef stop(): pytest.skip('not now')\n"
    project(ONE + skips + BREAKS_OFF.replace("LAST", "1"))
    assert bench().ret == pytest.ExitCode.TESTS_FAILED
    assert record()["cases"]["two"]["verdict"] == "UNJUDGED"


def test_sigterm_loses_nothing(project, bench, record):
    kill = "import os, signal\ndef stop(): os.kill(os.getpid(), signal.SIGTERM)\n"
    project(ONE + kill + BREAKS_OFF.replace("LAST", "30"))
    assert bench(subprocess=True).ret == pytest.ExitCode.INTERRUPTED
    cases = record()["cases"]
    assert cases["one"]["verdict"] == "NO_BASELINE"
    assert cases["two"]["reason"].startswith("KeyboardInterrupt: SIGTERM, raised while the case")


@pytest.fixture
def killed(monkeypatch) -> Iterator[list[int]]:
    """Signals that would have been sent; what handled SIGTERM is put back."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda process, number: sent.append(number))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield sent
    signal.signal(signal.SIGTERM, before)


def _arrive() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler)
    handler(signal.SIGTERM, None)


def test_the_handler_of_another_stays(killed):
    def own(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    guard = Termination()
    guard.begin()
    assert signal.getsignal(signal.SIGTERM) is own
    guard.end()
    assert signal.getsignal(signal.SIGTERM) is own


def test_one_signal_interrupts_and_the_next_ends(killed):
    guard = Termination()
    guard.begin()
    with pytest.raises(KeyboardInterrupt):
        _arrive()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    guard.end()
    assert not killed


def test_a_signal_while_results_are_written_waits(killed):
    guard = Termination()
    guard.begin()
    guard.hold()
    _arrive()
    assert not killed
    guard.end()
    assert killed == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# -- a folder that cannot be written ------------------------------------------------------------


@pytest.fixture
def unwritable(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("_pytest.cacheprovider.Cache.mkdir", refuse)


@pytest.mark.usefixtures("unwritable")
def test_a_run_without_benchmarks_touches_no_disk(project, pytester):
    project(ONE)
    result = pytester.runpytest_inprocess("--fastlayer-seeds=1", "--fastlayer-device=cpu")
    result.assert_outcomes(passed=1)
    shown = result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in shown
    assert "cache cannot be written" not in shown


@pytest.mark.usefixtures("unwritable")
def test_a_benchmark_is_kept_where_it_can_be(project, pytester, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    project(ONE)
    quick = ("--fastlayer-pairs=24", "--fastlayer-settle=0", "--fastlayer-block-ms=1")
    result = pytester.runpytest_inprocess("--fastlayer-bench", "--fastlayer-device=cpu", *quick)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*cache cannot be written (read-only)*"])
    (path,) = tmp_path.glob("fastlayer-*/run.json")
    assert json.loads(path.read_text())["cases"].keys() == {"one"}
