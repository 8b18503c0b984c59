"""stream(): any source, in order, at any length, with errors that name the sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from extreme_support import budget, inputs, reference

from fastlayer import (
    FastTransformer,
    InputError,
    ReferenceTransformer,
    RouteError,
    TransformerConfig,
    streaming,
)
from fastlayer.routes import prefix_body
from fastlayer.routes.folding import fold
from fastlayer.streaming import StreamReport, stream

CONFIG = TransformerConfig(3, 40, 32, 4, 48, 2, True)


def collect(model: torch.nn.Module, source: object, **options: object) -> tuple:
    results: list[torch.Tensor] = []

    def sink(index: int, output: torch.Tensor) -> None:
        assert index == len(results)
        results.append(output.clone())

    report = stream(model, source, sink, **options)
    return results, report


def test_a_batch_is_a_source() -> None:
    model = reference(CONFIG)
    x = inputs(CONFIG)
    results, report = collect(model, x)
    torch.testing.assert_close(torch.stack(results), model(x), rtol=0, atol=1e-5)
    assert isinstance(report, StreamReport)
    assert (report.samples, report.tokens) == (3, 120)
    assert report.notes == (
        "attention: 0 layer runs polynomial, 6 exact; 6 because the launch asks for it",
    )


@pytest.fixture
def high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("high_precision")
def test_generators_lengths_and_float16() -> None:
    model = reference(CONFIG)
    x = inputs(CONFIG)
    lengths = [40, 0, 7]
    mask = torch.arange(40)[None] < torch.tensor(lengths)[:, None]

    def samples() -> Iterator[tuple[torch.Tensor, int]]:
        for row, length in zip(x, lengths, strict=True):
            # Padding may hold anything, and samples differ in length.
            padded = torch.full((40, 32), float("nan"))
            padded[:length] = row[:length]
            yield padded, length

    results, report = collect(model, samples(), launch={"attention": "exact", "compute": "float16"})
    assert budget(torch.stack(results), model(x, mask)) <= 0.6
    assert not results[1].any()
    assert report.tokens == 47


def test_samples_of_different_lengths() -> None:
    model = reference(CONFIG)
    x = inputs(CONFIG)[0]
    sizes = [1, 40, 17, 40]
    results, _ = collect(model, [x[:n] for n in sizes])
    for size, result in zip(sizes, results, strict=True):
        torch.testing.assert_close(result, model(x[None, :size])[0], rtol=0, atol=1e-5)


def test_a_memory_mapped_file(tmp_path: Path) -> None:
    model = reference(CONFIG)
    x = inputs(CONFIG)
    path = tmp_path / "samples.npy"
    np.save(path, x.numpy())
    rows = np.load(path, mmap_mode="r+")
    results, _ = collect(model, (torch.from_numpy(row) for row in rows))
    torch.testing.assert_close(torch.stack(results), model(x), rtol=0, atol=1e-5)


def test_progress_counts_what_is_done() -> None:
    model = reference(CONFIG)
    x = inputs(CONFIG)
    seen: list[tuple[int, int | None]] = []
    collect(model, list(x), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    seen.clear()
    collect(model, iter(x), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, None), (2, None), (3, None)]


def test_weights_edited_on_the_way_are_seen() -> None:
    model = FastTransformer.from_reference(reference(CONFIG))
    x = inputs(CONFIG)[0]

    def samples() -> Iterator[torch.Tensor]:
        yield x
        with torch.no_grad():
            model.layers[0].ffn_in.weight.mul_(2.0)
        yield x

    (before, after), _ = collect(model, samples())
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(x[None])[0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("high_precision")
def test_a_fast_model_keeps_what_was_packed_for_the_next_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packing took a fifth of case 14's stream. An edit, and ``refresh``, still pack anew."""
    packed: list[torch.dtype] = []

    def counting(layers: list, dtype: torch.dtype) -> list:
        packed.append(dtype)
        return fold(layers, dtype)

    monkeypatch.setattr(prefix_body, "fold", counting)
    x, launch = inputs(CONFIG), {"compute": "float16"}
    model = FastTransformer.from_reference(reference(CONFIG))
    first, report = collect(model, x, launch=launch)
    again, repeated = collect(model, x, launch=launch)
    assert len(packed) == 1
    assert repeated == report
    assert all(map(torch.equal, first, again))
    with torch.no_grad():
        model.layers[0].ffn_in.weight.mul_(2.0)
    edited, _ = collect(model, x, launch=launch)
    assert len(packed) == 2
    assert not torch.equal(edited[0], first[0])
    model.layers[0].ffn_in.weight.data.mul_(0.5)
    model.refresh()
    restored, _ = collect(model, x, launch=launch)
    assert all(map(torch.equal, restored, first))
    collect(reference(CONFIG), x, launch=launch)
    collect(reference(CONFIG), x, launch=launch)
    assert len(packed) == 5


