"""The roofline: the table of peaks, the floor, and where it is drawn or why it is not."""

from __future__ import annotations

import re

import pytest
from makers import DEVICE, case, run, timing
from test_html import Page

from pytest_fastlayer.records import Work
from pytest_fastlayer.report import html, roofline

H200 = roofline.peaks_of(DEVICE)
#: A microsecond of the H200's tensor cores, and much less of its memory.
WORK = Work(flops=989e6, bytes=4.8e5)


def named(name: str):
    return DEVICE.model_copy(update={"name": name})


def test_every_row_is_plausible_and_names_its_source():
    for row in roofline.PEAKS:
        assert row.source.startswith("NVIDIA ")
        assert 1.9 < row.fp16 / row.tf32 < 2.1  # tensor cores take half as many TF32 operands
        assert 50 < row.fp16 / row.bandwidth < 300  # FLOP a byte at the ridge
        assert [r for r in roofline.PEAKS if re.fullmatch(r.device, row.device)] == [row]


@pytest.mark.parametrize(
    "name", ["NVIDIA H200 NVL", "NVIDIA GeForce RTX 5080 Laptop GPU", "NVIDIA H20", "cpu"]
)
def test_a_similar_name_is_another_device(name):
    assert roofline.peaks_of(named(name)) is None


def test_floor_is_the_larger_of_arithmetic_and_memory():
    assert H200.floor_s(WORK) == pytest.approx(1e-6)
    assert H200.floor_s(Work(flops=1, bytes=4.8e12)) == pytest.approx(1.0)
    ridge = H200.fp16 / H200.bandwidth
    assert H200.attainable(ridge / 2, H200.fp16) == pytest.approx(H200.fp16 / 2)
    assert H200.attainable(ridge * 2, H200.fp16) == H200.fp16


def test_times_floor_and_point():
    figure = case(work=WORK, timing=timing(reference_s=8e-6, candidate_s=2e-6))
    assert roofline.times_floor(figure, H200) == pytest.approx(2.0)
    point = roofline.point("a", figure)
    assert (point.reference, point.candidate) == pytest.approx((989e12 / 8, 989e12 / 2))
    assert point.intensity == pytest.approx(989e6 / 4.8e5)
    assert roofline.times_floor(figure, None) is None
    for without in (case(), case(speedup=None, work=WORK)):
        assert roofline.times_floor(without, H200) is None
        assert roofline.point("a", without) is None


def page(device=DEVICE, **cases) -> Page:
    return Page(html.render([run(cases, device=device)]))


def test_plot_and_column():
    fast = case(work=WORK, timing=timing(reference_s=8e-6, candidate_s=2e-6))
    shown = page(fast=fast, bare=case(), slow=fast).text
    assert "x roofline" in shown
    assert "2.00x" in shown
    assert "Peaks: NVIDIA H200 Tensor Core GPU data sheet, SXM; 1 case without work" in shown
    assert "FLOP / byte" in shown
    assert "roofline: the least that this work can take" in shown


def test_device_without_peaks_says_so():
    shown = page(named("NVIDIA B7000"), a=case(work=WORK)).text
    assert "No roofline: the peak rates of NVIDIA B7000 are not in the table" in shown
    assert "FLOP / byte" not in shown


def test_no_work_says_so_and_a_cpu_says_nothing():
    assert "no timed case says how many operations" in page(a=case()).text
    cpu = DEVICE.model_copy(update={"type": "cpu", "name": "a CPU", "capability": None})
    assert "roofline" not in page(cpu, a=case(work=WORK)).text.lower()


def test_absurd_work_does_not_break_the_plot():
    cases = {
        str(i): case(work=Work(flops=flops, bytes=size))
        for i, (flops, size) in enumerate([(1e300, 1e-300), (1e-300, 1e300), (1, 1)])
    }
    assert "FLOP / byte" in page(**cases).text
