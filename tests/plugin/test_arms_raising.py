"""A rival or a variant whose code ends a test instead of returning is UNSUPPORTED, and no more."""

from __future__ import annotations

import pytest

#: What an arm does as it is built, or when it is called -> the reason recorded.
ENDINGS = {
    "pytest.importorskip('flash_attn_that_is_not')": "Skipped: could not import",
    "pytest.skip('not here')": "Skipped: not here",
    "pytest.fail('broken')": "Failed: broken",
    "sys.exit('a build failed')": "SystemExit: a build failed",
}
BODY = """
import sys
import pytest

class Later:
    '''As right as the candidate, and then it ends the test.'''
    def __init__(self, module):
        self.left, self.run = {left}, fast(module)
    def __call__(self, x):
        self.left -= 1
        if self.left < 0:
            {ending}
        return self.run(x)

def build(module):
    {build}
    return Later(module)

def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs,
           {kind}={{"good": lambda: fast(module, EAGER_S / 4), "odd": lambda: build(module)}})
"""
FLAGS = {"rivals": ("--fastlayer-rival=odd",), "variants": ("--fastlayer-admit",)}


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("when", ["built", "called", "timed"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_it_costs_the_pair_nothing(project, bench, record, ending, when, kind):
    left = {"built": 0, "called": 0, "timed": 1 + 1}[when]  # a warm-up and one trial come first
    build = ending if when == "built" else "pass"
    project(BODY.format(left=left, ending=ending, build=build, kind=kind))
    result = bench(*FLAGS[kind])
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    case = record()["cases"]["layer_norm"]
    assert case["verdict"] == "NO_BASELINE"
    odd = {arm["name"]: arm for arm in case[kind]}["odd"]
    assert (odd["verdict"], "timing" in odd) == ("UNSUPPORTED", False)
    assert odd["reason"].startswith(ENDINGS[ending])
    assert ("accuracy" in odd) == (when == "timed")


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("when", ["built", "timed"])
def test_what_ends_the_run_still_ends_it(project, bench, when, kind):
    def run(ending):
        build = ending if when == "built" else "pass"
        project(BODY.format(left=2, ending=ending, build=build, kind=kind))
        return bench(*FLAGS[kind])

    result = run("pytest.exit('enough', 5)")
    assert result.ret == 5
    result.stdout.fnmatch_lines(["*Exit: enough*"])
    with pytest.raises(KeyboardInterrupt):  # handed on by pytester
        run("raise KeyboardInterrupt")


def test_a_variant_that_builds_once_leaves_the_others_in_the_race(project, bench, record):
    """The fastest took the memory that it needs to be built again, say: the next is measured."""
    project("""
def test_layer_norm(paired):
    module, times = Eager(), []
    def once():
        times.append(1)
        if len(times) > 1:
            raise RuntimeError("CUDA out of memory")
        return fast(module, FAST_S)
    paired("layer_norm", reference=module, candidate=module, inputs=inputs,
           variants={"steady": lambda: fast(module, 2 * FAST_S), "once": once})
""")
    bench("--fastlayer-admit").assert_outcomes(passed=1)
    case = record()["cases"]["layer_norm"]
    assert [arm["verdict"] for arm in case["variants"]] == ["PASS", "PASS"]
    assert case["timing"]["speedup"] == pytest.approx(5, rel=0.1)
    assert case["notes"] == [
        "--fastlayer-admit took variant steady for the candidate",
        "variant once could not be built again: RuntimeError: CUDA out of memory",
    ]