@pytest.mark.usefixtures("high_precision")
def test_a_streams_workspace_and_notes_are_its_own() -> None:
    model = FastTransformer.from_reference(reference(CONFIG), working_set_bytes=1)
    with torch.no_grad():
        model.layers[0].ffn_in.weight[0] = 1e6  # beyond float16, which is noted
    launch = {"compute": "float16"}
    reports = [collect(model, inputs(CONFIG), launch=launch)[1] for _ in range(2)]
    assert reports[0] == reports[1]
    assert any("float32 ran instead" in note for note in reports[0].notes)

    def sink(index: int, output: torch.Tensor) -> None:
        model(inputs(CONFIG))
        assert model.last_decision is not None
        assert model.last_decision.notes == ()

    assert stream(model, inputs(CONFIG), sink, launch=launch) == reports[0]
    with pytest.raises(ZeroDivisionError):
        stream(model, inputs(CONFIG), lambda index, output: 1 / 0, launch=launch)
    model(inputs(CONFIG))
    assert model.last_decision is not None
    assert model.last_decision.notes == ()
    with pytest.raises(RouteError, match="working_set_bytes"):
        collect(model, inputs(CONFIG), workspace_bytes=1)


REPLACEMENTS = {
    "a parameter": lambda m, other: setattr(
        m.layers[0].ffn_in, "weight", other.layers[0].ffn_in.weight
    ),
    "a submodule": lambda m, other: setattr(m.layers[1], "ffn_in", other.layers[1].ffn_in),
    "a block": lambda m, other: m.layers.__setitem__(0, other.layers[0]),
    "all by assignment": lambda m, other: m.load_state_dict(other.state_dict(), assign=True),
}


@pytest.mark.parametrize("change", REPLACEMENTS)
@pytest.mark.parametrize("place", ["source", "sink"])
@pytest.mark.parametrize("kind", ["reference", "fast", "foreign"])
def test_what_is_replaced_on_the_way_is_seen(change: str, place: str, kind: str) -> None:
    model = reference(CONFIG)
    if kind == "fast":
        model = FastTransformer.from_reference(model)
    elif kind == "foreign":
        model = Foreign(model)
    others = iter([copy.deepcopy(model), copy.deepcopy(model)])
    x = inputs(CONFIG)

    def replace_something() -> None:
        other = next(others, None)
        if other is not None:
            for parameter in other.parameters():
                parameter.mul_(1.5)
            REPLACEMENTS[change](model, other)

    def samples() -> Iterator[torch.Tensor]:
        for row in x:
            if place == "source":
                replace_something()
            yield row

    def sink(index: int, output: torch.Tensor) -> None:
        torch.testing.assert_close(output, model(x[index, None])[0], rtol=0, atol=1e-5)
        if place == "sink":
            replace_something()

    report = stream(model, samples(), sink)
    assert next(others, None) is None
    assert report.samples == 3
    assert len(report.notes) == 1


