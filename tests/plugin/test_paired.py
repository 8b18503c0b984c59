"""The plugin serves a project that has never heard of fastlayer."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

PASSING = """
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs,
           workload={"rows": 32}, work={"flops": 6.0 * 32 * 64, "bytes": 8.0 * 32 * 64})
"""


def wrong(change: str) -> str:
    return f"""
def test_layer_norm(paired):
    module = Eager()
    def candidate(x):
        y = fast(module)(x)
        {change}
        return y
    paired("layer_norm", reference=module, candidate=candidate, inputs=inputs)
"""


def test_accuracy_alone_without_bench(project, pytester):
    project(PASSING)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert not (pytester.path / "run.json").exists()


def test_bench_passes_and_records(project, bench, record):
    project(PASSING)
    result = bench()
    result.assert_outcomes(passed=1)
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] in ("PASS", "NO_BASELINE")
    assert case["accuracy"]["failed"] == 0
    assert case["accuracy"]["total"] == 2 * 32 * 64
    assert case["timing"]["speedup"] > 2
    low, high = case["timing"]["ci"]
    assert low <= case["timing"]["speedup"] <= high
    assert case["timing"]["aa"] is not None
    assert case["workload"] == {"rows": 32}
    assert case["work"] == {"flops": 12288, "bytes": 16384}
    result.stdout.fnmatch_lines(["*layer_norm*"])


def test_bench_runs_only_benchmarks(project, bench):
    project(PASSING + "\ndef test_other():\n    assert False\n")
    bench().assert_outcomes(passed=1, deselected=1)


def test_one_element_wrong_by_three_thousandths(project, bench, record, pytester):
    project(wrong("y[17, 3] += 0.003 + 0.02 * y[17, 3].abs()"))
    result = bench("--junitxml=junit.xml")
    result.assert_outcomes(failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*INCORRECT*", "*17, 3*"])
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] == "INCORRECT"
    assert "timing" not in case
    suite = ElementTree.parse(pytester.path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert suite.get("failures") == "1"


def test_one_element_not_a_number(project, bench, record):
    project(wrong("y[0, 0] = float('nan')"))
    result = bench()
    assert result.ret == 1
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] == "INCORRECT"
    assert case["accuracy"]["nonfinite"] == 2  # one in each of two seeds
    assert case["accuracy"]["failed"] == 2


def test_a_reference_that_returns_its_input_is_not_what_the_candidate_writes(project, pytester):
    project("""
def test_same(paired):
    second = inputs(1235)[0]
    def candidate(x):
        return x.zero_() if x.equal(second) else x.clone()
    paired("same", reference=lambda x: x, candidate=candidate, inputs=inputs)
""")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--fastlayer-device=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*INCORRECT: same: *"])


def test_slow_candidate_is_below_the_floor(project, bench, record):
    project(PASSING.replace("fast(module)", "fast(module, 2 * EAGER_S)"))
    result = bench()
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    assert record()["cases"]["layer_norm"]["verdict"] == "BELOW_FLOOR"


def test_slower_than_the_stored_baseline(project, bench, record):
    project(PASSING)
    assert bench("--fastlayer-update-baseline", "--fastlayer-baseline=base").ret == 0
    project(PASSING.replace("fast(module)", "fast(module, 2 * FAST_S)"))
    result = bench("--fastlayer-baseline=base")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] == "SLOWER"
    assert case["comparison"]["ratio"] == pytest.approx(0.5, rel=0.05)


def test_three_percent_slower_than_stored(project, bench, record):
    project(PASSING)
    assert bench("--fastlayer-update-baseline", "--fastlayer-baseline=base").ret == 0
    project(PASSING.replace("fast(module)", "fast(module, 1.06 * FAST_S)"))
    assert bench("--fastlayer-baseline=base").ret == 1
    assert record()["cases"]["layer_norm"]["verdict"] == "SLOWER"


def test_on_the_real_clock(project, bench, record):
    """The one test that times for real: a difference that no busy machine can hide."""
    project(
        """
import time
def test_real(paired):
    def slow(x):
        time.sleep(0.02)
        return x + 1
    paired("real", reference=slow, candidate=lambda x: x + 1, inputs=inputs)
""",
        conftest="",
    )
    bench("--fastlayer-pairs=12", "--fastlayer-budget=5")
    timing = record()["cases"]["real"]["timing"]
    assert timing["method"]["clock"] == "cpu_clock"
    assert timing["reference_s"] >= 0.02
    assert timing["speedup"] > 10


def test_unsupported_is_skipped_and_recorded(project, bench, record):
    project("""
