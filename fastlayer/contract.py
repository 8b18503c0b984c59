"""The runtime contract: everything about one call that the choice of a route may depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastlayer.cases import case_of
from fastlayer.config import TransformerConfig
from fastlayer.device import Device
from fastlayer.masks import MaskKind

GIB = 2**30

#: Bytes of an element by dtype name; a dtype that is not listed is not computed with.
ITEMSIZES: dict[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Precision:
    """How float32 matrix products are computed, process-wide.

    ``float32_matmul_precision`` is torch's setting of that name ("highest", "high", "medium"), or
    "mixed" where the settings were changed by torch's newer and older interfaces at once.
    """

    float32_matmul_precision: str = "highest"
    allow_tf32: bool = False


@dataclass(frozen=True, slots=True)
class RuntimeContract:
    """One call, as routing sees it. Frozen and hashable; no tensors.

    Attributes:
        config: the shape with the batch and length of the input itself, not of the construction.
        device: facts of the device the input lies on.
        dtype: the input's dtype by name, e.g. "float32".
        mask: kind of the valid-token mask.
        precision: process-wide float32 matrix-product settings.
        grad: whether autograd would record this call (grad mode on, and some tensor requires it).
        inference: whether inference mode is on.
        training: the module's mode. The computation has no dropout, so it changes nothing.
        autocast: dtype of active autocast by name, or "" where it is off.
        deterministic: ``torch.use_deterministic_algorithms`` is on.
        compiling: torch.compile is tracing around this call.
        capturing: a CUDA graph of the caller's is being captured.
        weights_version: changes whenever a parameter is edited, replaced or moved.
        altered: why the parameters are not the plain tree this package knows, or "".
        available_bytes: memory that the call may take, coarsely rounded down.
        working_set_bytes: bound on a streamed route's memory above input and output.
    """

    config: TransformerConfig
    device: Device
    dtype: str = "float32"
    mask: MaskKind = MaskKind.NONE
    precision: Precision = Precision()
    grad: bool = False
    inference: bool = False
    training: bool = False
    autocast: str = ""
    deterministic: bool = False
    compiling: bool = False
    capturing: bool = False
    weights_version: int = 0
    altered: str = ""
    available_bytes: int = 64 * GIB
    working_set_bytes: int = 2 * GIB

    @property
    def case(self) -> int | None:
        """Id of the disclosed case with this shape, or None."""
        return case_of(self.config)

    @property
    def itemsize(self) -> int:
        return ITEMSIZES.get(self.dtype, 8)

    @property
    def dense_bytes(self) -> int:
        """Peak bytes that the dense path would take above parameters and input."""
        return self.config.dense_bytes(self.itemsize)

    @property
    def dense_fits(self) -> bool:
        return self.dense_bytes <= self.available_bytes

    def with_batch(self, batch_size: int) -> RuntimeContract:
        """The same call on a slice of ``batch_size`` samples."""
        return replace(self, config=replace(self.config, batch_size=batch_size))
