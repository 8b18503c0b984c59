"""A program's launches: the first through Triton, later ones by address, in the kernel's order."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from fastlayer import CASES
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launch import Program, program
from fastlayer.kernels.packing import pack
from fastlayer.reference import ReferenceTransformer

STREAM = 7


class Recorder:
    """Stands for a kernel and for what it compiles to.

    ``kernel[grid](...)`` compiles and launches; of the compiled kernel, ``run(...)`` is Triton's
    launcher, and ``compiled[grid](...)`` calls it with what hooks are given.
    """

    function, packed_metadata = 4242, (8, 1, 1024)

    def __init__(self, kernel: Any, compiles: bool = True) -> None:
        self.arg_names = kernel.arg_names
        self.compiles = compiles
        self.first: list[dict[str, Any]] = []
        self.later: list[dict[str, Any]] = []
        self.observed: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Any:
            if "stream" in named:
                assert named == {"stream": STREAM}
                self.observed.append(dict(zip(self.arg_names, arguments, strict=True)))
                return None
            options = {name: named.pop(name) for name in list(named) if name.islower()}
            assert "num_warps" in options
            values = dict(zip(self.arg_names, arguments, strict=False)) | named
            assert sorted(values) == sorted(self.arg_names), "every argument once"
            self.first.append(values)
            self.grid = grid
            return self if self.compiles else None

        return launch

    def run(self, *arguments: Any) -> None:
        """The interface of launchers in Triton 3.6 and 3.7."""
        *grid, stream, function, kernel, metadata, entry, leave = arguments[:9]
        assert tuple(grid) == self.grid
        assert (stream, function, kernel) == (STREAM, self.function, self.packed_metadata)
        assert metadata is entry is leave is None
        self.later.append(dict(zip(self.arg_names, arguments[9:], strict=True)))


def recorded(launch: Launch, case: int, masked: bool, compiles: bool = True) -> Program:
    torch.manual_seed(0)
    config = CASES[case]
    state = ReferenceTransformer(config).state_dict()
    weights = pack(state, sizes_for(launch, config))
    made = program(launch, config, weights, masked=masked, device="cpu")
    for step in made.steps:
        step.kernel = Recorder(step.kernel, compiles)
    return made


LAUNCHES = [
    (Launch("single", rows=128, warps=8), 1),
    (Launch("wavefront"), 1),
    (Launch("layers", keys=64), 7),
    (Launch("layers", keys=64, apart=True), 7),
    (Launch("strips", rows=16, chunk=128), 2),
]


def assert_same(
    later: dict[str, Any], first: dict[str, Any], moved: dict[int, torch.Tensor]
) -> None:
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            value = moved.get(id(value), value).data_ptr()
        assert later[name] == value, name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("launch", "case"), LAUNCHES)
def test_later_launches_pass_what_the_first_passed(launch: Launch, case: int, masked: bool) -> None:
    made = recorded(launch, case, masked)
    lengths = torch.ones(4, dtype=torch.int32) if masked else None
    pairs = [(torch.zeros(4), torch.ones(4)) for _ in range(3)]
    for x, out in pairs:
        made(x, out, lengths, STREAM)
    for step in made.steps:
        kernel = step.kernel
        assert (len(kernel.first), len(kernel.later), len(kernel.observed)) == (1, 2, 0)
        for (x, out), later in zip(pairs[1:], kernel.later, strict=True):
            assert_same(later, kernel.first[0], {id(pairs[0][0]): x, id(pairs[0][1]): out})


@pytest.mark.parametrize("how", ["added", "in place of the chain"])
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_on_launches_is_told_of_later_ones(
    hook: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorded(Launch("layers", keys=64), 7, masked=False)
    first, x = torch.zeros(4), torch.ones(4)
    made(first, first, None, STREAM)
    made(x, x, None, STREAM)
    runtime = triton.knobs.runtime

    def told(metadata: Any) -> None:
        raise AssertionError("these recorders launch nothing")

    with monkeypatch.context() as patch:
        if how == "added":
            patch.setattr(getattr(runtime, hook), "calls", [told])
        else:
            patch.setattr(runtime, hook, told)
        made(x, x, None, STREAM)
    made(x, x, None, STREAM)
    for step in made.steps:
        assert (len(step.kernel.later), len(step.kernel.observed)) == (2, 1)
        assert_same(step.kernel.observed[0], step.kernel.first[0], {id(first): x})


def test_hooks_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorded(Launch("wavefront"), 1, masked=False)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", None)
    for _ in range(2):
        made(torch.zeros(4), torch.ones(4), None, STREAM)
    assert len(made.steps[0].kernel.later) == 1


@pytest.mark.parametrize(("launch", "case"), LAUNCHES)
def test_the_residual_is_the_input_until_a_layer_is_done(launch: Launch, case: int) -> None:
    made = recorded(launch, case, masked=False)
    x, out = torch.zeros(4), torch.ones(4)
    made(x, out, None, STREAM)
    sources = [step.kernel.first[0]["x_ptr"] is out for step in made.steps]
    layers = [step.scalars[-1] for step in made.steps] if launch.form == "layers" else [0]
    attends = [step.constants.get("ATTEND", False) for step in made.steps]
    assert sources == [layer - attend >= 1 for layer, attend in zip(layers, attends, strict=True)]


def test_what_compiles_nothing_always_goes_through_triton() -> None:
    made = recorded(Launch("wavefront"), 1, masked=False, compiles=False)
    for _ in range(3):
        made(torch.zeros(4), torch.ones(4))
    assert len(made.steps[0].kernel.first) == 3


def test_the_launcher_takes_what_is_passed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Triton's own class, whichever version is installed; only the driver is left out."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    # From 3.9 on the launcher looks at the active driver, and without a GPU there is none.
    drivers = type(importlib.import_module("triton.runtime").driver)
    monkeypatch.setattr(drivers, "active", SimpleNamespace(), raising=False)
    launcher = object.__new__(driver.CudaLauncher)
    for name in ("global_scratch", "profile_scratch"):
        setattr(launcher, f"{name}_size", 0)
        setattr(launcher, f"{name}_align", 1)
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, False
    launcher.arg_annotations = launcher.kernel_signature = None  # of 3.7
    launcher.gsan_enabled = False  # of 3.9
    calls: list[tuple[Any, ...]] = []
    launcher.launch = lambda *arguments: calls.append(arguments)
    made = recorded(Launch("single", rows=128, warps=8), 1, masked=False)
    (step,) = made.steps
    step.kernel.run = launcher
    x, out = torch.zeros(4), torch.ones(4)
    made(x, out, None, STREAM)
    made(x, out, None, STREAM)
    (call,) = calls
    flat = [*call[:-1], *call[-1]] if isinstance(call[-1], tuple) else [*call]
    assert flat[:5] == [step.programs, 1, 1, STREAM, Recorder.function]
    assert flat[-len(step.kernel.arg_names) :][:2] == [x.data_ptr(), out.data_ptr()]
    assert Recorder.packed_metadata in flat
