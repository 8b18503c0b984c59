"""Warm launches: through Triton once for each kind of arguments, past it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fastlayer.kernels.warm import Warm, WarmLaunch

LAUNCH = WarmLaunch(7, (3,), {"D": 8, "COPY": True}, {"num_warps": 4})


class Kernel:
    """Records what reaches Triton, and what passes it by."""

    arg_names = ("x", "out", "tokens", "D", "COPY")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.warm: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **keywords: Any) -> Any:
            self.compiled.append((grid, arguments, keywords))
            return self.Compiled(self)

        return launch

    class Compiled:
        def __init__(self, kernel: Kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments: self.kernel.warm.append((grid, arguments))


def test_a_second_launch_passes_triton_with_the_same_arguments() -> None:
    kernel = Kernel()
    warm, x, out = Warm(kernel), torch.zeros(4), torch.zeros(4)
    warm(LAUNCH, x, out)
    warm(LAUNCH, out, x)
    [(grid, arguments, keywords)] = kernel.compiled
    assert grid == (7, 1, 1)
    assert arguments[2:] == (3,)
    assert keywords == {"D": 8, "COPY": True, "num_warps": 4}
    [(grid, again)] = kernel.warm
    assert grid == (7, 1, 1)
    assert again[0] is out
    assert again[1] is x
    assert again[2:] == (3, 8, True)


@pytest.mark.parametrize(
    ("launch", "x"),
    [
        (LAUNCH, torch.zeros(8, dtype=torch.float16)),
        (LAUNCH, torch.zeros(8)[1:]),
        (WarmLaunch(8, (3,), LAUNCH.constants, LAUNCH.options), torch.zeros(4)),
        (WarmLaunch(7, (4,), LAUNCH.constants, LAUNCH.options), torch.zeros(4)),
        (WarmLaunch(7, (3,), {"D": 8, "COPY": False}, LAUNCH.options), torch.zeros(4)),
        (WarmLaunch(7, (3,), LAUNCH.constants, {"num_warps": 8}), torch.zeros(4)),
    ],
    ids=["dtype", "alignment", "grid", "scalar", "constant", "option"],
)
def test_what_triton_would_compile_apart_reaches_it(launch: WarmLaunch, x: torch.Tensor) -> None:
    kernel = Kernel()
    warm = Warm(kernel)
    warm(LAUNCH, torch.zeros(4), torch.zeros(4))
    warm(launch, x, torch.zeros(4))
    assert len(kernel.compiled) == 2
    assert kernel.warm == []


def test_the_interpreter_s_launches_are_not_kept() -> None:
    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            return lambda *arguments, **keywords: self.compiled.append((grid,))

    kernel = Interpreted()
    warm = Warm(kernel)
    for _ in range(2):
        warm(LAUNCH, torch.zeros(4), torch.zeros(4))
    assert len(kernel.compiled) == 2
