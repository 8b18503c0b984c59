"""FastTransformer under torch.compile, and what importing the package loads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from layer_support import assert_accepted, make_pair, masks, small

from fastlayer import make_inputs

CONFIG = small(num_layers=1)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_one_graph_without_breaks_and_routes_decided_at_run_time():
    reference, model = make_pair(CONFIG)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        for mask in masks(3, 24).values():
            assert_accepted(compiled(x, mask), reference(x, mask))
        assert model.last_decision.route == "sdpa"
        assert model.last_decision.contract.compiling
        model.final_norm.bias.add_(1.0)
        assert_accepted(compiled(x), reference(x))


def test_as_a_part_of_a_compiled_program():
    reference, model = make_pair(CONFIG)

    class Program(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x * 0.5).relu()

    x, _ = make_inputs(CONFIG, 1)
    compiled = torch.compile(Program(model), backend="aot_eager")
    with torch.no_grad():
        assert_accepted(compiled(x), reference(x * 0.5).relu())
    assert model.last_decision.route == "sdpa"


def test_gradients_flow_through_a_compiled_model():
    reference, model = make_pair(CONFIG)
    compiled = torch.compile(model, backend="aot_eager")
    x, mask = make_inputs(CONFIG, 1, padding_ratio=0.5)
    compiled(x, mask).square().sum().backward()
    got = model.final_norm.weight.grad.clone()
    assert model.last_decision.route == "dense"
    reference.zero_grad()
    reference(x, mask).square().sum().backward()
    assert_accepted(got, reference.final_norm.weight.grad)


def test_two_models_of_one_shape_are_not_confused():
    first_reference, first = make_pair(CONFIG)
    _, second = make_pair(CONFIG)
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        second.final_norm.bias.add_(3.0)
        expected = first_reference(x)
        for model, shift in ((first, 0.0), (second, 3.0)):
            compiled = torch.compile(model, backend="eager")
            assert_accepted(compiled(x), expected + shift)


def test_importing_the_package_loads_no_compiler():
    code = """
import fastlayer, sys
loaded = {"triton", "torch._dynamo", "torch._inductor"} & sys.modules.keys()
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_works_where_triton_cannot_be_imported():
    code = """
import sys
sys.modules["triton"] = None
import torch, fastlayer
from fastlayer import CASES, FastTransformer, make_inputs
from dataclasses import replace
config = replace(CASES[12], batch_size=2)
model = FastTransformer(config, policy="eligible").eval()
with torch.no_grad():
    model(make_inputs(config, 1)[0])
assert model.last_decision.route == "sdpa", model.last_decision
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
