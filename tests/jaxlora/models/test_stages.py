"""A decoder cut into pipeline stages computes what the whole one computes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.adapters.slot_state import write_slot
from jaxlora.adapters.slots import SlotTable
from jaxlora.models.forward import JobLosses, SlotKeys, job_losses, run_stage
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.slot_settings import SlotSettings, settings_of_base
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_paths
from jaxlora.modules.slot_shape import SlotShape
from tests import tiny

LAYERS, SLOTS, TOKENS = 3, 3, 64
# Linears with slots differ between layers, so stacks of stages differ in their layers.
EVERYWHERE = ("self_attn.q_proj", "mlp.up_proj")
ADAPTED = (
    "layers.1.self_attn.v_proj",
    "layers.0.mlp.up_proj",
    *(f"layers.{i}.{name}" for i in (1, 2) for name in EVERYWHERE),
)
CUTS = [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]


def spec(*, tied: bool = True) -> DecoderSpec:
    fields = {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    return DecoderSpec(
        config=model_config(tiny.CONFIG | fields),
        options=DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=TOKENS),
        slots=SlotShape(num_slots=SLOTS, rank=4),
        adapted=tuple(sorted(ADAPTED)),
    )


def stages(spec: DecoderSpec, cut) -> list[DecoderSpec]:
    return [spec.stage(*ends) for ends in itertools.pairwise(cut)]


def random(shapes, seed: int):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=s.shape, scale=0.1), s.dtype)
        for name, s in sorted(shapes.items())
    }


def tables(spec: DecoderSpec, seed: int = 1):
    return to_paths(spec.stacks, random(spec.adapter_shapes(), seed), axis=1)


def settings(spec: DecoderSpec) -> SlotSettings:
    """Scaling, dropout and rank of each linear, the same for a stage as for all."""
    number = np.array([sorted(ADAPTED).index(path) for path in spec.adapted])[:, None]
    slot = np.arange(SLOTS)
    values = settings_of_base(spec.settings_shapes())
    values["scaling"][:] = 1 + 0.1 * number + slot
    values["dropout"][:] = 0.1 * slot
    values["rank"][:] = 1 + (number + slot) % 4
    return jax.tree.map(jnp.asarray, values)


def batch() -> PackedBatch:
    rng = np.random.default_rng(2)
    position, segment = np.arange(TOKENS) % 20, np.arange(TOKENS) // 20
    values = PackedBatch(
        token_ids=rng.integers(0, 50, TOKENS).astype(np.int32),
        positions=position.astype(np.int32),
        segment_ids=segment.astype(np.int32),
        labels=rng.integers(0, 50, TOKENS).astype(np.int32),
        loss_inputs={"next_token": {"weight": rng.random(TOKENS, np.float32)}},
        token_index=np.arange(TOKENS, dtype=np.int32),
        block_adapter=np.array([0, 1, 2, -1], np.int32),
    )
    return jax.tree.map(jnp.asarray, values)


KEYS = SlotKeys(seed=jnp.arange(SLOTS), step=jnp.full(SLOTS, 5, jnp.int32))


def of_stage(stage: DecoderSpec, base, adapters):
    """The stage's share of base weights and adapters, by path."""
    paths = [path for stack in stage.stacks for path in stack.paths]
    return {p: base[p] for p in stage.base_shapes()}, {p: adapters[p] for p in paths}


@functools.cache
def forward_program(part: DecoderSpec):
    """The forward pass of a stage, which also gives the backward pass as a value."""

    def stage(own, h, own_base):
        out = run_stage(part, own_base, own, settings(part), batch(), KEYS, h)
        return (out.loss.sum(), out) if isinstance(out, JobLosses) else (out, None)

    def forward(own_base, own, h):
        run = functools.partial(stage, own_base=own_base)
        return jax.vjp(run, own, h, has_aux=True)

    return jax.jit(forward)


@jax.jit
def backward(pullback, dh):
    return pullback(dh)


def through_stages(parts: list[DecoderSpec], base, adapters):
    """Losses and gradients; forward and backward of each stage are programs."""
    h, pullbacks, out = None, [], None
    for part in parts:
        h, pullback, out = forward_program(part)(*of_stage(part, base, adapters), h)
        pullbacks.append(pullback)
    dh, gradients = jnp.ones(()), {}
    for pullback in reversed(pullbacks):
        own, dh = backward(pullback, dh)
        gradients |= own
    return out, gradients


@functools.cache
def weights(tied: bool):
    """Base weights and adapters of the whole decoder."""
    return random(spec(tied=tied).base_shapes(), 0), tables(spec(tied=tied))


@functools.cache
def whole(tied: bool):
    """Losses and gradients of the whole decoder in one program."""
    everything = spec(tied=tied)

    @jax.jit
    def run(base, adapters):
        def total(adapters):
            own = settings(everything)
            out = job_losses(everything, base, adapters, own, batch(), KEYS)
            return out.loss.sum(), out

        return jax.grad(total, has_aux=True)(adapters)

    gradients, out = run(*weights(tied))
    return out, gradients


@pytest.mark.parametrize(
    ("tied", "cut"),
    [pytest.param(True, (0, 1, 2, 3), marks=pytest.mark.grid), (False, (0, 2, 3))],
    ids=str,
)
def test_stages_in_turn_are_the_whole(tied, cut):
    """Within the rounding of float32: programs of other sizes fuse differently."""
    out, gradients = through_stages(stages(spec(tied=tied), cut), *weights(tied))
    wanted, wanted_gradients = whole(tied)
    np.testing.assert_allclose(out.loss, wanted.loss, rtol=1e-6)
    np.testing.assert_array_equal(out.is_finite, wanted.is_finite)
    assert gradients.keys() == wanted_gradients.keys()
    for path, gradient in gradients.items():
        scale = np.abs(wanted_gradients[path]).max()
        assert scale > 0
        np.testing.assert_allclose(
            gradient, wanted_gradients[path], rtol=1e-5, atol=1e-6 * scale
        )


