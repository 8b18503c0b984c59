"""What a call may be given: checks of the input and the mask, each telling what was expected."""

from __future__ import annotations

import torch
from torch import nn

from fastlayer.contract import ITEMSIZES
from fastlayer.errors import InputError


def check_dense(x: object) -> None:
    """Asked before anything of ``x`` is read: it is a tensor with a value for each index.

    Raises:
        InputError: it is none, or sparse, or nested.
    """
    if not isinstance(x, torch.Tensor):
        kind, remedy = type(x).__name__, "Pass the activations, e.g. through torch.as_tensor."
    elif x.is_nested:
        kind = "a nested tensor"
        remedy = "Pad it with .to_padded_tensor(0.0) and mark its tokens in valid_token_mask."
    elif x.layout is not torch.strided:
        kind, remedy = f"a tensor of layout {x.layout}", "Convert it with .to_dense()."
    else:
        return
    raise InputError("x", kind, "a dense tensor [batch, tokens, d_model]", remedy)


def check_shape(x: torch.Tensor, d_model: int) -> None:
    """Raises ``InputError`` where rank or width of ``x`` does not fit the model."""
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise InputError(
            "x",
            f"shape {tuple(x.shape)}",
            f"[batch, tokens, {d_model}]",
            "The last dimension is the model's d_model.",
        )


def check_input(x: torch.Tensor, d_model: int) -> str:
    """The dtype's name.

    Raises:
        InputError: rank, width or dtype of ``x`` does not fit the model.
    """
    check_shape(x, d_model)
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZES:
        raise InputError(
            "x.dtype", dtype, " or ".join(ITEMSIZES), "Convert the input to the model's dtype."
        )
    return dtype


def check_mask(mask: object, x: torch.Tensor) -> None:
    """Whether ``mask`` says of each token of ``x`` if it is valid.

    Raises:
        InputError: its shape, dtype or device is not that of a mask for ``x``.
    """
    given = type(mask).__name__
    if isinstance(mask, torch.Tensor):
        if mask.dtype is torch.bool and mask.shape == x.shape[:2] and mask.device == x.device:
            return
        given = f"shape {tuple(mask.shape)}, {mask.dtype}, on {mask.device}"
    raise InputError(
        "valid_token_mask",
        given,
        f"shape {tuple(x.shape[:2])}, torch.bool, on {x.device}",
        "True marks a valid token; pass None where every token is valid.",
    )


_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def is_lazy(x: torch.Tensor) -> bool:
    """Whether the memory of ``x`` is not what arithmetic on it sees."""
    return _is_functorch_wrapped(x) or x.is_neg()


def unusual(x: torch.Tensor) -> str:
    """Why ``x`` is not a plain tensor that a kernel may read, or ""."""
    if type(x) not in (torch.Tensor, nn.Parameter):
        return f"the input is a {type(x).__name__}, not a plain tensor"
    if is_lazy(x):
        return "the input is transformed by torch.func, or a view with a pending negation"
    if not x.numel():
        return "the input is empty"
    return ""
