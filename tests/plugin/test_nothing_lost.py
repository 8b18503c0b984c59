"""Whatever raises after something was measured: the figures are recorded, and it is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_fastlayer import accuracy, baselines, gate, records
from pytest_fastlayer.records import CaseRecord, Probe, Verdict
from pytest_fastlayer.session import payload_of, recordable

SOUND = """
def test_sound(paired):
    module = Eager()
    paired("sound", reference=module, candidate=fast(module), inputs=inputs)
"""
#: A second case, which something happens to.
HURT = """
from pytest_fastlayer.stress import Cell, Stress

DEEP = 1
for _ in range(80):
    DEEP = [DEEP]

class Tired(Exception):
    pass

def raising(*_):
    raise Tired("no more")

class Counting:
    \"""A candidate that raises from its ``last``-th call on.\"""
    def __init__(self, function, last):
        self.function, self.calls, self.last = function, 0, last
    def __call__(self, x):
        self.calls += 1
        if self.calls >= self.last:
            raising()
        return self.function(x)

def test_hurt(paired):
    module = Eager()
    options = {"candidate": fast(module)} | OPTIONS
    paired("hurt", reference=module, inputs=inputs, **options)
"""


@pytest.fixture
def hurt(project, bench, record):
    """The record of a case beside a sound one, when ``options`` are the pair's."""

    def run(options: str, *flags: str, **files: str) -> dict:
        project(SOUND + HURT.replace("OPTIONS", options), **files)
        result = bench(*flags)
        shown = result.stdout.str()
        assert "INTERNALERROR" not in shown + result.stderr.str()
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert re.search(r"hurt .*UNJUDGED", shown)
        cases = record()["cases"]
        assert cases["sound"]["verdict"] == "NO_BASELINE"
        assert cases["sound"]["timing"]["speedup"] > 2
        assert cases["hurt"]["verdict"] == "UNJUDGED"
        return cases["hurt"] | {"shown": shown}

    return run


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_judge_that_raises_costs_no_figure(hurt, workers):
    if workers:
        pytest.importorskip("xdist")
    case = hurt(
        "{}",
        *("--fastlayer-html=r.html", "--junitxml=j.xml", *workers),
        conftest="""
import pytest
from pytest_fastlayer import gate, timing

@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch, request):
    from pair import Virtual
    monkeypatch.setattr(timing, "clock_for", lambda device: Virtual())
    judge = gate.judge
    def once(case, stored, *, name, **more):
        if name == "hurt":
            raise ZeroDivisionError("a gap in the gate")
        return judge(case, stored, name=name, **more)
    monkeypatch.setattr(gate, "judge", once)
""",
    )
    assert case["reason"] == (
        "ZeroDivisionError: a gap in the gate, raised while the case was judged; what had been "
        "measured is kept"
    )
    assert case["timing"]["speedup"] > 2
    assert case["accuracy"]["failed"] == 0
    assert "ZeroDivisionError: a gap in the gate" in case["shown"]
    page = Path("r.html").read_text()
    assert page.count("UNJUDGED") > 1
    assert "a gap in the gate" in page
    suite = ElementTree.parse("j.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")


@pytest.mark.parametrize(
    ("what", "workers"),
    [("path.unlink()", ()), ("path.write_text('{')", ()), ("path.unlink()", ("-n1",))],
)
def test_a_baseline_is_judged_by_as_it_was_when_the_run_began(
    project, bench, record, pytester, what, workers
):
    project(SOUND)
    if workers:
        pytest.importorskip("xdist")
        with (pytester.path / "conftest.py").open("a") as conftest:
            conftest.write("\nimport torch\ntorch.set_num_threads(1)  # as in this process\n")
    assert bench("--fastlayer-update-baseline", "--fastlayer-baseline=base").ret == 0
    first = SOUND.replace("test_sound", "test_first").replace('"sound"', '"first"')
    gone = f"""
def test_gone():
    pass

def test_spoil(paired):
    from pathlib import Path
    (path,) = Path({str(pytester.path)!r}, "base").glob("*.json")
    {what}
"""
    (pytester.path / "test_pair.py").write_text("from pair import *\n" + first + gone + SOUND)
    bench("--fastlayer-baseline=base", *workers)
    cases = record()["cases"]
    assert cases["first"]["verdict"] == "NO_BASELINE"
    assert cases["sound"]["verdict"] in ("PASS", "FASTER", "SLOWER")
    assert cases["sound"]["comparison"]["baseline"].endswith(".json")


