"""The page: complete, self-contained, and deaf to whatever the records hold."""

from __future__ import annotations

import builtins
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import DEVICE, base, case, incorrect, run, timing, unsupported
from test_terminal import HOSTILE, change

from pytest_fastlayer.records import (
    Arm,
    Clocks,
    Precision,
    Probe,
    RunRecord,
    Stress,
    StressCell,
    Verdict,
)
from pytest_fastlayer.report import html, plots

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)

    def outside_drawings(self) -> list[tuple[str, list[str]]]:
        """Tags and names of attributes; inside a drawing the ticks depend on the labels' width."""
        drawn = {"path", "use", "g", "text", "defs", "rect", "clippath"}
        return [(tag, sorted(attrs)) for tag, attrs in self.tags if tag not in drawn]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def full_case(**changes):
    return case(
        **{
            "comparison": change(),
            "objections": {"half_gemm": ["d_model 128 < 256"]},
            "launch": {"warps": 4},
            "nodeid": "tests/test_x.py::test_x",
            "probes": (Probe(name="fresh inputs", passed=True),),
            "rivals": (
                Arm(
                    name="compiled",
                    verdict=Verdict.PASS,
                    accuracy=case().accuracy,
                    timing=timing(2),
                ),
            ),
            "variants": (Arm(name="sdpa", verdict=Verdict.INCORRECT, reason="3 elements out"),),
            "timing": timing(clocks=Clocks(sm_mhz_min=1700, sm_mhz_max=1980)),
        }
        | changes
    )


@pytest.fixture(scope="module")
def page() -> Page:
    old = run({"a": case(speedup=3.5), "gone": case()}, created="2026-11-29T08:00:00+00:00")
    new = run({"a": full_case(), "wrong": incorrect(), "huge": unsupported("needs 10.2 TB")})
    return Page(html.render([new, old]))


def test_says_everything(page):
    for part in (
        "NVIDIA H200 (132 SMs, 9.0), torch 2.13.0",
        "4.00x geometric mean speedup",
        "3 cases: 1 PASS, 1 INCORRECT, 1 UNSUPPORTED",
        "UNSUPPORTED huge: needs 10.2 TB",
        "4.00x [3.98, 4.02]",
        "0.950x [0.940, 0.960]",
        "Speedup over the reference",
        "Latency",
        "Against the baseline",
        "Accuracy budget used",
        "Peak memory",
        "A/A control",
        "Ratio of each pair",
        "half_gemm : d_model 128 < 256",
        "rival compiled 2.00x [1.99, 2.01] 0.43 PASS",
        "variant sdpa INCORRECT 3 elements out",
        "fresh inputs: passed",
        "warps 4",
        "1700 to 1980 MHz",
        "high, TF32 on",
        "The rule. PASS",
        "Environment",
    ):
        assert part in page.text, part


def test_base_stress_and_notes_are_in_the_details():
    measured = full_case(
        base=base(tail=("its last words",)),
        notes=("guard: 0.3 of 1",),
        stress=Stress.of(
            [
                StressCell(label="wide scores", elements=90_000, failed=0, budget_used=0.5, seed=3),
                StressCell(label="ungated", elements=9, failed=2, gated=False),
            ],
            seeds=[1, 2],
        ),
    )
    shown = Page(html.render([run({"a": measured})])).text
    for part in (
        "Against the base revision",
        "base main~1, commit fedcba9876543210fedcba9876543210fedcba98, measured",
        "base's launch warps 8",
        "Ratio of each pair, base over head",
        "What the base's process wrote its last words",
        "Base. main~1 (commit fedcba9876), timed in the same schedule",
        "wide scores 90k 0 0.50 3 yes",
        "ungated 9 2 no",
        "What the candidate says of its run guard: 0.3 of 1",
    ):
        assert part in shown, part


def test_a_ratio_over_an_oracle_is_in_no_speedup_plot(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        plots, "intervals", lambda rows, *_, **__: drawn.append(rows) or "<svg></svg>"
    )
    oracle = case(timing=timing(38.9, ci=None, aa=None), reference_kind="oracle")
    html.render([run({"a": oracle})])
    assert drawn == []


def test_a_ratio_over_an_oracle_is_labelled_wherever_it_stands():
    arm = Arm(name="other", verdict=Verdict.PASS, accuracy=case().accuracy, timing=timing(31.7))
    newest = case(
        timing=timing(38.9, ci=None, log_ratios=(3.6, 3.7)),
        reference_kind="oracle",
        rivals=(arm,),
        variants=(arm,),
    )
    older = newest.model_copy(update={"timing": timing(37.5, ci=None)})
    records = [
        run({"a": newest}),
        run({"a": older}, created="2026-11-29T08:00:00+00:00"),
    ]
    shown = Page(html.render(records)).text
    assert "Ratio of each pair, over an oracle (diagnostic)" in shown
    assert "(37.50x diagnostic) (38.90x diagnostic)" in shown  # the history
    for ratio in ("37.50x", "38.90x", "31.70x"):
        bare = re.findall(rf"(?<!\(){ratio}", shown)
        # Only the sentence that says what it is does without the label.
        assert len(bare) == (ratio == "38.90x"), (ratio, bare)
        assert f"({ratio}" in shown
    assert "ratio of 38.90x is a diagnostic" in shown


def test_history_is_ordered_by_date_and_the_newest_is_shown(page):
    assert "2026-11-29 08:00 abc1234 2026-11-30 08:00 abc1234" in page.text
    assert "a 3.50x 4.00x" in page.text  # the sparkline between has no text
    assert "gone 4.00x" in page.text


