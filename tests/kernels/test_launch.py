"""A program's launches: the first through Triton, later ones by address, in the kernel's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fastlayer import CASES
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launch import Program, program
from fastlayer.kernels.packing import pack
from fastlayer.reference import ReferenceTransformer


class Recorder:
    """Stands for a kernel: ``kernel[grid](...)`` compiles, ``compiled[grid](...)`` launches."""

    def __init__(self, kernel: Any, compiles: bool = True) -> None:
        self.arg_names = kernel.arg_names
        self.compiles = compiles
        self.first: list[dict[str, Any]] = []
        self.later: list[dict[str, Any]] = []
        self.streams: list[int | None] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Any:
            options = {name: named.pop(name) for name in list(named) if name.islower()}
            assert "num_warps" in options
            values = dict(zip(self.arg_names, arguments, strict=False)) | named
            assert sorted(values) == sorted(self.arg_names), "every argument once"
            self.first.append(values)
            return {grid: self._again} if self.compiles else None

        return launch

    def _again(self, *arguments: Any, stream: int | None) -> None:
        self.later.append(dict(zip(self.arg_names, arguments, strict=True)))
        self.streams.append(stream)


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("launch", "case"), LAUNCHES)
def test_later_launches_pass_what_the_first_passed(launch: Launch, case: int, masked: bool) -> None:
    made = recorded(launch, case, masked)
    lengths = torch.ones(4, dtype=torch.int32) if masked else None
    pairs = [(torch.zeros(4), torch.ones(4)) for _ in range(3)]
    for x, out in pairs:
        made(x, out, lengths, 7)
    for step in made.steps:
        kernel = step.kernel
        assert (len(kernel.first), len(kernel.later), kernel.streams) == (1, 2, [7, 7])
        for (x, out), later in zip(pairs[1:], kernel.later, strict=True):
            moved = {id(pairs[0][0]): x, id(pairs[0][1]): out}
            for name, value in kernel.first[0].items():
                if isinstance(value, torch.Tensor):
                    value = moved.get(id(value), value).data_ptr()
                assert later[name] == value, name


@pytest.mark.parametrize(("launch", "case"), LAUNCHES)
def test_the_residual_is_the_input_until_a_layer_is_done(launch: Launch, case: int) -> None:
    made = recorded(launch, case, masked=False)
    x, out = torch.zeros(4), torch.ones(4)
    made(x, out)
    sources = [step.kernel.first[0]["x_ptr"] is out for step in made.steps]
    layers = [step.scalars[-1] for step in made.steps] if launch.form == "layers" else [0]
    attends = [step.constants.get("ATTEND", False) for step in made.steps]
    assert sources == [layer - attend >= 1 for layer, attend in zip(layers, attends, strict=True)]


def test_what_compiles_nothing_always_goes_through_triton() -> None:
    made = recorded(Launch("wavefront"), 1, masked=False, compiles=False)
    for _ in range(3):
        made(torch.zeros(4), torch.ones(4))
    assert len(made.steps[0].kernel.first) == 3
