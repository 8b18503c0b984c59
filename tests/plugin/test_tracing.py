"""Attribution: events to kinds, gaps apart, files that other tools read."""

from __future__ import annotations

import json

import pytest
import torch

from pytest_fastlayer import tracing


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "GEMM"),
        ("nvjet_tst_128x256", "GEMM"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>", "normalisation"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise"),
        ("aten::addmm", "GEMM"),
        ("my_kernel", "other"),
    ],
)
def test_kind_of(name, kind):
    assert tracing.kind_of(name) == kind


def test_gaps_are_what_lies_between_overlapping_events():
    events = [("gemm", 0, 10), ("my_kernel", 5, 10), ("gemm", 25, 5), ("memcpy", 26, 2)]
    found = {s.kind: s for s in tracing.shares(events, 1, with_gaps=True)}
    assert found["gaps"].microseconds == 10  # from 15 to 25
    assert found["GEMM"].microseconds == 15
    assert found["GEMM"].calls == 2
    assert found["copies"].microseconds == 2


def test_times_are_per_forward():
    found = tracing.shares([("gemm", 0, 10), ("gemm", 10, 20)], 2, with_gaps=True)
    assert {s.kind: s.microseconds for s in found} == {"GEMM": 15, "gaps": 0}


def test_nothing_seen_is_no_table_of_zeros():
    assert tracing.shares([], 3, with_gaps=True) == []


def test_trace_of_a_cpu_function(tmp_path):
    x = torch.randn(64, 64)
    path, found = tracing.trace(lambda: x @ x, torch.device("cpu"), tmp_path, "a/b c")
    assert path.name == "a-b-c.json"
    assert json.loads(path.read_text())["traceEvents"]
    assert found[0].kind == "GEMM"
    assert "GEMM" in path.with_suffix(".txt").read_text()


def test_bench_writes_a_trace_for_each_arm(project, bench, pytester):
    project("""
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs)
""")
    assert bench("--fastlayer-trace=traces").ret == 0
    names = sorted(path.name for path in (pytester.path / "traces").glob("*.json"))
    assert names == ["layer_norm-candidate.json", "layer_norm-reference.json"]
