"""Settings of a quantized base: which are accepted, and the errors."""

import dataclasses

import pytest

from jaxlora.config.run_file import run_config
from jaxlora.errors import ConfigError
from jaxlora.pallas_kernels import OPTIONS, Int8Weight, WeightOptions
from jaxlora.pallas_kernels.quantized.weight import setting


def run(**more):
    jobs = [{"name": "a", "data": {"path": "a.jsonl"}}]
    return run_config({"model": "m", "jobs": jobs, **more})


def test_settings_of_a_quantized_base():
    args = {"weight_copies": 1, "fp8_backward": True}
    found = run(quantize_base="fp8", quantize_base_args=args, keep_bf16=["down_proj"])
    assert (found.quantize_base, found.quantize_base_args) == ("fp8", args)
    assert run().quantize_base is None and not run().quantize_base_args
    # A run that is written with all its settings can be read again.
    for config in (run(), run(quantize_base="nf4"), found):
        written = config.model_dump(mode="json")
        again = run_config(written)
        assert again == config
        for name, value in again.quantize_base_args.items():
            assert type(value) is type(args[name])
    # The format, which may be that of the checkpoint, says which settings there are.
    assert run(quantize_base_args={"group": 3}).quantize_base_args == {"group": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_base": "fp4"}, "quantize_base.*'fp8', 'int8', 'mxfp4' or 'nf4'"),
        ({"keep_bf16": ["down_proj"]}, "set quantize_base"),
        ({"quantize_base": "fp8", "keep_bf16": "down_proj"}, "keep_bf16"),
        ({"quantize_base": "fp8", "quantize_base_args": 2}, "quantize_base_args"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(**settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nf4", {"fp8_backward": False}, "'fp8_backward' is no setting of nf4"),
        ("nf4", {"double_quant": False}, "no setting of nf4, which has none"),
        ("fp8", {"copies": 1}, "of fp8, which has fp8_backward, weight_copies"),
        ("fp8", {"weight_copies": 3}, "weight_copies=3 must be one of auto, 1, 2"),
        ("fp8", {"weight_copies": True}, "must be one of auto, 1, 2"),
        ("fp8", {"fp8_backward": 0}, "fp8_backward=0 must be one of true, false"),
        ("fp8", {"fp8_backward": False, "weight_copies": 2}, "does not compute"),
    ],
)
def test_settings_that_a_format_refuses(name, settings, message):
    with pytest.raises(ValueError, match=message):
        OPTIONS[name]().with_settings(settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped(WeightOptions):
    weight = Int8Weight

    group: int = setting(32, values=(16, 32), is_fixed=True)
    is_fast: bool = setting(False, values=(True, False))


def test_quantized_weights_keep_what_they_are_quantized_with():
    assert Grouped().with_settings({"group": 16}).group == 16
    assert Grouped().of_same_weights({"group": 32, "is_fast": True}).is_fast
    with pytest.raises(
        ValueError, match=r"group is 16, and the weights are .* with 32"
    ):
        Grouped().of_same_weights({"group": 16})
