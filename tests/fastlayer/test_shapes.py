"""Configurations, what follows from them, and the disclosed cases."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from layer_support import SMALL, make_reference, small

from fastlayer import CASES, ConfigError, TransformerConfig
from fastlayer.cases import REGIMES, case_of


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("seq_len", -1),
        ("d_model", 3.0),
        ("num_heads", True),
        ("ffn_dim", "128"),
        ("num_layers", None),
        ("causal", 1),
    ],
)
def test_an_error_names_field_value_and_rule(field, value):
    with pytest.raises(ConfigError) as caught:
        small(**{field: value})
    assert caught.value.field == field
    assert repr(value) in str(caught.value)
    assert "must be" in str(caught.value)


def test_an_integer_of_any_type_is_a_size():
    config = small(d_model=np.int64(64), num_layers=np.uint8(3))
    assert config == small(d_model=64, num_layers=3)
    assert type(config.d_model) is type(config.num_layers) is int
    for value in (np.float64(64), np.bool_(True), np.int64(0)):
        with pytest.raises(ConfigError, match=r"d_model = .* integer of at least 1"):
            small(d_model=value)


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match="d_model = 32, but it must be a multiple of num_heads"):
        small(num_heads=5)


def test_any_object_with_the_attributes_is_a_config():
    fields = {name: getattr(SMALL, name) for name in TransformerConfig.__dataclass_fields__}
    assert TransformerConfig.of(SimpleNamespace(**fields)) == SMALL
    del fields["ffn_dim"]
    with pytest.raises(ConfigError, match=r"ffn_dim.*no such attribute"):
        TransformerConfig.of(SimpleNamespace(**fields))


def test_parameter_count_is_that_of_the_module():
    for config in (SMALL, small(num_layers=1, d_model=96, num_heads=3)):
        built = sum(p.numel() for p in make_reference(config).parameters())
        assert config.parameter_count == built


def test_flops_by_hand():
    config = TransformerConfig(2, 5, 8, 2, 12, 3)
    projections = 3 * 10 * 2 * (4 * 8 * 8 + 2 * 8 * 12)
    attention = 3 * 2 * 2 * (2 * 2 * 5 * 5 * 4)
    assert config.projection_flops == projections
    assert config.flops == projections + attention


@pytest.mark.parametrize(("causal", "flops"), [(True, 26880 + 2880), (False, 26880 + 4800)])
def test_minimal_work_by_hand(causal, flops):
    # Projections 3 * 10 * 2 * (4 * 64 + 2 * 96) = 26880; attention 4 * 3 * 2 * 8 = 192 for each
    # visible pair, 15 of them under the causal mask and 25 without.
    config = TransformerConfig(2, 5, 8, 2, 12, 3, causal)
    assert config.minimal_flops == flops
    # Input and output 80 elements each; 288 + 212 + 32 parameters a layer, 16 in the last norm.
    assert config.minimal_bytes() == 4 * (2 * 80 + 3 * 532 + 16)
    assert config.minimal_bytes(itemsize=2) == config.minimal_bytes() // 2


def test_minimal_work_of_case_1():
    assert CASES[1].minimal_flops == 6_442_450_944 + 1_082_130_432


def test_dense_scores_of_case_14():
    assert CASES[14].score_elements == 5_120_000_000_000
    assert CASES[14].score_bytes(itemsize=2) == 10_240_000_000_000
    assert CASES[14].head_dim == 64


def test_derived_sizes_of_case_1():
    config = CASES[1]
    assert config.tokens == 8192
    assert config.activation_bytes() == 8192 * 128 * 4
    assert config.score_bytes() == 64 * 4 * 128 * 128 * 4
    assert config.dense_bytes() > 2 * config.score_bytes()
    assert config.linear_bytes() < config.dense_bytes()


def test_the_disclosed_cases():
    assert list(CASES) == list(range(1, 15)) == list(REGIMES)
    assert len(set(CASES.values())) == 14
    assert all(config.causal for config in CASES.values())
    assert CASES[8].head_dim == 256
    for case, config in CASES.items():
        assert case_of(config) == case
    assert case_of(SMALL) is None
