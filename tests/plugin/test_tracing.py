"""Attribution: events to kinds, gaps apart, files that other tools read."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from pytest_fastlayer import tracing
from pytest_fastlayer.kernel_kinds import KINDS, kind_of
from pytest_fastlayer.tracing import Event

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # cuBLAS, cuBLASLt, CUTLASS
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1", "GEMM"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "GEMM"),
        ("nvjet_hsh_64x8_64x16_1x1_h_bz_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_tn_align4>", "GEMM"),
        ("ampere_sgemm_128x64_tn", "GEMM"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>", "GEMM"),
        # attention, the same libraries' parts among them
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
         "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128, 4>>",
         "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",
         "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7>", "attention"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float>", "attention"),
        # normalisation
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
         "normalisation"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>",
         "normalisation"),
        ("triton_per_fused_native_layer_norm_0", "normalisation"),
        # copies
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 2, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<4u>>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
         "copies"),
        # elementwise and reductions
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4, masked_fill_kernel(TensorIterator&)>",
         "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
         "elementwise"),
        ("void at::native::triu_tril_kernel<bool, int, true>", "elementwise"),
        ("void distribution_elementwise_grid_stride_kernel<float, 4, normal_kernel>",
         "elementwise"),
        ("triton_poi_fused_add_gelu_1", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>", "reductions"),
        # Triton kernels by their functions' names
        ("single_kernel", "fused layers"),
        ("wavefront_kernel", "fused layers"),
        ("layer_kernel", "fused layers"),
        ("strips_kernel", "fused layers"),
        ("states_kernel", "attention"),
        ("moments_kernel", "attention"),
        ("normalise_kernel", "normalisation"),
        ("activate_kernel", "elementwise"),
        # operators, for a CPU
        ("aten::addmm", "GEMM"),
        ("aten::mm", "GEMM"),
        ("aten::_softmax", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm", "normalisation"),
        ("aten::cat", "copies"),
        ("aten::add", "elementwise"),
        ("aten::mul_", "elementwise"),
        ("aten::sum", "reductions"),
        ("my_kernel", "other"),
        ("address_kernel", "other"),
    ],
)  # fmt: skip
def test_kind_of(name, kind):
    assert kind_of(name) == kind


def test_every_kind_has_names():
    assert all(kind and names for kind, names in KINDS)


def events(*given: tuple[str, float, float]) -> list[Event]:
    return [Event(*one) for one in given]


def by_kind(*forwards: list[Event], with_gaps: bool = True) -> dict[str, tracing.Share]:
    return {s.kind: s for s in tracing.shares(forwards, with_gaps=with_gaps)}


def test_gaps_are_what_lies_between_overlapping_events():
    found = by_kind(
        events(("gemm", 0, 10), ("my_kernel", 5, 10), ("gemm", 25, 5), ("memcpy", 26, 2))
    )
    assert found[tracing.GAPS].microseconds == 10  # from 15 to 25
    assert found[tracing.GAPS].calls == 1
    assert found["GEMM"].microseconds == 15
    assert found["GEMM"].calls == 2
    assert found["copies"].microseconds == 2


def test_a_kernel_inside_another_hides_no_later_gap():
    found = by_kind(events(("gemm", 0, 100), ("memcpy", 10, 5), ("gemm", 120, 10)))
    assert found[tracing.GAPS].microseconds == 20


def test_times_are_per_forward_and_between_forwards_is_nobodys():
    found = by_kind(
        events(("gemm", 0, 10), ("gemm", 14, 10)), events(("gemm", 1000, 10), ("gemm", 1012, 10))
    )
    assert found["GEMM"].microseconds == 20
    assert found["GEMM"].calls == 2
    assert found[tracing.GAPS].microseconds == 3  # 4 and 2; not the 976 between


def test_events_belong_to_the_forward_during_which_they_began():
    given = events(("a", 9, 5), ("b", 12, 5), ("c", 99, 50), ("d", 100, 1), ("e", 300, 1))
    split = tracing.split(given, [100, 10])
    assert [[one.name for one in forward] for forward in split] == [["a", "b", "c"], ["d", "e"]]


def test_a_cpu_has_no_launch_gaps():
    assert tracing.GAPS not in by_kind(events(("gemm", 0, 1), ("gemm", 9, 1)), with_gaps=False)


def test_nothing_seen_is_no_table_of_zeros():
    assert tracing.shares([[], []], with_gaps=True) == []
    assert "us a forward" in tracing.table([])


def test_trace_of_a_cpu_function(tmp_path):
    x = torch.randn(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path, found = tracing.trace(lambda: x @ x, CPU, tmp_path, "a/b c", route="dense")
    assert path.name.startswith("a-b-c-")
    names = {one.get("name") for one in json.loads(path.read_text())["traceEvents"]}
    assert {f"a/b c [dense] forward {i}" for i in range(3)} <= names
    assert found[0].kind == "GEMM"
    text = path.with_suffix(".txt").read_text()
    assert "GEMM" in text
    assert "largest, by operator" in text
    assert "aten::mm" in text


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def names_in(path):
    return {one.get("name") for one in json.loads(path.read_text())["traceEvents"]}


def test_submodules_of_a_reference_are_its_stages(tmp_path):
    model, x = Model().eval(), torch.randn(4, 8)
    path, _ = tracing.trace(lambda: model(x), CPU, tmp_path, "m", route="dense", module=model)
    assert {"dense/layers.0", "dense/layers.1"} <= names_in(path)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_stages_that_change_what_runs_are_not_used(tmp_path):
    class Wary(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hooked = any(one._forward_hooks for one in self.modules())
            return super().forward(x) + 1 if hooked else super().forward(x)

    model, x = Wary().eval(), torch.randn(4, 8)
    path, _ = tracing.trace(lambda: model(x), CPU, tmp_path, "m", route="dense", module=model)
    assert not any("dense/layers" in (name or "") for name in names_in(path))


def test_a_module_that_refuses_hooks_is_traced_without_stages(tmp_path):
    class Judge(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if any(one._forward_hooks for one in self.modules()):
                raise RuntimeError("altered")
            return super().forward(x)

    model, x = Judge().eval(), torch.randn(4, 8)
    path, found = tracing.trace(lambda: model(x), CPU, tmp_path, "m", route="dense", module=model)
    assert "m [dense] forward 0" in names_in(path)
    assert found
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_a_long_forward_runs_once(tmp_path):
    calls = []
    model = Model().eval()

    def forward():
        calls.append(1)
        return model(torch.ones(1, 8))

    path, _ = tracing.trace(forward, CPU, tmp_path, "m", module=model, forward_s=35.0)
    assert len(calls) == 1
    assert "m forward 0" in names_in(path)


def test_bench_writes_a_trace_for_each_arm(project, bench, pytester):
    project("""