class Foreign(torch.nn.Module):
    """A class of somebody else's with the reference's names."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.layers, self.final_norm, self.config = model.layers, model.final_norm, CONFIG

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)


def test_a_replacement_of_another_shape_or_device_is_refused() -> None:
    for change, message in (
        (lambda m: setattr(m.layers[0], "ffn_in", torch.nn.Linear(32, 8)), "shape|ffn_in"),
        (lambda m: m.layers.append(copy.deepcopy(m.layers[0])), "layers.2 is not part"),
        (lambda m: m.to("meta"), "a model moved to meta on the way"),
    ):
        model = reference(CONFIG)
        done: list[int] = []

        def sink(
            index: int, _: torch.Tensor, done: list = done, change=change, model=model
        ) -> None:
            done.append(index)
            change(model)

        with pytest.raises((InputError, RouteError), match=message):
            stream(model, inputs(CONFIG), sink)
        assert done == [0]


class Doubled(ReferenceTransformer):
    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(x, valid_token_mask) * 2


class DoubledFast(FastTransformer):
    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(x, valid_token_mask) * 2


@pytest.mark.parametrize("kind", [Doubled, DoubledFast, "patched"])
def test_a_forward_of_the_models_own_is_refused(kind: type | str) -> None:
    if isinstance(kind, str):
        model = reference(CONFIG)
        model.forward = lambda x, mask=None: x
    else:
        model = kind(CONFIG).eval()
    with pytest.raises(RouteError, match=r"forward of its own\. stream runs this route alone") as e:
        stream(model, [], lambda *_: None)
    assert "route=" not in str(e.value)


@pytest.mark.parametrize("size", [0, -1, 1.5, float("nan"), "7", True])
def test_workspaces_are_sizes(size: object) -> None:
    with pytest.raises(InputError, match=r"workspace_bytes: given .*an integer of at least 1"):
        collect(reference(CONFIG), [], workspace_bytes=size)


@pytest.mark.parametrize("launch", [{"warp": 1}, [1], {"rows": 0}, {"attention": "sparse"}])
def test_a_launch_is_looked_over_before_any_sample(launch: object) -> None:
    with pytest.raises(ValueError, match="route 'prefix_stream'"):
        collect(reference(CONFIG), [], launch=launch)


def test_lengths_are_integers_of_any_type() -> None:
    x = inputs(CONFIG)
    lengths = [torch.tensor(5), np.int64(6), 7]
    results, report = collect(reference(CONFIG), list(zip(x, lengths, strict=True)))
    assert report.tokens == 18
    assert [int(r.any(1).sum()) for r in results] == [5, 6, 7]


def test_an_empty_source_is_no_error() -> None:
    results, report = collect(reference(CONFIG), [])
    assert results == []
    assert report == StreamReport(0, 0, ())


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            torch.zeros(2, 40, 32),
            r"sample 1: given \(2, 40, 32\); expected a tensor \[tokens, 32\]",
        ),
        (torch.zeros(40, 31), r"sample 1: given \(40, 31\)"),
        (torch.zeros(40, 32).half(), r"sample 1: given torch.float16; expected torch.float32"),
        ((torch.zeros(40, 32), 41), r"sample 1: given length 41; expected an integer from 0 to 40"),
        ((torch.zeros(40, 32), -1), r"sample 1: given length -1"),
        ((torch.zeros(40, 32), 3.9), r"sample 1: given length 3\.9"),
        ((torch.zeros(40, 32), "7"), r"sample 1: given length '7'"),
        ((torch.zeros(40, 32), True), r"sample 1: given length True"),
        ((torch.zeros(40, 32), torch.tensor(True)), r"sample 1: given length tensor\(True\)"),
        ((torch.zeros(40, 32), torch.ones(40, dtype=torch.bool)), r"sample 1: given length tensor"),
        ((torch.zeros(40, 32), 1, 2), r"sample 1: given a tuple of 3"),
        (torch.zeros(40, 32).to_sparse(), r"sample 1: given layout torch.sparse_coo"),
        (torch.zeros(40, 32, device="meta"), r"sample 1: given meta; expected cpu"),
        ([1.0], r"sample 1: given list"),
    ],
)
def test_errors_name_the_sample(sample: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        collect(reference(CONFIG), [torch.zeros(40, 32), sample])


def test_what_cannot_be_streamed_says_why() -> None:
    x = torch.zeros(40, 32)
    with pytest.raises(RouteError, match="not causal"):
        collect(reference(TransformerConfig(1, 40, 32, 4, 48, 2, False)), [x])
    with pytest.raises(RouteError, match="working_set_bytes is 1,000"):
        collect(reference(CONFIG), [x], workspace_bytes=1000)


@pytest.mark.parametrize("change", ["a hook", "an inner hook", "a forward", "eps", "a class"])
def test_an_altered_model_is_refused_even_midway(change: str) -> None:
    """Only its parameters are streamed through: whatever else changes its result must be named."""
    model = reference(CONFIG)

    def alter() -> None:
        block = model.layers[0]
        if change == "a hook":
            model.register_forward_hook(lambda *_: None)
        elif change == "an inner hook":
            block.ffn_in.register_forward_pre_hook(lambda *_: None)
        elif change == "a forward":
            block.ffn_in.forward = lambda x: x * 0
        elif change == "eps":
            block.norm1.eps = 0.1
        else:
            block.ffn_in.__class__ = torch.nn.modules.linear.NonDynamicallyQuantizableLinear

    done: list[int] = []

    def sink(index: int, output: torch.Tensor) -> None:
        done.append(index)
        alter()

    with pytest.raises(RouteError, match=r"hook|forward|eps|NonDynamically"):
        stream(model, inputs(CONFIG), sink)
    assert done == [0]


def test_float16_is_refused_under_highest_precision() -> None:
    with pytest.raises(ValueError, match=r"expected 'float32'"):
        collect(reference(CONFIG), inputs(CONFIG), launch={"compute": "float16"})


def test_an_error_of_the_sink_is_the_callers() -> None:
    def sink(index: int, output: torch.Tensor) -> None:
        raise ZeroDivisionError(index)

    with pytest.raises(ZeroDivisionError):
        stream(reference(CONFIG), inputs(CONFIG), sink)


@pytest.mark.parametrize("rows", [0, 1, 2, 40])
@pytest.mark.parametrize("piece", [1, 3 * 128, 10**6])
def test_what_crosses_the_bus_in_pieces_arrives_whole(
    rows: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PIECE_BYTES", piece)
    source = torch.randn(rows, 32)
    target = torch.full_like(source, float("nan"))
    streaming._cross(source, target)
    assert torch.equal(source, target)


class FakeEvent:
    """Remembers whether the work it stands for was waited for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited = 0

    def record(self, on: object) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited = self.recorded