@pytest.mark.parametrize(
    ("options", "flags", "reason", "figures"),
    [
        ("{'describe': raising}", (), "Tired: no more, raised while the case was checked",
         {"accuracy", "probes"}),
        ("{'describe': lambda f: {'launch': {'a': DEEP}}}", (),
         "HandedError: hurt: describe: the record of 'hurt'", {"accuracy", "probes"}),
        ("{'describe': lambda f: {'notes': ['x' * 2_000_000]}}", (),
         "HandedError: hurt: describe gave 1.9 MiB of text; expected at most 1 MiB",
         {"accuracy", "probes"}),
        ("{'describe': lambda f: __import__('pytest').skip('not now')}", (),
         "Skipped: not now, raised while the case was checked", {"accuracy", "probes"}),
        ("{'float64': lambda x: 1 / 0}", (), "ZeroDivisionError", {"accuracy"}),
        ("{'candidate': Counting(fast(module), 2)}", (),
         "Tired: no more, raised while the case was checked", {"accuracy"}),
        ("{'stress': {'a': inputs, 'b': raising}}", ("--fastlayer-stress=2",),
         "Tired: no more, raised while the case was stressed", {"accuracy", "probes", "stress"}),
        ("{'variants': {'a': lambda made=[]: made.append(1) or (fast(module) if len(made) < 2 else"
         " Counting(fast(module), 0))}}", ("--fastlayer-admit",),
         "Tired: no more, raised while the case was checked", {"variants"}),
    ],
)  # fmt: skip
def test_a_step_that_raises_costs_none_before_it(hurt, options, flags, reason, figures):
    case = hurt(options, *flags)
    assert case["reason"].startswith(reason)
    kept = {
        name for name in ("accuracy", "probes", "stress", "timing", "variants") if case.get(name)
    }
    assert kept == figures
    if "stress" in figures:
        assert [cell["label"] for cell in case["stress"]["cells"]] == ["a"]


def test_what_comes_after_timing_costs_no_timing(hurt):
    """A reference that is no longer what it was, found when all is measured."""
    case = hurt(
        "{'rivals': {'odd': lambda: module.norm.weight.data.add_(1) and fast(module)}}",
        "--fastlayer-rival=odd",
    )
    assert case["reason"].startswith("ReferenceMutatedError: ")
    assert "raised while the case was timed" in case["reason"]
    assert case["timing"]["speedup"] > 2
    assert [arm["name"] for arm in case["rivals"]] == ["odd"]


def test_nothing_measured_is_no_record(project, bench, record):
    project(SOUND + HURT.replace("OPTIONS", "{'candidate': raising}"))
    bench().assert_outcomes(passed=1, failed=1)
    assert list(record()["cases"]) == ["sound"]


def test_an_unjudged_case_updates_no_baseline(project, bench, pytester):
    project(HURT.replace("OPTIONS", "{'describe': raising}"))
    flags = ("--fastlayer-update-baseline", "--fastlayer-baseline=base", "--fastlayer-accept=hurt")
    result = bench(*flags)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*was not updated: not green: hurt*"])
    assert not list(pytester.path.glob("base/*.json"))


def test_what_a_fixture_measured_is_recorded_too(project, bench, record):
    measure = 'paired("{0}", reference=module, candidate=fast(module), inputs=inputs)'
    project(f"""
import pytest

@pytest.fixture
def early(paired):
    module = Eager()
    {measure.format("early")}
    raise ValueError("later in the same fixture")

@pytest.fixture
def late(paired):
    yield
    module = Eager()
    {measure.format("late")}

def test_early(early):
    pass

def test_late(late):
    pass
""")
    bench().assert_outcomes(errors=1, passed=1)
    assert sorted(record()["cases"]) == ["early", "late"]


