"""Shape-aware dispatch for a fixed causal Transformer.

``FastTransformer`` computes what ``ReferenceTransformer`` computes, by the fastest route that
recorded evidence admits for the complete shape, the device and the state of the call.
"""

from __future__ import annotations

from fastlayer.admissions import Admission, Admissions, Refusal
from fastlayer.cases import CASES
from fastlayer.config import TransformerConfig
from fastlayer.contract import RuntimeContract
from fastlayer.dispatch import Decision, decide
from fastlayer.errors import (
    AdmissionError,
    ConfigError,
    FastlayerError,
    InputError,
    RouteError,
    UnsafeFallbackError,
)
from fastlayer.inputs import make_inputs
from fastlayer.masks import MaskKind
from fastlayer.model import FastTransformer
from fastlayer.oracle import Oracle
from fastlayer.reference import ReferenceTransformer
from fastlayer.streaming import StreamReport, stream

__all__ = [
    "CASES",
    "Admission",
    "AdmissionError",
    "Admissions",
    "ConfigError",
    "Decision",
    "FastTransformer",
    "FastlayerError",
    "InputError",
    "MaskKind",
    "Oracle",
    "ReferenceTransformer",
    "Refusal",
    "RouteError",
    "RuntimeContract",
    "StreamReport",
    "TransformerConfig",
    "UnsafeFallbackError",
    "decide",
    "make_inputs",
    "stream",
]