def test_stages_in_one_program_have_the_bits_of_the_whole():
    """The whole is the composition of its stages, with no operation of its own."""

    @jax.jit
    def composed(base, adapters):
        h = None
        for part in stages(spec(), (0, 1, 2, 3)):
            own_base, own = of_stage(part, base, adapters)
            h = run_stage(part, own_base, own, settings(part), batch(), KEYS, h)
        return h

    @jax.jit
    def at_once(base, adapters):
        return job_losses(spec(), base, adapters, settings(spec()), batch(), KEYS)

    out, wanted = composed(*weights(True)), at_once(*weights(True))
    jax.tree.map(np.testing.assert_array_equal, out, wanted)


def test_a_value_that_is_not_finite_in_the_first_stage_reaches_the_last():
    base, adapters = weights(False)
    path = "layers.0.mlp.up_proj.lora_b"
    spoilt = adapters | {path: adapters[path].at[1].set(jnp.nan)}
    out, _ = through_stages(stages(spec(tied=False), (0, 2, 3)), base, spoilt)
    np.testing.assert_array_equal(out.is_finite, [True, False, True])


def test_parts_of_stages():
    everything = spec(tied=False)
    first, middle, last = stages(everything, (0, 1, 2, 3))
    assert everything.stage(0, LAYERS) is everything
    assert everything.stage(0, 2).stage(1, 2) == middle
    assert hash(middle) == hash(everything.stage(1, 2)) != hash(first)
    shapes = everything.base_shapes()
    parts = [part.base_shapes() for part in (first, middle, last)]
    assert parts[0] | parts[1] | parts[2] == shapes
    assert sum(map(len, parts)) == len(shapes)
    assert "embed_tokens.embedding" in parts[0] and "lm_head.kernel" in parts[2]
    assert sorted(p for part in (first, middle, last) for p in part.adapted) == list(
        everything.adapted
    )
    tied = stages(spec(), (0, 1, 2, 3))
    assert ["embed_tokens.embedding" in part.base_shapes() for part in tied] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("use_dropout", [True, False])
def test_the_slots_decide_whether_training_drops_features(use_dropout):
    slots = SlotShape(num_slots=SLOTS, rank=4, use_dropout=use_dropout)
    part = dataclasses.replace(spec().stage(0, 1), slots=slots)

    def program(keys) -> str:
        base, own = of_stage(part, *weights(True))
        run = functools.partial(run_stage, part, base, own, settings(part), batch())
        return str(jax.make_jaxpr(run)(keys))

    bits = "shift_right_logical"  # masks are hashed
    assert bits not in program(None)
    assert (bits in program(KEYS)) == use_dropout


@pytest.mark.parametrize("ends", [(0, 0), (2, 1), (-1, 2), (2, 4)])
def test_stages_without_layers_are_refused(ends):
    with pytest.raises(ValueError, match=r"at least one of the layers 0 to 2"):
        spec().stage(*ends)


def test_layers_of_another_stage_are_refused():
    with pytest.raises(ValueError, match=r"at least one of the layers 1 to 2"):
        spec().stage(1, 3).stage(0, 2)


@pytest.mark.parametrize(
    ("adapted", "message"),
    [(("layers.3.mlp.up_proj",), "no linears of this"), (ADAPTED, "must be sorted")],
)
def test_adapted_linears_are_checked(adapted, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(spec(), adapted=adapted)


# ---- the canonical form --------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_has_the_same_tables(cut):
    def paths(part: DecoderSpec) -> list[str]:
        return [path for stack in part.stacks for path in stack.paths]

    parts = stages(spec(), cut)
    assert sorted(p for part in parts for p in paths(part)) == sorted(paths(spec()))


WRITE_SLOT = jax.jit(write_slot)


def slot_tables(cut) -> list[SlotTable]:
    return [SlotTable(part, WRITE_SLOT) for part in stages(spec(), cut)]


def restore_slot(tables: list[SlotTable], parked: ParkedSlot) -> None:
    """Puts a slot's state into the tables of all stages, each its share."""
    for table in tables:
        linears = table._spec.adapted
        share = parked.limited_to(linears)
        assert all(path[:-7] in linears for path in share.params)
        modules = {
            f"model.{path}": LoraWeights(
                tensors={n: share.params[f"{path}.{n}"] for n in ("lora_a", "lora_b")},
                rank=2,
                lora_alpha=4.0,
            )
            for path in linears
        }
        table.restore(1, share, Adapter(modules=modules))


def park_slot(tables: list[SlotTable]) -> ParkedSlot:
    """The state of a slot of all stages together."""
    return ParkedSlot.join([table.copy(1) for table in tables])


def test_a_slot_that_leaves_one_cut_continues_in_another():
    """Checkpoints hold this state of each job, so they load whatever the cut."""
    shapes = {path: table.shape[1:] for path, table in tables(spec()).items()}
    at_rank = {
        path: (k, 2) if path.endswith("lora_a") else (2, n)
        for path, (k, n) in shapes.items()
    }
    rng = np.random.default_rng(0)
    parked = ParkedSlot.of(
        {
            kind: {p: rng.normal(size=s).astype(np.float32) for p, s in at_rank.items()}
            for kind in ("params", "mu", "nu")
        }
    )
    for cut in ((0, 3), (0, 2, 3), (0, 1, 2, 3)):
        there = slot_tables(cut)
        restore_slot(there, parked)
        again = park_slot(there)
        jax.tree.map(np.testing.assert_array_equal, again.by_kind(), parked.by_kind())
        parked = again