class FakeStream:
    def __init__(self) -> None:
        self.awaited: list[object] = []
        self.synchronized = False

    def wait_event(self, event: FakeEvent) -> None:
        self.awaited.append(event)

    def wait_stream(self, stream: object) -> None:
        self.awaited.append(stream)

    def synchronize(self) -> None:
        self.synchronized = True


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """CUDA's streams and events by name only: what is enqueued happens at once, on the host."""
    streams: list[FakeStream] = []

    def new_stream() -> FakeStream:
        streams.append(FakeStream())
        return streams[-1]

    current = new_stream()
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)
    )
    return streams


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_the_overlapped_order_loses_and_mixes_nothing(
    count: int, fake_cuda: list[FakeStream]
) -> None:
    """The slots' bookkeeping; what overlaps truly, only a GPU's tests can show."""
    model = reference(CONFIG)
    generator = torch.Generator().manual_seed(2)
    sizes = [40, 3, 25, 40, 1, 60, 60, 2][:count]
    samples = [torch.randn(size, 32, generator=generator) for size in sizes]
    engine = streaming._Engine(model, 2**30, None)
    pairs = ((x, max(0, len(x) - 1)) for x in samples)
    seen = 0
    with torch.no_grad():
        for x, (output, length) in zip(samples, streaming._overlapped(engine, pairs), strict=True):
            assert length == len(x) - 1
            assert not output[length:].any()
            if length:
                expected = model(x[None, :length])[0]
                torch.testing.assert_close(output[:length], expected, rtol=0, atol=1e-5)
            seen += 1
    assert seen == count
    assert all(each.synchronized for each in fake_cuda)


def test_uploads_run_one_ahead_and_wait_for_the_slots_last_reader(
    fake_cuda: list[FakeStream],
) -> None:
    engine = streaming._Engine(reference(CONFIG), 2**30, None)
    drawn: list[int] = []

    def samples() -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(5):
            drawn.append(index)
            yield torch.zeros(8, 32), 8

    outputs = streaming._overlapped(engine, samples())
    next(outputs)
    # Result 0 is handed on after sample 1 was computed and sample 2's upload was issued.
    assert drawn == [0, 1, 2]
    next(outputs)
    assert drawn == [0, 1, 2, 3]
    outputs.close()
    _, upload, download = fake_cuda
    assert any(isinstance(each, FakeEvent) for each in upload.awaited)
    assert any(isinstance(each, FakeStream) for each in upload.awaited), "new memory waits"
    assert download.awaited