def test_layer_norm(paired):
    module = Eager()
    paired("layer_norm", reference=module, candidate=fast(module), inputs=inputs,
           reference_kind="dense", describe=lambda f: {"route": "quick"})
""")
    assert bench("--fastlayer-trace=traces", "-W", "error::UserWarning").ret == 0
    folder = pytester.path / "traces"
    paths = sorted(folder.glob("*.json"))
    assert [path.name for path in paths] == [
        "layer_norm-candidate.json",
        "layer_norm-reference.json",
    ]
    assert "layer_norm-candidate [quick] forward 0" in names_in(paths[0])
    assert "layer_norm-reference [dense] forward 0" in names_in(paths[1])


@pytest.mark.parametrize(
    "names",
    [
        ("n" * 130 + "-reference", "n" * 130 + "-candidate"),
        ("../../x/y z", "..-..-x-y z", "..-..-x-y-z", "x-y-z"),
        ("\u00e9" * 120, "\u00e8" * 120),
        ("..", ".", "/", " ", "\ud800"),
        (".hidden", "hidden"),
    ],
)
def test_every_arm_has_files_of_its_own(names, tmp_path):
    stems = [tracing.stem(name) for name in names]
    assert len(set(stems)) == len(names)
    for stem in stems:
        assert (tmp_path / f"{stem}.json").resolve().parent == tmp_path.resolve()
        assert 0 < len(stem.encode()) <= 200
        assert not stem.startswith(".")


def test_a_plain_name_is_its_own_stem():
    assert tracing.stem("layer_norm-candidate") == "layer_norm-candidate"
    assert tracing.stem("11-reference") == "11-reference"


def test_long_names_overwrite_no_trace(project, bench, pytester):
    project("""
def test_layer_norm(paired):
    module = Eager()
    paired("n" * 130, reference=module, candidate=fast(module), inputs=inputs)
""")
    assert bench("--fastlayer-trace=traces").ret == 0
    assert len(list((pytester.path / "traces").glob("*.json"))) == 2


RAISING = """
def test_layer_norm(paired):
    module = Eager()
    quick = fast(module)
    def candidate(x):
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("not under a profiler\\nsecond line")
        return quick(x)
    paired("layer_norm", reference=module, candidate=candidate, inputs=inputs)
"""


def test_what_raises_only_under_the_profiler_keeps_its_record(project, bench, record, pytester):
    project(RAISING)
    result = bench("--fastlayer-trace=traces")
    result.assert_outcomes(passed=1)
    timing = record()["cases"]["layer_norm"]["timing"]
    assert timing["speedup"] > 2
    assert "no trace of the candidate: RuntimeError: not under a profiler" in timing["warnings"]
    result.stdout.fnmatch_lines(["*no trace of the candidate: RuntimeError: not under*"])
    traces = [path.name for path in (pytester.path / "traces").glob("*.json")]
    assert traces == ["layer_norm-reference.json"]


FLOOD = """
import logging
import torch

def test_fails(caplog):
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    compiled(torch.ones(3))
    logging.getLogger("torch." + "__trace").debug("structured")
    logging.getLogger("mine").warning("for the user")
    print("SEEN", any(one.msg == "structured" for one in caplog.records))
    assert False
"""


def test_torchs_structured_trace_does_not_flood_a_failure(pytester):
    pytester.makepyfile(FLOOD)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--log-level=DEBUG")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*torch.__trace:*")
    result.stdout.fnmatch_lines(["*WARNING*mine*for the user*"])
