"""Outputs of a torch callable as a flat list of named leaves.

A callable may return a tensor, a number, or any nesting of tuples, lists, mappings and
dataclasses of them. ``leaves`` names each leaf by the expression that reaches it
(``output[0]['logits']``), which is how the failure messages name it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

#: Layouts and kinds whose elements have no one-to-one address to compare by.
_REFUSED_LAYOUTS = {
    torch.sparse_coo: "call .to_dense() at the end of both callables",
    torch.sparse_csr: "call .to_dense() at the end of both callables",
    torch.sparse_csc: "call .to_dense() at the end of both callables",
    torch.sparse_bsr: "call .to_dense() at the end of both callables",
    torch.sparse_bsc: "call .to_dense() at the end of both callables",
    torch.jagged: "call .to_padded_tensor(...) at the end of both callables",
}

_NUMBERS = (bool, int, float, complex)


class OutputError(TypeError):
    """An output that cannot be compared element by element."""


class Leaf(NamedTuple):
    """One leaf of a nested output: where it is, and the tensor or plain object found there."""

    path: str
    value: Any


def leaves(output: object, path: str = "output") -> Iterator[Leaf]:
    """Leaves of a nested output in a fixed order (mappings by insertion order).

    Containers: dataclass instances, mappings, tuples (also named ones) and lists. Everything
    else is a leaf.
    """
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from leaves(getattr(output, field.name), f"{path}.{field.name}")
    elif isinstance(output, tuple | list):
        names = getattr(output, "_fields", None)
        for index, value in enumerate(output):
            step = f".{names[index]}" if names else f"[{index}]"
            yield from leaves(value, path + step)
    else:
        yield Leaf(path, output)


def tensors(output: object) -> list[torch.Tensor]:
    """The tensors among the leaves of a nested object, numbers left out."""
    return [leaf.value for leaf in leaves(output) if isinstance(leaf.value, torch.Tensor)]


def map_tensors(output: Any, function: Any) -> Any:
    """The same nesting with ``function`` applied to every tensor; other leaves are kept."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, Mapping):
        changed = {key: map_tensors(value, function) for key, value in output.items()}
        return changed if type(output) is dict else type(output)(changed)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {
            f.name: map_tensors(getattr(output, f.name), function)
            for f in dataclasses.fields(output)
            if f.init
        }
        return dataclasses.replace(output, **fields)
    if isinstance(output, tuple | list):
        items = [map_tensors(value, function) for value in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


def as_tensor(leaf: Leaf, arm: str) -> torch.Tensor | None:
    """The leaf as a strided tensor; None for a plain object that is compared by ``==``.

    Raises OutputError for sparse, jagged, quantized and meta tensors and for packed sub-byte
    types, naming the arm, the path, what it is and what to do.
    """
    value = leaf.value
    if isinstance(value, _NUMBERS):
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout in _REFUSED_LAYOUTS:
        kind, advice = str(value.layout), _REFUSED_LAYOUTS[value.layout]
    elif value.layout != torch.strided:
        kind, advice = str(value.layout), "call .to_dense() at the end of both callables"
    elif value.is_nested:
        kind = "a nested tensor"
        advice = "call .to_padded_tensor(...) at the end of both callables"
    elif value.is_quantized:
        kind, advice = "quantized", "call .dequantize() at the end of both callables"
    elif value.is_meta:
        kind, advice = "on the meta device, without data", "give inputs on a real device"
    elif str(value.dtype).startswith("torch.float4"):
        kind = f"{value.dtype}, two elements a byte"
        advice = "compare .view(torch.uint8) for equality, or unpack to a wider type"
    else:
        return value.detach()
    raise OutputError(
        f"{arm} {leaf.path} is {kind}; the elementwise comparison needs a strided tensor of "
        f"whole elements: {advice}"
    )
