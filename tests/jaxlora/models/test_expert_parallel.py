"""Devices that share or divide the experts compute what one device computes."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlora.adapters.exchange import exchanged_slots
from jaxlora.adapters.optimizer import OptimizerInputs
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.division import part_shapes, weight_specs
from jaxlora.models.forward import SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.tensor_parallel import check_experts_divide
from jaxlora.train.execute.stage_passes import StagePasses
from jaxlora.train.execute.step import CompiledSteps, optimizer_inputs
from scripts.bench.mesh.routes import num_changed, with_chosen
from tests import tiny
from tests.jaxlora.models.test_logits import MODELS
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
# Its linears and its router have biases, and one linear makes gate and up.
BIASED = json.loads((MODELS / "gpt_oss" / "config.json").read_text()) | {
    "vocab_size": tiny.CONFIG["vocab_size"],
    "num_hidden_layers": 1,
    "num_local_experts": 8,
}
# It has a gated delta net, and no attention.
DELTAS = json.loads((MODELS / "qwen3_next" / "config.json").read_text()) | {
    "vocab_size": tiny.CONFIG["vocab_size"],
    "num_hidden_layers": 1,
    "mlp_only_layers": [],
    "num_experts": 8,
}
INT8 = {"base_format": BaseFormat.named("int8")}
# Its experts are beside an MLP.
BESIDE = json.loads((MODELS / "gemma4_experts" / "config.json").read_text()) | {
    "vocab_size": tiny.CONFIG["vocab_size"],
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_experts": 8,
}
SHAPES = {"mixture": MIXTURE, "biased": BIASED, "deltas": DELTAS, "beside": BESIDE}
LANES = 4  # microbatches of every run


def spec_of(model: str = "mixture", **options) -> DecoderSpec:
    """A model whose attention and experts have slots."""
    adapted = "q", "experts", "gate", "up", "down"
    own = {"adapted": adapted, "shape": (("expert_rank", 2),)}
    return make_spec(1, model=SHAPES[model], **own, **options)


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


def joined(batches: Sequence[PackedBatch]) -> PackedBatch:
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


@functools.cache
def compiled(
    spec: DecoderSpec, mesh: str | None
) -> tuple[StageSharding, CompiledSteps]:
    placement = ONE_DEVICE if mesh is None else placement_of(mesh)
    sizes = {} if placement.mesh is None else dict(placement.mesh.shape)
    axes = {name: sizes.get(name, 1) for name in ("fsdp", "expert", "tensor")}
    return placement, CompiledSteps(spec.divided(**axes), placement)


class Step(NamedTuple):
    """A step of four microbatches; the first axis of each array is that of slots."""

    losses: np.ndarray
    gradients: dict[str, np.ndarray]
    norms: np.ndarray
    after: dict[str, Any]


@functools.cache
def step_of(mesh: str | None, wild=None, only=None, **options) -> Step:
    """Trains for a step on a mesh; None: on one device.

    Args:
        mesh: The mesh.
        wild: A slot whose adapters are not finite.
        only: The slot whose rows are not padding; None: all.
        **options: Options of the decoder.
    """
    spec = spec_of(**options)
    placement, steps = compiled(spec, mesh)
    put, specs = jax.device_put, weight_specs(steps.arguments.spec)
    base = random(spec.base_shapes(), 0)
    base = {p: put(x, placement.sharding(specs[p])) for p, x in base.items()}
    state, params = steps.make_empty(), random(spec.adapter_shapes(), 1)
    if wild is not None:
        for table in params.values():
            table[wild] = np.nan
    params = {n: put(x, state.params[n].sharding) for n, x in params.items()}
    pending, losses, own = state.pending, 0, settings(spec)
    for tick in itertools.batched(microbatches(only), placement.num_lanes):
        given = own, joined(tick), KEYS
        pending, out, _ = steps.accumulate(base, params, pending, *given)
        losses += np.asarray(out.loss, np.float64).reshape(-1, SLOTS).sum(0)
    for slot in exchanged_slots(range(SLOTS), placement):
        pending = steps.exchange(pending, slot)
    gradients = jax.tree.map(np.asarray, pending.gradients)
    if mesh is not None:
        gradients = {name: x[0] for name, x in gradients.items()}
    norms = np.asarray(steps.measure(pending).squares)
    state = dataclasses.replace(state, params=params, pending=pending)
    state, _ = steps.step(state, inputs(spec), (), own["rank"])
    after = {"params": state.params} | state.optimizer_state
    return Step(losses, gradients, norms, jax.tree.map(np.asarray, after))


def inputs(spec: DecoderSpec) -> OptimizerInputs:
    """Inputs of a step of all slots, whose gradients are clipped."""
    found = optimizer_inputs({}, {}, spec.slots)
    ones = np.ones(SLOTS, np.float32)
    return dataclasses.replace(
        found,
        step_mask=ones > 0,
        learning_rate=0.01 * ones,
        max_norm=0.5 * ones,
        settings=jax.tree.map(lambda x: 0.5 * ones, found.settings),
    )


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("expert=4", {}),
        ("fsdp=2,expert=2", {"remat": "layer"}),
        pytest.param("data=2,expert=2", {}, marks=pytest.mark.grid),
        pytest.param("expert=4", {"remat": "elementwise"}, marks=pytest.mark.grid),
        pytest.param("expert=4", {"remat": "mlp"}, marks=pytest.mark.grid),
        pytest.param("fsdp=2,expert=2", {"model": "biased"}, marks=pytest.mark.grid),
        pytest.param("expert=2", {"model": "beside"}, marks=pytest.mark.grid),
        pytest.param("fsdp=2,expert=2", INT8, marks=pytest.mark.grid),
        ("tensor=2", {}),
        pytest.param("tensor=2", {"remat": "layer"}, marks=pytest.mark.grid),
        pytest.param("tensor=2", {"model": "biased"}, marks=pytest.mark.grid),
        pytest.param("fsdp=2,tensor=2", INT8, marks=pytest.mark.grid),
        pytest.param("tensor=2", {"model": "deltas"}, marks=pytest.mark.grid),
    ],
)
def test_losses_gradients_norms_and_the_step(mesh, options):
    kept = {name: x for name, x in options.items() if name != "remat"}
    found, one = step_of(mesh, **options), step_of(None, **kept)
    pairs = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(found), strict=True)
    for (path, wanted), actual in pairs:
        assert wanted.any(), path
        assert relative_error(actual, wanted) < ROUNDING, path


@pytest.mark.parametrize("mesh", [None, "expert=4"])
def test_no_bit_depends_on_the_rows_of_other_slots(mesh):
    """These are padding, or those of a slot that has no finite number.

    The routes of its rows are valid, and all that it makes stays in its own rows.
    """
    together, wild = step_of(mesh), step_of(mesh, wild=1)
    assert np.isfinite(wild.losses).tolist() == [True, False, True]
    for slot in range(SLOTS):
        for other in [step_of(mesh, only=slot), *([] if slot == 1 else [wild])]:
            pairs = zip(*map(jax.tree.leaves, (together, other)), strict=True)
            assert all(np.array_equal(x[slot], y[slot]) for x, y in pairs)


def chosen(mesh: str | None, dtype: str) -> list[np.ndarray]:
    """Returns the experts of the tokens in each layer."""
    spec = spec_of()
    spec = dataclasses.replace(
        spec, options=dataclasses.replace(spec.options, dtype=jnp.dtype(dtype))
    )
    placement, steps = compiled(spec, mesh)
    arguments = steps.arguments
    put, specs = jax.device_put, weight_specs(arguments.spec)
    base = random(spec_of().base_shapes(), 0)
    base = {
        p: put(x.astype(dtype), placement.sharding(specs[p])) for p, x in base.items()
    }
    params = random(spec.adapter_shapes(), 1)
    run = with_chosen(StagePasses(arguments.spec, placement).evaluate)
    takes, gives = ("base", "params", "settings", "batch", "keys"), ("losses", "batch")
    program = arguments.program("routes", run, takes, gives)
    found = []
    for tick in itertools.batched(microbatches(), placement.num_lanes):
        _, own = program(base, params, settings(spec), joined(tick), SlotKeys())
        found.append(np.asarray(own[0]))
    return [np.sort(np.concatenate(found), axis=-1)]


def test_routes_that_change_are_counted_by_layer():
    """Devices that share the experts add up rows in another order."""
    is_token = np.asarray(joined(microbatches()).segment_ids) >= 0
    whole = chosen(None, "float32")
    assert num_changed(whole, chosen("expert=4", "float32"), is_token) == [0]
    (changed,) = num_changed(whole, chosen(None, "bfloat16"), is_token)
    assert 0 < changed < 0.1 * is_token.sum()


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