def test_large(paired):
    paired.unsupported("large", "needs 10.24 TB; this machine has 24 GiB")
""")
    result = bench()
    result.assert_outcomes(skipped=1)
    assert result.ret == 0
    case = record()["cases"]["large"]
    assert case["verdict"] == "UNSUPPORTED"
    assert "10.24 TB" in case["reason"]


def test_case_that_takes_too_long_is_unsupported(project, bench, record):
    project(PASSING)
    result = bench("--fastlayer-max-case=0.000001")
    result.assert_outcomes(skipped=1)
    assert "would take" in record()["cases"]["layer_norm"]["reason"]


def test_two_cases_of_one_name(project, bench):
    project(PASSING + PASSING.replace("test_layer_norm", "test_again"))
    result = bench()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*'layer_norm' was measured by*give each call*"])


def test_primitives_stand_alone(project, bench):
    project("""
def test_parts(reference, assert_elementwise, paired_timing):
    module = Eager()
    frozen = reference(module)
    (x,) = inputs(1)
    assert_elementwise(fast(module)(x), frozen(x))
    timing = paired_timing(module, fast(module), x)
    assert timing.ci[0] > 1
""")
    bench().assert_outcomes(passed=1)


def test_paired_timing_needs_bench(project, pytester):
    project("""
def test_parts(paired_timing):
    raise AssertionError("not reached")
""")
    pytester.runpytest_inprocess().assert_outcomes(skipped=1)


def test_mutated_reference_is_caught(project, pytester):
    project("""
def test_parts(reference):
    module = Eager()
    frozen = reference(module)
    with torch.no_grad():
        module.norm.weight.add_(1)
""")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)


def test_rival_is_timed_by_name(project, bench, record):
    project(PASSING.replace('workload={"rows": 32}', 'rivals={"again": lambda: fast(module)}'))
    bench("--fastlayer-rival=again").assert_outcomes(passed=1)
    (rival,) = record()["cases"]["layer_norm"]["rivals"]
    assert rival["name"] == "again"
    assert rival["timing"]["speedup"] > 2


@pytest.mark.parametrize("when", ["built", "timed"])
def test_a_rival_that_raises_whatever_costs_no_record(when, project, bench, record):
    project(
        """
class Odd(Exception):
    pass

def rival(module, when, calls=[0]):
    if when == "built":
        raise Odd("nothing to build")
    def run(x):
        calls[0] += 1
        if calls[0] > 2:
            raise Odd("tired")
        return fast(module)(x)
    return run

def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs,
           rivals={"odd": lambda: rival(module, WHEN)})
""".replace("WHEN", repr(when))
    )
    bench("--fastlayer-rival=odd").assert_outcomes(passed=1)
    case = record()["cases"]["layer_norm"]
    assert case["timing"]["speedup"] > 2
    (odd,) = case["rivals"]
    assert odd["verdict"] == "UNSUPPORTED"
    assert odd["reason"].startswith("Odd: ")


def test_unknown_rival_names_the_known(project, bench):
    project(PASSING.replace('workload={"rows": 32}', 'rivals={"again": lambda: fast(module)}'))
    result = bench("--fastlayer-rival=other")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*--fastlayer-rival=other*again*"])


def test_admit_keeps_the_fastest_and_the_refused(project, bench, record):
    project("""
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=module, inputs=inputs,
           variants={"slow": lambda: fast(module, EAGER_S),
                     "fast": lambda: fast(module),
                     "wrong": lambda: lambda x: fast(module)(x) + 1})
""")
    bench("--fastlayer-admit", "--fastlayer-variant=sl*").assert_outcomes(failed=1)
    assert [arm["name"] for arm in record()["cases"]["layer_norm"]["variants"]] == ["slow"]
    bench("--fastlayer-admit").assert_outcomes(passed=1)
    case = record()["cases"]["layer_norm"]
    verdicts = {arm["name"]: arm["verdict"] for arm in case["variants"]}
    assert verdicts["wrong"] == "INCORRECT"
    assert verdicts["slow"] != "PASS"
    assert case["timing"]["speedup"] > 2  # the fast variant was measured as the candidate


def test_a_pair_states_its_own_tolerance(project, pytester):
    project(
        wrong("y = y + 0.01")
        .replace(
            "candidate=candidate", "candidate=candidate, tolerance=Tolerance(atol=0.02, rtol=0)"
        )
        .replace("def test_", "from pytest_fastlayer import Tolerance\ndef test_")
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_stress_grids_multiply(project, pytester):
    project("""
from pytest_fastlayer import input_scales, padding_ratios

