"""A rival that computed something else would be no rival."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rivals import HalfSdpa, graphed_reference, rivals, transformer_encoder

from fastlayer import CASES, ReferenceTransformer, make_inputs
from pytest_fastlayer import assert_elementwise


@pytest.mark.parametrize("case_id", [2, 7])
def test_rivals_compute_the_reference(case_id):
    config = replace(CASES[case_id], batch_size=2)
    torch.manual_seed(1234)
    reference = ReferenceTransformer(config).eval()
    x, _ = make_inputs(config, 1234)
    with torch.no_grad():
        expected = reference(x)
        assert_elementwise(transformer_encoder(reference, config)(x), expected, atol=1e-4, rtol=0)
        # fp16 outputs of GEMMs that feed the residual cost more than a kernel of ours may.
        assert_elementwise(HalfSdpa(reference, config)(x), expected, atol=2e-2, rtol=2e-2)


def test_a_cpu_has_no_graphs_to_offer():
    assert list(rivals(torch.nn.Linear(1, 1), CASES[2], "cpu")) == ["transformer_encoder"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_graphed_reference_is_the_reference():
    config = replace(CASES[2], batch_size=3)
    torch.manual_seed(1234)
    reference = ReferenceTransformer(config).cuda().eval()
    forward = graphed_reference(reference, config)
    for seed in (1, 2):
        x, _ = make_inputs(config, seed, "cuda")
        with torch.no_grad():
            assert_elementwise(forward(x), reference(x), atol=1e-6, rtol=0)
