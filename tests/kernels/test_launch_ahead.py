"""A warm call of the route ``fused`` launches before parameters are looked over. No GPU: programs
are replaced by the reference arithmetic on the weights as they were when each was made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fastlayer import CASES, FastTransformer, ReferenceTransformer
from fastlayer.contract import GIB
from fastlayer.device import Device
from fastlayer.kernels import proof
from fastlayer.kernels.unchanged import compiled
from fastlayer.routes import fused

H200 = Device("cuda", "NVIDIA H200", 140 * GIB, (9, 0), 132, 232_448)
CONFIG = replace(CASES[7], batch_size=2, num_layers=1)


class FakeGpu:
    """Which device and stream are current, what was launched on them, and with whose weights."""

    def __init__(self) -> None:
        self.device = self.stream = 0
        self.launched: list[tuple[int, int]] = []
        self.inputs: list[torch.Tensor] = []
        self.made = 0
        self.model: FastTransformer | None = None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()

    def new_program(call: object) -> object:
        fake.made += 1
        then = copy.deepcopy(fake.model)

        def program(
            x: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor | None, stream: int
        ) -> None:
            assert x.is_contiguous()
            assert x.data_ptr() % 16 == 0
            fake.launched.append((fake.device, stream))
            fake.inputs.append(x)
            mask = None if lengths is None else torch.arange(x.shape[1]) < lengths[:, None]
            out.copy_(ReferenceTransformer.forward(then, x, mask))

        return program

    def switched(index: int) -> object:
        fake.device = index
        return nullcontext()

    monkeypatch.setattr("fastlayer.model.probe", lambda device: H200)
    monkeypatch.setattr(proof, "refusal", lambda claim: "")
    monkeypatch.setattr(fused, "_REFUSED", {})
    monkeypatch.setattr(fused, "_current_device", lambda: fake.device)
    monkeypatch.setattr(fused, "current_stream", lambda index: fake.stream)
    monkeypatch.setattr(fused._FusedCall, "_new_program", new_program)
    monkeypatch.setattr(torch.cuda, "device", switched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        yield fake
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def model(gpu: FakeGpu) -> FastTransformer:
    torch.manual_seed(0)
    gpu.model = FastTransformer(CONFIG, route="fused").eval()
    return gpu.model


def inputs() -> torch.Tensor:
    return torch.randn(CONFIG.batch_size, CONFIG.seq_len, CONFIG.d_model)


def test_a_warm_call_launches_before_it_looks(
    gpu: FakeGpu, model: FastTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs()
    model(x)
    state = model._runtime.state
    order: list[int] = []
    refresh = state.refresh

    def looked(capturing: bool = False) -> int:
        order.append(len(gpu.launched))
        return refresh(capturing)

    monkeypatch.setattr(state, "refresh", looked)
    out = model(x)
    assert order == [2], "the second launch came first"
    assert torch.equal(out, ReferenceTransformer.forward(model, x))
    model(x[:1])
    assert order == [2, 2], "another shape is looked over first"
    assert len(gpu.launched) == 3


def replaced(model: FastTransformer, name: str, parameter: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, torch.nn.Parameter(parameter + 1.0))


EDITS: dict[str, Callable[[FastTransformer, str, torch.Tensor], object]] = {
    "in place": lambda model, name, parameter: parameter.add_(1.0),
    "another parameter": replaced,
    "other data": lambda model, name, parameter: setattr(parameter, "data", parameter.data + 1.0),
    "loaded": lambda model, name, parameter: model.load_state_dict(
        model.state_dict() | {name: parameter + 1.0}
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize(
    "name", ["layers.0.norm1.weight", "layers.0.attention.out_proj.weight", "final_norm.bias"]
)
def test_an_edit_drops_what_ran_ahead(
    gpu: FakeGpu,
    model: FastTransformer,
    name: str,
    edit: Callable[[FastTransformer, str, torch.Tensor], object],
) -> None:
    x = inputs()
    for _ in range(2):
        model(x)
    edit(model, name, model.get_parameter(name))
    out = model(x)
    assert len(gpu.launched) == 4, "one ahead, and one with the new weights"
    assert torch.equal(out, ReferenceTransformer.forward(model, x))
    model(x)
    assert len(gpu.launched) == 5


def test_compiled_code_looks_a_model_on_a_gpu_over(gpu: FakeGpu, model: FastTransformer) -> None:
    if compiled() is None:
        pytest.skip("no C compiler")
    x, state = inputs(), model._runtime.state
    assert not state.is_proved
    for _ in range(2):
        model(x)
    assert state.is_proved
    model.final_norm.bias.add_(1.0)
    model(x)
    assert not state.is_proved, "what was collected goes with the weights it was collected of"
    model(x)
    assert state.is_proved


def test_a_hook_drops_what_ran_ahead(gpu: FakeGpu, model: FastTransformer) -> None:
    x = inputs()
    for _ in range(2):
        model(x)
    model.route, model.policy = None, "eligible"
    model(x)
    model.final_norm.register_forward_hook(lambda module, arguments, output: output * 2)
    out = model(x)
    assert torch.equal(out, ReferenceTransformer.forward(model, x))
    assert model.last_decision is not None
    assert model.last_decision.route == "dense"


def test_streams_devices_and_inputs_that_no_kernel_can_read(
    gpu: FakeGpu, model: FastTransformer
) -> None:
    x = inputs()
    expected = ReferenceTransformer.forward(model, x)
    for stream in (0, 7, 0, 7):
        gpu.stream = stream
        assert torch.equal(model(x), expected)
    assert gpu.made == 2, "one program a stream"
    gpu.device = 1
    assert torch.equal(model(x), expected)
    assert gpu.launched[-1] == (0, 7), "on the parameters' device"
    strided = torch.cat([x, x], dim=2)[:, :, : CONFIG.d_model]
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    for view in (strided, shifted, x):
        assert torch.equal(model(view), expected)
    assert gpu.inputs[-1] is x, "an input that a kernel can read is not copied"


def test_lengths_follow_the_mask(gpu: FakeGpu, model: FastTransformer) -> None:
    x = inputs()
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0, 9:] = False
    for _ in range(2):
        assert torch.equal(model(x, mask), ReferenceTransformer.forward(model, x, mask))
    mask[1, 5:] = False
    assert torch.equal(model(x, mask), ReferenceTransformer.forward(model, x, mask))
    mask.fill_(True)
    assert torch.equal(model(x, mask), ReferenceTransformer.forward(model, x))
