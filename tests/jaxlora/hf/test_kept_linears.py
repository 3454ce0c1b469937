"""Which linears of a quantized base keep their weights."""

import pytest

from jaxlora.errors import ConfigError
from jaxlora.hf.base_format import kept_linears
from jaxlora.models.registry import model_config
from tests import tiny

MODEL = model_config(tiny.CONFIG)


def test_expressions_match_the_end_of_names():
    assert kept_linears(MODEL, ()) == ()
    assert kept_linears(MODEL, ["down_proj", r"0\.mlp\..*"]) == (
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.up_proj",
        "layers.0.mlp.down_proj",
        "layers.1.mlp.down_proj",
    )
    assert len(kept_linears(MODEL, ["layers.1.*"])) == 7


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("donw_proj", "'donw_proj' matches no linear.*mlp.down_proj"),
        ("lm_head", "never quantized"),
        ("proj", "matches no linear"),
        ("(", "not a valid regular expression"),
        (".*", "every linear"),
    ],
)
def test_refused_expressions(expression, message):
    with pytest.raises(ConfigError, match=message):
        kept_linears(MODEL, ["down_proj", expression])