@padding_ratios()
@input_scales((0.5, 2))
def test_grid(padding_ratio, input_scale):
    assert 0 <= padding_ratio < 1
""")
    pytester.runpytest_inprocess().assert_outcomes(passed=8)


@pytest.mark.parametrize(("name", "value"), [("padding_ratios", 1.0), ("input_scales", 0.0)])
def test_a_grid_refuses_nonsense(name, value):
    import pytest_fastlayer

    with pytest.raises(ValueError, match="expected a"):
        getattr(pytest_fastlayer, name)([value])


def test_replay_that_begins_once_calls_are_counted(project, bench, record):
    """Honest while it is checked and probed, a recording from the fortieth call on."""
    project("""
class Replay:
    calls, kept = 0, None
    def __init__(self, honest):
        self.honest = honest
    def __call__(self, x):
        self.calls += 1
        if self.calls < 40 or self.kept is None:
            self.kept = self.honest(x)
        else:
            Virtual.spend(1e-6)
        return self.kept.clone()

def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=Replay(fast(module)), inputs=inputs)
""")
    assert bench().ret == 1
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] == "DISHONEST"
    assert "after_timing" in case["reason"]
    assert "timing" not in case


def test_both_arms_are_called_alike(project, bench):
    """What calls an arm is timed with it: a wrapper around one side alone would be a bias."""
    project("""
import sys
DEPTHS = {"reference": [], "candidate": []}

def arm(name, cost):
    def run(x):
        frame, steps = sys._getframe(1), []
        while frame is not None and frame.f_code.co_name != "block":
            steps.append(frame.f_code.co_name)
            frame = frame.f_back
        if frame is not None:
            DEPTHS[name].append(tuple(steps))
        Virtual.spend(cost)
        return x * 2
    return run

def test_depth(paired):
    paired("depth", reference=arm("reference", EAGER_S), candidate=arm("candidate", FAST_S),
           inputs=inputs)
    assert set(DEPTHS["reference"]) == set(DEPTHS["candidate"]) == {("__call__",)}
""")
    bench().assert_outcomes(passed=1)


def test_a_result_replayed_only_while_timed(project, bench, record):
    project("""
import sys

class Sniff:
    kept = None
    def __call__(self, x):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.endswith("clocks.py") or frame.f_code.co_name == "block":
                Virtual.spend(1e-6)
                return self.kept.clone()
            frame = frame.f_back
        Virtual.spend(FAST_S)
        self.kept = x * 2
        return self.kept.clone()

def test_sniff(paired):
    def eager(x):
        Virtual.spend(EAGER_S)
        return x * 2
    paired("sniff", reference=eager, candidate=Sniff(), inputs=inputs)
""")
    assert bench().ret == 1
    case = record()["cases"]["sniff"]
    assert case["verdict"] == "DISHONEST"
    assert "timed_output" in case["reason"]


def test_a_reference_that_cannot_run_in_float64_is_still_timed(project, bench, record):
    project("""
WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
def test_captured(paired):
    def eager(x):
        Virtual.spend(EAGER_S)
        return x @ WEIGHT
    def quick(x):
        Virtual.spend(FAST_S)
        return x @ WEIGHT
    paired("captured", reference=eager, candidate=quick, inputs=inputs)
""")
    assert bench().ret == 0
    accuracy = record()["cases"]["captured"]["accuracy"]
    assert "rms_vs_float64" not in accuracy


@pytest.mark.parametrize(
    "cheat",
    [
        "from pytest_fastlayer import gate; gate.is_failure = lambda *a, **k: False",
        "torch.softmax, torch.kept = (lambda *a, **k: torch.kept(*a, **k)), torch.softmax",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_tampering_with_the_run_is_named(project, pytester, lean, cheat):
    """Whether the candidate is right or wrong: whoever edits the judge has no verdict."""
    project(f"""
def test_layer_norm(paired):
    module = Eager()
    def candidate(x):
        {cheat}
        return fast(module)(x)
    paired("layer_norm", reference=module, candidate=candidate, inputs=inputs)
""")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *lean)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*DISHONEST*layer_norm*"])


def test_inputs_must_be_a_function_of_their_seed(project, pytester):
    project("""
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module),
           inputs=lambda seed: (torch.randn(32, SIZE),))
""")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*layer_norm: two calls of inputs(1234) differ*"])


def test_a_reference_that_writes_into_its_inputs_is_to_blame(project, pytester):
    project("""
def test_scaled(paired):
    def eager(x):
        return x.mul_(2)
    paired("scaled", reference=eager, candidate=lambda x: x * 2, inputs=inputs)
""")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*scaled: eager changed its own input*"])
