"""``fastlayer-gate`` from the outside: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from makers import DEVICE, SOFTWARE, base, case, incorrect, run, timing, unsupported

from pytest_fastlayer import cli
from pytest_fastlayer import gate as gate_module
from pytest_fastlayer.baselines import load, save
from pytest_fastlayer.cli import EXIT_CODES, main
from pytest_fastlayer.gate import Policy
from pytest_fastlayer.records import Comparison, Origin, PeakMemory, RunRecord, Verdict


@pytest.fixture
def write(tmp_path):
    """Saves a record under a name and returns its path as text."""

    def _write(name: str, record: RunRecord) -> str:
        save(record, tmp_path / name)
        return str(tmp_path / name)

    return _write


@pytest.fixture
def gate(capsys):
    """Runs a command; returns (exit code, standard output, standard error)."""

    def _gate(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return _gate


# compare: one exit code for each outcome


OUTCOMES = {
    "same": (case(), 0, "PASS"),
    "faster": (case(speedup=6), 0, "FASTER"),
    "slower": (case(speedup=3), 10, "SLOWER"),
    "more memory": (case(peak_mib=PeakMemory(candidate=200)), 10, "MORE_MEMORY"),
    "below floor": (case(timing=timing(0.9)), 10, "SLOWER"),
    "incorrect": (incorrect(), 11, "INCORRECT"),
    "inconclusive": (case(timing=timing(4, ci=(0.9, 8))), 12, "INCONCLUSIVE"),
    "unresolvable": (case(Verdict.UNRESOLVABLE, None, reason="too short"), 12, "UNRESOLVABLE"),
    "no samples": (case(Verdict.INCONCLUSIVE, None, reason="all dropped"), 12, "INCONCLUSIVE"),
    "stale": (case(workload={"rows": 65, "width": 128}), 13, "STALE_BASELINE"),
    "other reference": (case(reference_sha256="cd" * 32), 13, "STALE_BASELINE"),
    "not timed": (case(Verdict.ACCURATE, None), 13, "ACCURATE"),
    "unsupported now": (unsupported(), 13, "UNSUPPORTED"),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_compare(outcome, write, gate):
    new, expected, verdict = OUTCOMES[outcome]
    code, out, _ = gate("compare", write("old.json", run()), write("new.json", run({"a": new})))
    assert code == expected
    assert f"1 case: 1 {verdict}" in out


def test_compare_says_by_how_much(write, gate):
    old, new = write("old.json", run()), write("new.json", run({"a": case(speedup=3)}))
    _, out, _ = gate("compare", old, new)
    assert "0.750x [0.7" in out
    assert "SLOWER  a: the speedup is 3.00x" in out


def test_compare_within_noise_is_quiet(write, gate):
    """The same figures against themselves, a hundred cases: not one alarm."""
    many = run({str(i): case() for i in range(100)})
    code, out, _ = gate("compare", write("old.json", many), write("new.json", many))
    assert code == 0
    assert "100 cases: 100 PASS" in out


def test_worst_outcome_decides(write, gate):
    names = ("slower", "incorrect", "stale")
    new = run({name: OUTCOMES[name][0] for name in names})
    old = run({name: case() for name in names})
    assert gate("compare", write("old.json", old), write("new.json", new))[0] == 11


def test_other_machine_and_new_case_are_notices_unless_required(write, gate):
    other = run(device=DEVICE.model_copy(update={"name": "NVIDIA B200"}))
    old, new = write("old.json", run()), write("new.json", other)
    assert gate("compare", old, new)[0] == 0
    assert gate("compare", old, new, "--require-baseline")[0] == 13
    added = write("added.json", run({"a": case(), "b": case()}))
    assert gate("compare", old, added)[0] == 0
    assert gate("compare", old, added, "--require-baseline")[0] == 14


def test_case_that_vanished_is_named(write, gate):
    old, new = write("old.json", run({"a": case(), "b": case()})), write("new.json", run())
    code, _, err = gate("compare", old, new)
    assert code == 13
    assert "not timed in" in err
    assert ": b; measure them, or say --partial" in err
    assert gate("compare", old, new, "--partial")[0] == 0


def test_missing_and_unreadable_baseline(write, gate, tmp_path):
    new = write("new.json", run())
    code, _, err = gate("compare", str(tmp_path / "none.json"), new)
    assert (code, "no such file" in err) == (14, True)
    code, _, err = gate("compare", str(tmp_path / "folder"), new)
    assert (code, "nvidia-h200.json: no such file" in err) == (14, True)
    (tmp_path / "bad.json").write_text("{")
    code, _, err = gate("compare", str(tmp_path / "bad.json"), new)
    assert (code, "bad.json:1:2: not valid JSON" in err) == (2, True)
    assert gate("compare", new, str(tmp_path / "none.json"))[0] == 2


def test_compare_finds_the_device_in_a_folder(write, gate, tmp_path):
    write("nvidia-h200.json", run())
    assert gate("compare", str(tmp_path), write("new.json", run()))[0] == 0


def test_accept_by_name(write, gate):
    old, new = write("old.json", run()), write("new.json", run({"a": case(speedup=3)}))
    assert gate("compare", old, new, "--accept", "a")[0] == 0
    code, _, err = gate("compare", old, new, "--accept", "typo")
    assert (code, "'typo': not in" in err) == (2, True)


@pytest.mark.parametrize(
    ("said_by_base", "speedup", "expected"),
    [
        (base(Verdict.PASS, 1.0), 3, 0),  # the stored figure alone would say SLOWER
        (base(Verdict.SLOWER), 4, 10),
        (base(Verdict.INCONCLUSIVE, 1.0), 3, 10),  # decides nothing: the stored figure does
        (base(None, status="crashed", reason="signal 11"), 3, 10),
    ],
    ids=["pass", "slower", "inconclusive", "crashed"],
)
def test_a_measured_base_decides_as_in_the_run(said_by_base, speedup, expected, write, gate):
    new = run({"a": case(speedup=speedup, base=said_by_base)})
    code, out, _ = gate("compare", write("old.json", run()), write("new.json", new))
    assert code == expected, out


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (case(timing=timing(0.8)), 10),
        (case(speedup=3, peak_mib=PeakMemory(candidate=900)), 10),
        (case(timing=timing(1.0, ci=(0.9, 1.1))), 12),
    ],
    ids=["below floor", "more memory", "inconclusive"],
)
def test_a_base_excuses_no_case_from_its_own_claim(new, expected, write, gate):
    judged = new.model_copy(update={"base": base(Verdict.PASS, 1.0)})
    record = write("new.json", run({"a": judged}))
    code, out, _ = gate("compare", write("old.json", run()), record)
    assert code == expected, out
    assert "clears" not in out


def test_a_base_does_not_hide_that_nothing_is_stored(write, gate):
    new = write("new.json", run({"a": case(base=base(Verdict.PASS, 1.0))}))
    empty = write("empty.json", run({}))
    code, out, _ = gate("compare", empty, new)
    assert code == 0
    assert "1 case: 1 NO_BASELINE" in out
    assert "no baseline stored for 1: a" in out
    assert gate("compare", empty, new, "--require-baseline")[0] == 14
    foreign = run(device=DEVICE.model_copy(update={"name": "NVIDIA B200"}))
    other = write("other.json", foreign)
    assert gate("compare", other, new)[0] == 0
    assert gate("compare", other, new, "--require-baseline")[0] == 13
    stale = write("stale.json", run({"a": case(reference_sha256="cd" * 32)}))
    assert gate("compare", stale, new)[0] == 13


def test_junit_file(write, gate, tmp_path):
    old, new = write("old.json", run()), write("new.json", run({"a": case(speedup=3)}))
    assert gate("compare", old, new, "--junit", str(tmp_path / "out.xml"))[0] == 10
    suite = ET.parse(tmp_path / "out.xml").getroot().find("testsuite")
    assert suite.attrib["failures"] == "1"


def test_software_is_telemetry(write, gate):
    newer = run(software=SOFTWARE.model_copy(update={"torch": "2.14.0"}))
    code, out, _ = gate("compare", write("old.json", run()), write("new.json", newer))
    assert code == 0
    assert "torch 2.13.0 -> 2.14.0" in out


def test_software_is_that_of_the_case_s_own_run(write, gate):
    """A file says what its last run used; a case kept from an earlier one used its own."""
    before = SOFTWARE.model_copy(update={"torch": "2.11.0"})
    kept = Origin(created="2026-11-29T08:00:00+00:00", software=before)
    old = write("old.json", run({"a": case(kept_from=kept), "b": case()}))
    new = write("new.json", run({"a": case(), "b": case()}))
    cases = json.loads(gate("compare", old, new, "--format", "json")[1])["cases"]
    changed = {name: each["comparison"]["changed_since"] for name, each in cases.items()}
    assert changed == {"a": ["torch 2.11.0 -> 2.13.0"], "b": []}
    assert (
        "kept from 2026-11-29T08:00:00+00:00, commit unknown (torch 2.11.0 -> 2.13.0 since)"
        in (gate("show", old)[1])
    )
    # And where it is the new record that holds one.
    cases = json.loads(gate("compare", new, old, "--format", "json")[1])["cases"]
    assert cases["a"]["comparison"]["changed_since"] == ["torch 2.13.0 -> 2.11.0"]


def test_software_that_is_not_recorded_is_not_the_last_run_s(write, gate):
    kept = Origin(created="2026-11-29T08:00:00+00:00")
    old = write("old.json", run({"a": case(kept_from=kept)}))
    code, out, _ = gate("compare", old, write("new.json", run()))
    assert code == 0
    assert (
        "changed since the baseline: not known: the stored figure's software is not recorded"
        in (out)
    )


@pytest.mark.parametrize("form", ["table", "markdown", "json", "github"])
def test_formats(form, write, gate, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    old, new = write("old.json", run()), write("new.json", run({"a": case(speedup=3)}))
    code, out, _ = gate("compare", old, new, "--format", form)
    assert code == 10
    marks = {
        "table": "SLOWER  a:",
        "markdown": "| a | 3.00x",
        "json": '"verdict": "SLOWER"',
        "github": "::error title=SLOWER a::",
    }
    assert marks[form] in out
    assert (tmp_path / "summary.md").exists() == (form == "github")
    if form == "json":
        (tmp_path / "judged.json").write_text(out)
        assert load(tmp_path / "judged.json").cases["a"].comparison.ratio == pytest.approx(0.75)


# show, schema, explain


def test_show(write, gate):
    path = write("r.json", run())
    assert "4.00x [3.98, 4.02]" in gate("show", path)[1]
    assert gate("show", path, "--markdown")[1].startswith("### fastlayer")
    assert gate("show", path, "--format", "json")[1] == run().to_json()
    assert "\x1b[32mPASS" in gate("show", path, "--color", "always")[1]
    assert "\x1b" not in gate("show", path)[1]


def test_schema(gate):
    code, out, _ = gate("schema")
    assert code == 0
    assert {"cases", "device", "schema_version"} <= set(json.loads(out)["properties"])


def test_explain(write, gate):
    path = write("r.json", run({"a": case(Verdict.SLOWER, reason="dropped")}))
    code, out, _ = gate("explain", path, "a")
    assert code == 0
    assert "The rule. SLOWER" in out
    assert "What to try:" in out
    code, _, err = gate("explain", path, "b")
    assert (code, "no case 'b'; its cases are 'a'" in err) == (2, True)


# update


def test_update_from_files(write, gate, tmp_path):
    first = write("first.json", run())
    folder = tmp_path / "baselines"
    code, out, _ = gate("update", first, "--baseline", str(folder))
    assert code == 0
    assert "1 new, 0 changed" in out
    stored = load(folder / "nvidia-h200.json")
    assert list(stored.cases) == ["a"]
    second = write("second.json", run({"b": case()}))
    assert "1 new, 0 changed, 1 unchanged" in gate("update", second, "--baseline", str(folder))[1]
    assert set(load(folder / "nvidia-h200.json").cases) == {"a", "b"}
    code, out, _ = gate("update", second, "--baseline", str(folder), "--complete")
    assert "1 unused" in out
    assert set(load(folder / "nvidia-h200.json").cases) == {"b"}


def test_update_refuses_red_and_changes_nothing(write, gate, tmp_path):
    path = write("b.json", run())
    before = (tmp_path / "b.json").read_bytes()
    good = write("good.json", run({"c": case()}))
    red = write("red.json", run({"b": case(Verdict.SLOWER, reason="why")}))
    code, _, err = gate("update", good, red, "--baseline", path)
    assert code == 10
    assert "refused b: SLOWER: why" in err
    assert (tmp_path / "b.json").read_bytes() == before
    assert gate("update", good, red, "--baseline", path, "--accept", "b")[0] == 0
    assert set(load(path).cases) == {"a", "b", "c"}
    code, _, err = gate("update", good, "--baseline", path, "--accept", "typo")
    assert (code, "in none of the runs" in err) == (2, True)


def test_update_that_refuses_a_figure_worse_than_stored_is_no_success(write, gate, tmp_path):
    """Green by its base alone: the exit status must not say "stored"."""
    path = write("b.json", run())
    before = (tmp_path / "b.json").read_bytes()
    change = Comparison(
        baseline="b.json",
        provenance="measured",
        ratio=0.75,
        ci=(0.74, 0.76),
        threshold=0.02,
        p_value=1e-9,
    )
    worse = case(speedup=3, comparison=change, base=base(Verdict.PASS, 1.0), reason="why")
    new = write("new.json", run({"a": worse}))
    code, out, err = gate("update", new, "--baseline", path)
    assert code == 10
    assert "1 refused" in out
    assert "refused a: PASS, but worse than stored: why" in err
    assert (tmp_path / "b.json").read_bytes() == before
    assert gate("update", new, "--baseline", path, "--accept", "a")[0] == 0


def test_update_with_an_older_record_needs_the_name(write, gate, tmp_path):
    path = write("b.json", run())
    before = (tmp_path / "b.json").read_bytes()
    old = write("old.json", run({"a": case(speedup=3)}, created="2026-11-29T08:00:00+00:00"))
    code, out, err = gate("update", old, "--baseline", path)
    assert code == 10
    assert "1 refused" in out
    assert "refused a: PASS, but older than stored: measured 2026-11-29 08:00:00" in err
    assert "the stored figure 2026-11-30 08:00:00" in err
    assert "--accept a" in err
    assert (tmp_path / "b.json").read_bytes() == before
    assert gate("update", old, "--baseline", path, "--accept", "a")[0] == 0
    assert load(path).cases["a"].timing.speedup == 3
    new = write("new.json", run({"a": case(speedup=6)}))
    assert gate("update", new, old, "--baseline", path)[0] == 10  # the order given is not the age
    assert gate("update", old, new, "--baseline", path)[0] == 0


def test_update_never_accepts_incorrect(write, gate, tmp_path):
    red = write("red.json", run({"b": incorrect()}))
    assert gate("update", red, "--baseline", str(tmp_path / "b.json"), "--accept", "b")[0] == 11
    assert not (tmp_path / "b.json").exists()


def test_update_of_several_devices_at_once(write, gate, tmp_path):
    other = run(device=DEVICE.model_copy(update={"name": "NVIDIA B200"}))
    runs = (write("one.json", run()), write("two.json", other))
    assert gate("update", *runs, "--baseline", str(tmp_path / "all"))[0] == 0
    assert sorted(os.listdir(tmp_path / "all")) == ["nvidia-b200.json", "nvidia-h200.json"]


def test_parallel_updates_lose_nothing(write, tmp_path):
    """Six processes add a case each to one file at the same time; six cases come out."""
    code = "import sys; from pytest_fastlayer.cli import main; sys.exit(main())"
    runs = [write(f"run{i}.json", run({f"case {i}": case()})) for i in range(6)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, "update", path, "--baseline", str(tmp_path / "b.json")],
            stdout=subprocess.DEVNULL,
        )
        for path in runs
    ]
    assert [process.wait(timeout=60) for process in processes] == [0] * 6
    assert sorted(load(tmp_path / "b.json").cases) == [f"case {i}" for i in range(6)]


# the command itself


@pytest.mark.parametrize("argv", [(), ("nonsense",), ("compare", "one"), ("show",)])
def test_usage_errors(argv, gate):
    assert gate(*argv)[0] == 2


@pytest.mark.parametrize("argv", [("--help",), ("compare", "--help"), ("update", "--help")])
def test_exit_codes_are_documented(argv, gate):
    code, out, _ = gate(*argv)
    assert code == 0
    assert EXIT_CODES in out
    for number in ("0", "2", "10", "11", "12", "13", "14"):
        assert f"\n  {number} " in out


def test_bad_number_is_a_usage_error(write, gate):
    path = write("r.json", run())
    code, _, err = gate("compare", path, path, "--alpha", "7")
    assert (code, "alpha is 7.0: expected" in err) == (2, True)


def test_runs_as_a_program_in_an_ascii_terminal(write):
    path = write("r.json", run({"größe ✓": case()}))
    code = "import sys; from pytest_fastlayer.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, "show", path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout


def test_needs_no_torch_and_waits_for_no_scipy():
    code = (
        "import sys, pytest_fastlayer.cli, pytest_fastlayer.report.junit; "
        "sys.exit(bool({'torch', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_and_codes_are_the_gate_s():
    arguments = cli._parser().parse_args(["compare", "old", "new"])
    assert (arguments.alpha, arguments.min_speedup) == (Policy.alpha, Policy.min_speedup)
    assert gate_module.EXIT_CODES[Verdict.STALE_BASELINE] == cli.NOT_COMPARABLE
    assert gate_module.EXIT_CODES[Verdict.NO_BASELINE] == cli.MISSING_BASELINE