def test_a_run_that_cannot_be_judged_as_a_whole_is_written(project, bench, record, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a gap in Holm")

    monkeypatch.setattr(gate, "judge_run", broken)
    project(SOUND)
    result = bench()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*run as a whole could not be judged*ZeroDivisionError: a gap*"])
    assert record()["cases"]["sound"]["verdict"] == "NO_BASELINE"


@pytest.mark.parametrize("what", ["junit.suite_properties", "terminal.summary", "html.render"])
def test_a_report_that_raises_costs_no_other(project, bench, record, monkeypatch, what):
    def broken(*_, **__):
        raise ZeroDivisionError("a gap in a report")

    monkeypatch.setattr(f"pytest_fastlayer.report.{what}", broken)
    project(SOUND)
    result = bench("--junitxml=j.xml", "--fastlayer-html=r.html", "--fastlayer-markdown=m.md")
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    result.stdout.fnmatch_lines(["*ZeroDivisionError: a gap in a report*", "*wrote *run.json"])
    assert record()["cases"]["sound"]["verdict"] == "NO_BASELINE"
    assert Path("j.xml").exists()
    assert Path("m.md").exists()
    assert Path("r.html").exists() is (what != "html.render")


@pytest.mark.parametrize(
    "flags",
    [
        ("--fastlayer-json=gone/r.json",),
        ("--fastlayer-json=", "--fastlayer-update-baseline", "--fastlayer-baseline=gone/r.json"),
    ],
)
def test_a_record_without_a_place_is_kept_elsewhere(project, bench, tmp_path, monkeypatch, flags):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    project(SOUND + "    open('gone', 'w').close()  # where a folder is wanted\n")
    result = bench(*flags)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (kept,) = re.findall(r"the record was kept in (\S+)", result.stdout.str())
    assert baselines.load(kept).cases["sound"].timing is not None
    assert Path(kept).parent == tmp_path


# -- without a run ------------------------------------------------------------------------------

MEASURED = accuracy.to_record(
    accuracy.Comparison(accuracy.Tolerance(), total=4, compared=4, budget_used=0.1, max_abs=0.0),
    [1],
    accuracy.Tolerance(),
    None,
)
TIMING = records.Timing(
    method=records.Method(clock="cpu_clock", settle_s=0, block_ms=1),
    reference_s=2e-3,
    candidate_s=1e-3,
    speedup=2,
    ci=(1.9, 2.1),
    noise_floor=0.01,
    pairs=10,
)
CASE = CaseRecord(verdict=Verdict.ACCURATE, accuracy=MEASURED, timing=TIMING)
HEADER = {
    "device": {"type": "cpu", "name": "a", "multiprocessors": 1, "memory_mib": 1},
    "software": {"python": "3.11", "platform": "linux"},
}
DEVICE = records.Device.model_validate(HEADER["device"])


def test_an_unjudged_case_stays_so_whatever_it_is_held_against():
    case = gate.unjudged(CASE, "it broke off")
    assert (case.verdict, case.reason, case.timing) == ("UNJUDGED", "it broke off", TIMING)
    again = gate.judge(case, None, name="a", device=DEVICE, policy=gate.Policy())
    assert (again.verdict, again.reason, again.timing) == ("UNJUDGED", "it broke off", TIMING)
    assert gate.is_failure(case.verdict, gate.Policy())
    assert gate.exit_code([case.verdict], gate.Policy()) == 12
    payload_of("a", case, HEADER)


def test_a_timing_that_is_not_earned_is_not_kept():
    caught = CASE.model_copy(update={"probes": (Probe(name="p", passed=False),)})
    case = gate.unjudged(caught, "it broke off")
    assert case.timing is None
    payload_of("a", case, HEADER)


def test_what_had_been_said_before_is_told():
    slower = CASE.model_copy(update={"verdict": Verdict.SLOWER, "reason": "half as fast"})
    case = gate.unjudged(slower, "it broke off")
    assert case.reason == "it broke off; until then SLOWER: half as fast"


def test_holm_turns_no_unjudged_case_slower():
    change = records.Comparison(
        baseline="x", provenance="measured", ratio=0.5, ci=(0.4, 0.6), threshold=0.02, p_value=1e-9
    )
    case = gate.unjudged(CASE, "it broke off").model_copy(update={"comparison": change})
    assert gate.judge_run({"a": case}, gate.Policy())["a"] == case


def test_a_record_keeps_every_field_that_it_can_hold():
    """A speedup that does not agree with its seconds, as under a clock that breaks down."""
    odd = CASE.model_copy(
        update={"label": "a", "timing": TIMING.model_copy(update={"speedup": 1e6})}
    )
    with pytest.raises(baselines.BaselineError, match="does not agree"):
        payload_of("a", odd, HEADER)
    kept = recordable("a", odd, HEADER, "why")
    assert (kept.verdict, kept.reason, kept.label) == ("UNJUDGED", "why", "a")
    assert (kept.accuracy, kept.timing) == (MEASURED, None)
    assert recordable("a", CASE, HEADER, "why").timing == TIMING
    json.dumps(payload_of("a", kept, HEADER))
