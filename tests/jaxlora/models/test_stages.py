"""A decoder cut into pipeline stages computes what the whole one computes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.forward import job_losses, run_stage
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from tests.jaxlora.models.test_tensor_parallel import (
    KEYS,
    batch,
    make_spec,
    random,
    settings,
)

LAYERS = 3


def spec(*, tied: bool = True, **shape) -> DecoderSpec:
    return make_spec(LAYERS, tied=tied, adapted=("q", "up"), shape=shape)


def stages(spec: DecoderSpec, cut) -> list[DecoderSpec]:
    return [spec.stage(*ends) for ends in itertools.pairwise(cut)]


def of_stage(stage: DecoderSpec, base, adapters):
    """The stage's share of base weights and adapters, by path."""
    paths = [path for stack in stage.stacks for path in stack.paths]
    return {p: base[p] for p in stage.base_shapes()}, {p: adapters[p] for p in paths}


@functools.cache
def weights():
    """Base weights and adapters of the whole decoder."""
    adapters = to_modules(spec().stacks, random(spec().adapter_shapes(), 1))
    return jax.tree.map(jnp.asarray, (random(spec().base_shapes(), 0), adapters))


def given(part: DecoderSpec):
    """Settings of the stage's linears, a microbatch, and keys of dropout."""
    linears = [spec().adapted.index(path) for path in part.adapted]
    own = jax.tree.map(lambda values: values[linears], settings(spec()))
    return jax.tree.map(jnp.asarray, (own, batch(), KEYS))


def test_stages_in_one_program_have_the_bits_of_the_whole():
    """The whole is the composition of its stages, with no operation of its own."""

    @jax.jit
    def composed(base, adapters):
        h = None
        for part in stages(spec(), (0, 1, 2, 3)):
            own_base, own = of_stage(part, base, adapters)
            h = run_stage(part, own_base, own, *given(part), h)
        return h

    @jax.jit
    def at_once(base, adapters):
        return job_losses(spec(), base, adapters, *given(spec()))

    out, wanted = composed(*weights()), at_once(*weights())
    jax.tree.map(np.testing.assert_array_equal, out, wanted)


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
    part = spec(use_dropout=use_dropout).stage(0, 1)

    def program(keys) -> str:
        base, own = of_stage(part, *weights())
        run = functools.partial(run_stage, part, base, own, *given(part)[:2])
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
    [
        (("layers.3.mlp.up_proj",), "no linears of this"),
        (("layers.1.mlp.up_proj", "layers.0.mlp.up_proj"), "must be sorted"),
    ],
)
def test_adapted_linears_are_checked(adapted, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(spec(), adapted=adapted)