def test_each_case_can_be_reached(page):
    anchors = {attrs["href"][1:] for tag, attrs in page.tags if tag == "a"}
    identities = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {"s0c0", "s0c1", "s0c2"} <= anchors <= identities


def test_nothing_is_loaded_and_only_the_sorter_runs():
    source = html.render([run({"a": full_case()})])
    addresses = set(re.findall(r"""\w+://[^\s"'<)]+""", source))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in source
    page = Page(source)
    assert page.count("script") == 1
    assert not any(attribute.startswith("on") for _, attrs in page.tags for attribute in attrs)
    for tag, attrs in page.tags:
        for attribute in ("src", "href", "xlink:href", "action"):
            value = attrs.get(attribute) or "#"
            assert value.startswith(("#", "data:,")), (tag, attribute, value)


def test_light_and_dark_and_narrow():
    source = html.render([run()])
    assert "prefers-color-scheme: dark" in source
    assert "max-width: 46rem" in source
    assert 'name="viewport"' in source
    assert not set(plots._VARIABLES) & set(re.findall(r"#[0-9a-f]{6}", source))


def test_several_devices_have_a_section_each():
    other = run(device=DEVICE.model_copy(update={"name": "NVIDIA B200"}))
    page = Page(html.render([run(), other]))
    assert page.count("section") == 2
    assert page.count("nav") == 1


def test_published_figures_without_interval_or_control():
    figure = timing(ci=None, aa=None, min_detectable_effect=None, log_ratios=None)
    page = Page(html.render([run({"a": case(timing=figure)}, provenance="published")]))
    assert "published" in page.text
    assert "A/A control" not in page.text


@pytest.mark.parametrize(
    "cases",
    [{}, {"a": unsupported()}, {"a": incorrect()}],
    ids=["none", "unsupported", "incorrect"],
)
def test_nothing_timed(cases):
    page = Page(html.render([run(cases)]))
    assert page.count("details") == len(cases) + 1


def test_trace_shows_the_ratio_of_each_pair(monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "trace", lambda *values: drawn.append(values) or "<svg></svg>")
    html.render([run({"a": case(timing=timing(2.0, log_ratios=(math.log(2), math.log(2.5))))})])
    ((ratios, point, ci),) = drawn
    assert ratios == pytest.approx([2.0, 2.5])
    assert (point, ci) == (2.0, (1.99, 2.01))


def test_plots_are_bounded_but_the_table_holds_all(monkeypatch):
    monkeypatch.setattr(html, "MAX_PLOTTED", 3)
    page = Page(html.render([run({f"case {i}": case() for i in range(5)})]))
    assert page.count("details") == 5 + 1
    assert page.count("tr") == 5 + 1
    assert page.text.count("Ratio of each pair") == 3


def test_astronomical_figures_do_not_break_the_plots():
    wild = timing(
        1e300,
        reference_s=1e150,
        candidate_s=1e-150,
        ci=(1e-300, 1e305),
        noise_floor=1e300,
        floor_sources=None,
        log_ratios=(1.0, 700.0, -700.0),
    )
    wrong = incorrect().accuracy.model_copy(update={"max_abs": 1e38, "budget_used": 1e300})
    cases = {"a": case(timing=wild), "b": case(Verdict.INCORRECT, None, accuracy=wrong)}
    assert len(html.render([run(cases)])) < 200_000


def test_no_record_is_an_error():
    with pytest.raises(ValueError, match="at least one record"):
        html.render([])


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_missing_dependency_says_what_to_install(missing, monkeypatch):
    real = builtins.__import__

    def block(name, *args, **kwargs):
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", block)
    with pytest.raises(html.ReportDependencyError, match=r"pip install 'pytest-fastlayer\[report"):
        html.render([run()])


def hostile(text: str) -> RunRecord:
    bad = full_case(
        label=text,
        reason=text,
        route=text,
        nodeid=text,
        workload={text: text},
        launch={text: [text]},
        objections={text: [text]},
        probes=(Probe(name=text, passed=False, message=text),),
        variants=(Arm(name=text, verdict=Verdict.INCORRECT, reason=text),),
        comparison=change(baseline=text, changed_since=(text,)),
        timing=timing(warnings=(text,), dropped_pairs=1, dropped_reasons=(text,)),
        precision=Precision(float32_matmul_precision="high", allow_tf32=True),
    )
    software = run().software.model_copy(update={"torch": text, "platform": text})
    device = DEVICE.model_copy(update={"name": text})
    return run(
        {text: bad}, software=software, device=device, commit=text, created=text, notes=(text,)
    )


ATTACKS = (
    HOSTILE,
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</title></style></svg><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% include 'x' %}",
    "javascript:alert(1)",
    "at ##[error]x ##",
    "$\\frac{1}{0}$ $x$ \\$",
    "<!-- ]]> &amp; &#60;",
)


@pytest.fixture(scope="module")
def harmless() -> Page:
    return Page(html.render([hostile("harmless")]))


@pytest.mark.parametrize("attack", ATTACKS)
def test_foreign_text_stays_text(attack, harmless):
    page = Page(html.render([hostile(attack)]))
    assert page.outside_drawings() == harmless.outside_drawings()
    assert "49" not in page.text.partition("fastlayer report")[0]
    assert "\x1b" not in page.text


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.text(alphabet="<>&\"'{}%$\\/= ax\x00\x1b\u202e", min_size=1, max_size=30))
def test_fuzz(text):
    page = Page(html.render([hostile(text)]))
    assert page.count("script") == 1


def test_output_is_reproducible():
    assert html.render([run()]) == html.render([run()])
