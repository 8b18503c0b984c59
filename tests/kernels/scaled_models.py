"""Models that float32 computes with ease, and whose weights are not ordinary."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastlayer import ReferenceTransformer, TransformerConfig
from fastlayer.reference import ReferenceBlock

CONFIG = TransformerConfig(2, 48, 64, 2, 64, 2)

Edit = Callable[[ReferenceBlock], object]


def _scale(layer: torch.nn.Linear, factor: float | torch.Tensor) -> None:
    """Multiplies the output, by channel where ``factor`` is a tensor."""
    factor = torch.as_tensor(factor)
    layer.weight.mul_(factor.reshape(-1, 1))
    layer.bias.mul_(factor)


def _values(factor: float | torch.Tensor) -> Edit:
    def edit(block: ReferenceBlock) -> None:
        _scale(block.attention.v_proj, factor)
        block.attention.out_proj.weight.div_(factor)

    return edit


def _queries(factor: float | torch.Tensor) -> Edit:
    def edit(block: ReferenceBlock) -> None:
        _scale(block.attention.q_proj, factor)
        _scale(block.attention.k_proj, 1 / torch.as_tensor(factor))

    return edit


def _hidden(factor: float) -> Edit:
    def edit(block: ReferenceBlock) -> None:
        _scale(block.ffn_in, factor)
        block.ffn_out.weight.div_(factor)

    return edit


def _attention(factor: float) -> Edit:
    def edit(block: ReferenceBlock) -> None:
        _scale(block.attention.v_proj, factor)
        block.attention.out_proj.weight.mul_(factor)

    return edit


def _bias(name: str, value: float) -> Edit:
    return lambda block: block.attention.get_submodule(f"{name}_proj").bias.add_(value)


#: From 1e-7 to 1e7, another factor for each channel.
_BY_CHANNEL = torch.logspace(-7, 7, CONFIG.d_model)

#: What the float16 routes compute.
ACCEPTED: dict[str, Edit] = {
    "as it is": lambda block: None,
    **{f"v times {factor:g}": _values(factor) for factor in (1.5e5, 1e8, 1e-3, 1e-5, 1e-8)},
    **{f"q times {factor:g}": _queries(factor) for factor in (1.5e5, 1e8, 1e-5, 1e-8)},
    "v and out times 1e4": _attention(1e4),
    "v by channel": _values(_BY_CHANNEL),
    "q by channel": _queries(_BY_CHANNEL),
    **{f"k's bias plus {value:g}": _bias("k", value) for value in (10, 30, 300, 1000)},
    **{f"v's bias plus {value:g}": _bias("v", value) for value in (10, 1000, 1e6)},
    "hidden times 100": _hidden(100),
    "hidden times 0.01": _hidden(0.01),
}

#: What float16 cannot hold: GELU is not linear, and the output projection has a range, too.
REFUSED: dict[str, Edit] = {
    "hidden times 1.5e5": _hidden(1.5e5),
    "hidden times 2e3": _hidden(2e3),
    "hidden times 1e-5": _hidden(1e-5),
    "v and out times 1e7": _attention(1e7),
}


@torch.no_grad()
def scaled(name: str) -> ReferenceTransformer:
    """The model of that name, every block of it edited."""
    torch.manual_seed(1234)
    model = ReferenceTransformer(CONFIG).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for block in model.layers:
        {**ACCEPTED, **REFUSED}[name](block)
    return model
