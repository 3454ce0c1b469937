"""Devices that share the experts compute what one device computes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlora.adapters.exchange import exchanged_slots
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.division import part_shapes, weight_specs
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.tensor_parallel import check_experts_divide
from jaxlora.train.execute.step import CompiledSteps
from tests import tiny
from tests.jaxlora.models.test_tensor_parallel import (
    KEYS,
    ROUNDING,
    SLOTS,
    TOKENS,
    batch,
    make_spec,
    placement_of,
    random,
    settings,
)
from tests.oracle import relative_error

pytestmark = pytest.mark.needs_devices(4)

MIXTURE = {
    "model_type": "qwen2_moe",
    "vocab_size": tiny.CONFIG["vocab_size"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "tie_word_embeddings": False,
}
LANES = 4  # microbatches of every run


def spec_of(**options) -> DecoderSpec:
    spec = make_spec(1, model=MIXTURE, adapted=("q",), **options)
    experts = [f"layers.0.mlp.experts.{n}_proj" for n in ("down", "gate", "up")]
    slots = dataclasses.replace(spec.slots, expert_rank=2)
    adapted = tuple(sorted((*spec.adapted, *experts)))
    return dataclasses.replace(spec, slots=slots, adapted=adapted)


def microbatches(only: int | None = None) -> list[PackedBatch]:
    """Different tokens in each lane; those of one slot alone, if it is given."""
    own, found = batch(), []
    for lane in range(LANES):
        blocks = own.block_adapter
        blocks = np.where(blocks < 0, -1, (blocks + lane) % SLOTS)
        if only is not None:
            blocks = np.where(blocks == only, blocks, -1)
        of_slot = np.repeat(blocks, TOKENS // len(blocks))
        found.append(
            dataclasses.replace(
                own,
                token_ids=np.roll(own.token_ids, 7 * lane),
                token_index=own.token_index + TOKENS * lane,
                segment_ids=np.where(of_slot < 0, -1, own.segment_ids),
                block_adapter=blocks,
            )
        )
    return found


def joined(batches: list[PackedBatch]) -> PackedBatch:
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


@functools.cache
def compiled(
    spec: DecoderSpec, mesh: str | None
) -> tuple[StageSharding, CompiledSteps]:
    placement = ONE_DEVICE if mesh is None else placement_of(mesh)
    sizes = {} if placement.mesh is None else dict(placement.mesh.shape)
    axes = {name: sizes.get(name, 1) for name in ("fsdp", "expert")}
    return placement, CompiledSteps(spec.divided(**axes), placement)


def step_of(mesh: str | None, change=lambda params: params, only=None, **options):
    """Returns losses, gradients and norms of four microbatches, by slot."""
    spec = spec_of(**options)
    placement, steps = compiled(spec, mesh)
    own = steps.arguments.spec
    base, specs = random(spec.base_shapes(), 0), weight_specs(own)
    put = jax.device_put
    base = {p: put(x, placement.sharding(specs[p])) for p, x in base.items()}
    state = steps.make_empty()
    params = change(random(spec.adapter_shapes(), 1))
    params = {n: put(x, state.params[n].sharding) for n, x in params.items()}
    pending, losses = state.pending, 0
    lanes = microbatches(only)
    for ticks in [[one] for one in lanes] if mesh is None else [lanes]:
        given = base, params, pending, settings(spec), joined(ticks), KEYS
        pending, out, _ = steps.accumulate(*given)
        losses += np.asarray(out.loss, np.float64).reshape(-1, SLOTS).sum(0)
    for slot in exchanged_slots(range(SLOTS), placement):
        pending = steps.exchange(pending, slot)
    norms = np.asarray(steps.measure(pending).squares)
    gradients = jax.tree.map(np.asarray, pending.gradients)
    if mesh is not None:
        gradients = {name: x[0] for name, x in gradients.items()}
    return losses, gradients, norms


@functools.cache
def wanted():
    return step_of(None)


def assert_same(found, one, slots=slice(None)):
    for ours, theirs in zip(found[::2], one[::2], strict=True):
        assert relative_error(ours[slots], theirs[slots]) < ROUNDING
    for name, gradient in one[1].items():
        assert gradient.any(), name
        assert relative_error(found[1][name][slots], gradient[slots]) < ROUNDING, name


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("expert=4", {}),
        ("fsdp=2,expert=2", {"remat": "layer"}),
        pytest.param("data=2,expert=2", {}, marks=pytest.mark.grid),
        pytest.param("expert=4", {"remat": "elementwise"}, marks=pytest.mark.grid),
        pytest.param("expert=4", {"remat": "mlp"}, marks=pytest.mark.grid),
    ],
)
def test_losses_gradients_and_norms(mesh, options):
    assert_same(step_of(mesh, **options), wanted())


def test_no_bit_depends_on_the_rows_of_other_slots():
    together = step_of("expert=4")
    for slot in range(SLOTS):
        losses, gradients, norms = step_of("expert=4", only=slot)
        assert losses[slot] == together[0][slot]
        assert norms[slot] == together[2][slot]
        for name, gradient in gradients.items():
            assert np.array_equal(gradient[slot], together[1][name][slot]), name


def test_what_is_not_finite_stays_in_its_slot():
    """Its rows are routed, too: no expert's rows are those of two slots."""

    def diverged(params):
        return {
            n: np.where(np.arange(SLOTS)[:, None, None, None] == 1, np.nan, x)
            for n, x in params.items()
        }

    found, together = step_of("expert=4", diverged), step_of("expert=4")
    assert np.isfinite(found[0]).tolist() == [True, False, True]
    for slot in (0, 2):
        assert found[0][slot] == together[0][slot]
        for name, gradient in found[1].items():
            assert np.array_equal(gradient[slot], together[1][name][slot]), name


def test_where_weights_and_tables_are():
    spec = spec_of().divided(fsdp=2, expert=2)
    specs = weight_specs(spec)
    path = "layers.0.mlp.experts.up_proj.kernel"
    assert specs[path] == P(("expert", "fsdp"))
    assert specs["layers.0.mlp.gate"] == P("fsdp")
    weights, tables = part_shapes(spec, 1, 2)
    assert weights[path].shape == (4, 32, 24)
    assert tables["mlp.experts.up_proj.lora_a"].shape == (SLOTS, 4, 32, 2)
    assert tables["self_attn.q_proj.lora_a"].shape == (SLOTS, 1, 32, 4)


@pytest.mark.parametrize(
    ("model", "expert", "match"),
    [
        (MIXTURE, 3, "expert=3 does not divide the 8 experts of a layer"),
        (tiny.CONFIG, 2, "expert=2 and model_type='llama': the model has no experts"),
    ],
)
def test_models_whose_experts_cannot_be_divided(model, expert, match):
    check_experts_divide(model_config(model), 1)
    with pytest.raises(ValueError, match=match):
        check_experts_divide(model_config(model), expert)
