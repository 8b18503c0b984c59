"""``python -m fastlayer.overhead``: what it reports on a CPU, and that it leaves no trace."""

from __future__ import annotations

import json

import pytest
import torch
from layer_support import make_pair, small

from fastlayer import make_inputs, overhead


def test_the_parts_that_a_cpu_has(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    before = torch.get_float32_matmul_precision()
    arguments = ["--case", "12", "--device", "cpu", "--samples", "3", "--json", str(path)]
    assert overhead.main(arguments) == 0
    assert torch.get_float32_matmul_precision() == before
    report = json.loads(path.read_text())
    assert report["device"]["type"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__
    measured = report["cases"]["12"]
    assert measured["route"] == "sdpa"
    assert not measured["ahead"]
    assert not measured["compiled_freshness"], "on a CPU nothing is compiled for it"
    assert list(measured["microseconds"]) == ["allocation", "decision", "freshness"]
    for taken in measured["microseconds"].values():
        assert 0 < taken["least"] <= taken["median"]
    assert "case 12  sdpa" in capsys.readouterr().out


def test_a_model_without_its_work_is_put_back_together():
    config = small()
    _, model = make_pair(config)
    x, _ = make_inputs(config, 1)
    with torch.no_grad():
        expected = model(x)
        with overhead._idle(model):
            assert model(x) is x
        model.final_norm.bias.add_(1.0)
        assert torch.allclose(model(x), expected + 1.0)


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        overhead.main(["--case", "99"])
    assert "invalid choice: 99" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--samples 0", "argument --samples: given '0'; expected an integer of at least 1"),
        ("--samples x", "argument --samples: given 'x'"),
        ("--device foo", "argument --device: given 'foo'; expected one of cpu"),
        ("--device cuda", "argument --device: given 'cuda'; expected one of cpu"),
        ("--device meta", "argument --device: given 'meta'; expected one of cpu"),
        ("--case 2 14", "given --case 14 on cpu: its decision follows from free memory"),
        ("--case 2 --route fused", "given --case 2 on cpu: "),
        ("--route prefix_stream", "expected --route "),
        ("--json /nonexistent/x", "given '/nonexistent/x'; expected a file in a folder that"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(overhead, "measure", None)
    arguments = arguments.split()
    if "--device" not in arguments:
        arguments += ["--device", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        overhead.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
