"""Behaviour that only a CUDA device shows: graphs, freshness after capture, memory bounds."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch
from layer_support import assert_accepted, make_pair, masks, small

from fastlayer import CASES, FastTransformer, MaskKind, make_inputs
from fastlayer.routes import launches
from fastlayer.routes.batch_stream import working_set_samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GRAPH = {"packed_qkv": True, "linear": "aten", "execution": "graph"}
CONFIG = small(d_model=64, seq_len=40)


@pytest.fixture(autouse=True)
def _high_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        yield
    torch.set_float32_matmul_precision(before)


def graph_pair(config=CONFIG, **options):
    return make_pair(config, "cuda", route="sdpa", launch=GRAPH, **options)


def live_graphs(model: FastTransformer) -> int:
    return len(model._runtime.state.graphs)


@pytest.mark.parametrize("case", [case for case in CASES if case != 14])
@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_every_sdpa_launch_is_accepted_on_each_case(case, padding):
    config = replace(CASES[case], batch_size=min(CASES[case].batch_size, 8))
    x, mask = make_inputs(config, 1234, "cuda", padding)
    reference, probe = make_pair(config, "cuda", route="sdpa")
    expected = reference(x, mask)
    probe(x, mask)
    for launch in launches("sdpa", probe.last_decision.contract):
        if launch["execution"].startswith("compiled"):
            continue
        model = FastTransformer.from_reference(reference, route="sdpa", launch=launch)
        assert_accepted(model(x, mask), expected)
        assert model.last_decision.notes == ()


@pytest.mark.parametrize("execution", ["compiled", "compiled_graph"])
def test_compiled_launches_are_accepted(execution):
    reference, model = make_pair(
        CONFIG, "cuda", route="sdpa", launch={**GRAPH, "execution": execution}
    )
    x, _ = make_inputs(CONFIG, 7, "cuda")
    for _ in range(3):
        assert_accepted(model(x), reference(x))
    assert model.last_decision.notes == ()


def test_more_bodies_are_compiled_than_one_code_object_may_be():
    launch = {**GRAPH, "execution": "compiled_graph"}
    for batch in range(1, 12):
        config = replace(CONFIG, batch_size=batch, num_layers=1)
        reference, model = make_pair(config, "cuda", route="sdpa", launch=launch)
        x, _ = make_inputs(config, 7, "cuda")
        assert_accepted(model(x), reference(x))
        assert model.last_decision.notes == ()


def test_under_inference_mode():
    with torch.inference_mode():
        reference, model = graph_pair()
        x, _ = make_inputs(CONFIG, 1, "cuda")
        for _ in range(2):
            assert_accepted(model(x), reference(x))
        model.layers[0].attention.q_proj.weight.mul_(2.0)
        model.final_norm.bias.add_(1.0)
        assert_accepted(model(x), reference(x))
    assert model.last_decision.notes == ()


@pytest.mark.parametrize("kind", list(masks(3, 40)))
@pytest.mark.parametrize("causal", [True, False])
def test_graphs_serve_every_mask(kind, causal):
    config = replace(CONFIG, causal=causal)
    reference, model = graph_pair(config)
    x, _ = make_inputs(config, 3, "cuda")
    mask = masks(config.batch_size, config.seq_len, "cuda")[kind]
    for _ in range(2):
        assert_accepted(model(x, mask), reference(x, mask))
    assert model.last_decision.notes == ()
    assert live_graphs(model) == 1


def test_a_held_output_is_not_overwritten():
    reference, model = graph_pair()
    first, _ = make_inputs(CONFIG, 1, "cuda")
    second, _ = make_inputs(CONFIG, 2, "cuda")
    held = model(first)
    kept = held.clone()
    model(second)
    assert torch.equal(held, kept)
    assert_accepted(held, reference(first))


def test_new_values_at_the_same_address_are_seen():
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    model(x)
    x.copy_(make_inputs(CONFIG, 2, "cuda")[0])
    assert_accepted(model(x), reference(x))


def test_a_mask_written_at_the_same_address_changes_its_kind():
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    mask = torch.ones(CONFIG.batch_size, CONFIG.seq_len, dtype=torch.bool, device="cuda")
    model(x, mask)
    assert model.last_decision.contract.mask is MaskKind.FULL
    mask[0, 5:] = False
    assert_accepted(model(x, mask), reference(x, mask))
    assert model.last_decision.contract.mask is MaskKind.RIGHT_PADDED
    mask[0, 7] = True
    assert_accepted(model(x, mask), reference(x, mask))
    assert model.last_decision.contract.mask is MaskKind.IRREGULAR


def test_another_mask_of_the_same_kind_reuses_the_graph():
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    for length in (5, 11, 40 - 1):
        mask = torch.arange(CONFIG.seq_len, device="cuda").expand(CONFIG.batch_size, -1) < length
        assert_accepted(model(x, mask), reference(x, mask))
    assert live_graphs(model) == 1


EDITS = {
    "in place": lambda m: m.layers[0].attention.q_proj.weight.mul_(1.5),
    "bias in place": lambda m: m.layers[1].ffn_out.bias.add_(0.25),
    "load_state_dict": lambda m: m.load_state_dict(
        {name: value * 1.1 for name, value in m.state_dict().items()}
    ),
    "data swap": lambda m: setattr(m.final_norm.weight, "data", m.final_norm.weight.data * 2),
    "new parameter": lambda m: setattr(
        m.layers[0].ffn_in, "bias", torch.nn.Parameter(m.layers[0].ffn_in.bias + 0.5)
    ),
    "round trip": lambda m: m.cpu().cuda(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edits_after_capture_are_seen(edit):
    _, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    before = model(x)
    edit(model)
    after = model(x)
    dense = FastTransformer.from_reference(model, config=CONFIG, route="dense")
    assert_accepted(after, dense(x))
    assert not torch.equal(after, before) or edit is EDITS["round trip"]


def test_a_deep_copy_captures_graphs_of_its_own():
    _, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    first = model(x)
    twin = copy.deepcopy(model)
    twin.final_norm.bias.add_(1.0)
    assert_accepted(twin(x), first + 1.0)
    assert torch.equal(model(x), first)


def test_the_least_recently_used_graph_is_released():
    reference, model = graph_pair()
    graphs = model._runtime.state.graphs
    graphs.limit = 2
    inputs = [make_inputs(replace(CONFIG, batch_size=b), b, "cuda")[0] for b in (1, 2, 3)]
    for x in inputs:
        model(x)
    assert len(graphs) == 2
    for x in (*inputs, inputs[0]):
        assert_accepted(model(x), reference(x))
    assert len(graphs) == 2


def test_graphs_that_share_a_pool_do_not_disturb_each_other():
    reference, model = graph_pair()
    inputs = [make_inputs(replace(CONFIG, batch_size=b), b, "cuda")[0] for b in (1, 2, 3, 4)]
    outputs = [model(x) for x in inputs]
    outputs += [model(x) for x in reversed(inputs)]
    for x, got in zip([*inputs, *reversed(inputs)], outputs, strict=True):
        assert_accepted(got, reference(x))


def test_each_stream_has_its_own_graph():
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    expected = reference(x)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outputs = []
    torch.cuda.synchronize()
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            outputs.append(model(x))
    torch.cuda.synchronize()
    for output in outputs:
        assert_accepted(output, expected)


def test_a_failed_capture_runs_eagerly_and_says_so():
    notes: list[str] = []

    def synchronising(x, mask):
        return x * float(x.sum().item() > 0)

    _, model = graph_pair()
    call = model._runtime.state.graphs.bind(synchronising, notes.append)
    x = torch.ones(2, 3, 4, device="cuda")
    assert torch.equal(call(x, None), x)
    assert torch.equal(call(-x, None), torch.zeros_like(x))
    assert len(notes) == 1
    assert "graph capture failed" in notes[0]
    later, _ = make_inputs(CONFIG, 1, "cuda")
    model(later)
    assert model.last_decision.notes == ()


def test_a_model_that_goes_during_a_capture_does_not_break_it_off():
    """A model is part of cycles: the collector frees its graphs whenever it happens to run."""
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    model(x)
    assert model.last_decision.launch["execution"] == "graph"
    static, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    gc.disable()
    try:
        del model
        with torch.cuda.graph(graph):
            gc.collect()
            static.add_(1)
    finally:
        gc.enable()
    graph.replay()
    assert static.tolist() == [1.0] * 4
    _, another = graph_pair()
    assert_accepted(another(x), reference(x))


def test_a_failed_capture_shows_in_last_decision(monkeypatch):
    from fastlayer import graphs

    def refuse(*args):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_Captured", refuse)
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    for _ in range(2):
        assert_accepted(model(x), reference(x))
        assert any("capture failed" in note for note in model.last_decision.notes)


def test_within_a_callers_capture_nothing_is_captured_or_read_back():
    reference, model = graph_pair()
    x, _ = make_inputs(CONFIG, 1, "cuda")
    mask = masks(CONFIG.batch_size, CONFIG.seq_len, "cuda")["holed"]
    expected = reference(x, mask)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x, mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, mask)
    assert model.last_decision.contract.capturing
    out.fill_(float("nan"))
    graph.replay()
    assert_accepted(out, expected)
    mask.fill_(True)
    graph.replay()
    assert_accepted(out, reference(x, mask))


def test_batch_stream_stays_within_its_working_set():
    config = replace(CASES[6], batch_size=2048)
    bound = 256 * 2**20
    reference, model = make_pair(config, "cuda", route="batch_stream", working_set_bytes=bound)
    x, _ = make_inputs(config, 1, "cuda")
    expected = reference(x)
    model(x)
    del reference
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = model(x)
    peak = torch.cuda.max_memory_allocated() - before - got.numel() * 4
    assert_accepted(got, expected)
    assert peak <= bound * 1.2


def test_case_6_peaks_within_its_bound():
    config = CASES[6]
    model = FastTransformer(config, route="batch_stream").eval().cuda()
    x, _ = make_inputs(config, 1, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = model(x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - got.numel() * 4
    assert peak <= int(2.4 * 2**30)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_batch_stream_halves_its_slices_when_memory_runs_out(monkeypatch, execution):
    from fastlayer.routes.slices import Slices

    config = replace(CASES[1], batch_size=48)
    reference, model = make_pair(
        config,
        "cuda",
        route="batch_stream",
        launch={**GRAPH, "execution": execution},
        working_set_bytes=config.linear_bytes() // 3,
    )
    one = Slices._one

    def limited(self, out, x, mask):
        if len(x) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        one(self, out, x, mask)

    monkeypatch.setattr(Slices, "_one", limited)
    x, mask = make_inputs(config, 1, "cuda", 0.5)
    assert_accepted(model(x, mask), reference(x, mask))
    assert any("ran out of memory" in note for note in model.last_decision.notes)
    assert working_set_samples(model.last_decision.contract) > 5


def test_attention_never_takes_the_quadratic_path():
    config = small(batch_size=1, seq_len=16_384, d_model=64, num_layers=1)
    _, model = make_pair(config, "cuda", route="sdpa")
    x, _ = make_inputs(config, 1, "cuda")
    model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < config.score_bytes() // 8


def test_an_unlisted_device_runs_dense_under_the_strict_policy():
    from fastlayer import Admissions

    reference, model = make_pair(CONFIG, "cuda", policy="strict", admissions=Admissions())
    x, _ = make_inputs(CONFIG, 1, "cuda")
    assert torch.equal(model(x), reference(x))
    assert model.last_decision.route == "dense"
    assert "--fastlayer-admit" in model.explain(x)


def test_wrapped_in_torch_compile():
    reference, model = graph_pair()
    compiled = torch.compile(model, fullgraph=True)
    x, mask = make_inputs(CONFIG, 1, "cuda", 0.5)
    for _ in range(3):
        assert_accepted(compiled(x, mask), reference(x, mask))
    assert model.last_decision.route == "sdpa"
