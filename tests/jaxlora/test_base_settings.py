"""Settings of a quantized base: which are accepted, and the errors."""

import pytest

from jaxlora.config.run_file import run_config
from jaxlora.errors import ConfigError


def run(**more):
    jobs = [{"name": "a", "data": {"path": "a.jsonl"}}]
    return run_config({"model": "m", "jobs": jobs, **more})


def test_settings_of_a_quantized_base():
    found = run(quantize_base="fp8", fp8_weight_copies=1, keep_bf16=["down_proj"])
    assert (found.quantize_base, found.fp8_backward) == ("fp8", True)
    assert found.fp8_settings == ["fp8_weight_copies"]
    assert found.replace(remat="layer").fp8_settings == ["fp8_weight_copies"]
    assert run().quantize_base is None and not run().fp8_settings
    # A run that is written with all its settings can be read again.
    for config in (run(), run(quantize_base="nf4"), found):
        written = config.model_dump(mode="json")
        again = run_config(written)
        assert (again, again.fp8_settings) == (config, config.fp8_settings)
    # Whether the checkpoint is fp8 is known only when it is read.
    assert run(fp8_backward=False).fp8_settings == ["fp8_backward"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_base": "fp4"}, "quantize_base.*'fp8', 'int8' or 'nf4'"),
        ({"quantize_base": "nf4", "fp8_backward": False}, "fp8_backward has a meaning"),
        ({"quantize_base": "int8", "fp8_weight_copies": 1}, "for fp8 only"),
        ({"quantize_base": "fp8", "fp8_weight_copies": 3}, "'auto', 1 or 2"),
        ({"quantize_base": "fp8", "fp8_weight_copies": True}, "auto, 1 or 2"),
        (
            {"quantize_base": "fp8", "fp8_backward": False, "fp8_weight_copies": 2},
            "does not compute",
        ),
        ({"keep_bf16": ["down_proj"]}, "set quantize_base"),
        ({"quantize_base": "fp8", "keep_bf16": "down_proj"}, "keep_bf16"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(**settings)
