"""Estimates leave the code of kernels out of traces, and count the same arrays."""

import contextlib
import dataclasses
import json
import pathlib

import jax.numpy as jnp
import pytest

from jaxlora.models.blocks import experts as blocks
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_names, linear_path
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.memory import estimate, planned
from tests import tiny

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# One that reads a reshaped array, and those of the MLP, which share inputs.
ADAPTED = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_spec(**options) -> DecoderSpec:
    config = model_config(tiny.CONFIG | WIDE)
    paths = map(linear_path, linear_names(config))
    fused = {"implementation": "mosaic", "attention": "cudnn"}
    return DecoderSpec(
        config=config,
        options=DecoderOptions(
            dtype=jnp.dtype("bfloat16"), max_segment_tokens=64, **(fused | options)
        ),
        slots=SlotShape(num_slots=2, rank=16, use_dropout=True),
        adapted=tuple(p for p in sorted(paths) if p.endswith(ADAPTED)),
    )


def test_the_same_arrays_are_counted(monkeypatch):
    spec = make_spec()
    with planned_for(planned.TRACED_ON):
        with_kernels = contextlib.nullcontext
        short = estimate._kept_bytes(spec, 256, 64)
        monkeypatch.setattr(estimate, "shapes_only", with_kernels)
        assert estimate._kept_bytes(spec, 256, 64) == short
        assert short > 0


@pytest.mark.parametrize(
    ("remat", "is_fused", "is_tied", "unlike"),
    [
        pytest.param("elementwise", True, False, False, marks=pytest.mark.grid),
        ("mlp", False, True, True),
        pytest.param("none", False, False, False, marks=pytest.mark.grid),
        pytest.param("layer", True, True, True, marks=pytest.mark.grid),
    ],
)
def test_two_layers_keep_what_two_traces_show(remat, is_fused, is_tied, unlike):
    """Also if the second layer has fewer adapters than the first."""
    plain = {} if is_fused else {"implementation": "xla", "attention": "xla"}
    spec = make_spec(remat=remat, **plain)
    config = dataclasses.replace(spec.config, tie_embeddings=is_tied)
    adapted = [p for p in spec.adapted if "0." in p or not unlike or "v_proj" in p]
    spec = dataclasses.replace(spec, config=config, adapted=tuple(adapted))
    with planned_for(planned.TRACED_ON):
        found = estimate._step_bytes(spec, 64)
        (one, fixed), (two, fixed_of_two) = (
            estimate._kept(
                estimate._of_layers(spec, tuple(range(n)), remat=remat), 4096, 64
            )
            for n in (1, 2)
        )
    assert found.kept_by_layer == pytest.approx(two - one, rel=1e-6)
    assert found.kept_by_layer > 0
    assert found.kept_at_ends == pytest.approx(2 * one - two, abs=0.01)
    # Both layers may keep one scalar.
    assert (abs(fixed_of_two - 2 * fixed) <= 8) == (not unlike)


def test_experts_that_no_slot_adapts_have_the_padding_of_one():
    path = pathlib.Path(__file__).parents[3] / "golden/models/qwen3_moe/config.json"
    config = model_config(json.loads(path.read_text()))

    def padding(num_slots, adapted):
        slots = SlotShape(num_slots=num_slots, rank=4)
        own = {"config": config, "adapted": (f"layers.0.{adapted}",), "slots": slots}
        spec = dataclasses.replace(make_spec(), **own)
        names = (field.name for field in dataclasses.fields(estimate.StepBytes))
        nothing = estimate.StepBytes(**dict.fromkeys(names, 0.0))
        return estimate._with_padding(nothing, spec, 1024).transient

    attention, experts = "self_attn.q_proj", "mlp.experts.up_proj"
    assert padding(8, attention) == padding(1, attention) == padding(1, experts)
    assert padding(8, experts) > 3 * padding(1, experts)


def spec_of_experts(num_slots: int, **options) -> DecoderSpec:
    """A layer with nine experts, of which a token has three."""
    path = pathlib.Path(__file__).parents[3] / "golden/models/olmoe/config.json"
    sizes = WIDE | {"num_hidden_layers": 1}
    return dataclasses.replace(
        make_spec(**options),
        config=model_config(json.loads(path.read_text()) | sizes),
        adapted=("layers.0.mlp.experts.up_proj",),
        slots=SlotShape(num_slots=num_slots, rank=4, use_dropout=False),
    )


@pytest.mark.parametrize("most", [None, 1])
def test_blocks_of_experts_rows_have_the_size_of_the_program(most, monkeypatch):
    spec, run, found = spec_of_experts(2, most_adapters=most), blocks.route_rows, []

    def noted(*args, block_rows, **kwargs):
        found.append(block_rows)
        return run(*args, block_rows=block_rows, **kwargs)

    monkeypatch.setattr(blocks, "route_rows", noted)
    with planned_for(planned.TRACED_ON):
        for num_tokens in 256, 2048:
            estimate._kept_bytes(spec, num_tokens, 64)
    shape = spec.config.expert_shape(0)
    assert found == [spec.expert_block_rows(shape, n) for n in (256, 2048)] == [16, 64]


def test_no_trace_has_other_blocks_of_experts_rows_than_the_next(monkeypatch):
    """Otherwise, what is padding would count as bytes of each token."""
    spec = spec_of_experts(8)
    assert estimate._block_rows(spec, (4096, 8192)) == {16, 64}
    with planned_for(planned.TRACED_ON):
        found = estimate._step_bytes.__wrapped__(spec, 64)
        monkeypatch.setattr(blocks, "block_rows_for", lambda *_: 64)
        estimate._kept.cache_clear()
        assert estimate._step_bytes.__wrapped__(spec, 64) == found
