"""An MLP whose norm and gate compute s gives what one gives that computes it later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder, make_norm
from jaxlora.models.config import ModelConfig, Rope
from jaxlora.models.families.llama import Llama
from jaxlora.modules import norm, producers
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.producers import normed_input
from jaxlora.modules.routing import Routing
from jaxlora.modules.rows import PackedRows, layer_ropes
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels import Fp8Weight, Int8Weight
from tests.drawn import normal
from tests.pallas_kernels.fused import ON_HOPPER, mosaic_kernels

T, D, F, RANK = 192, 128, 128, 8
SLOTS = np.array([1, 0, -1], np.int32)
CONFIG = ModelConfig(
    family=Llama.FAMILY,
    vocab_size=64,
    hidden_size=D,
    intermediate_size=F,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    max_positions=T,
    rms_eps=1e-5,
    rope=Rope(theta=1e4),
    layer_windows=(None,),
)


class Builder(LayerBuilder):
    """Makes the linears of a block."""

    def __init__(self, block):
        self._block = block

    def linear(self, name, in_features, out_features, **layout):
        del layout
        return self._block.linear(name, in_features, out_features)


class Block(nnx.Module):
    """The second half of a layer, with random adapters in two slots."""

    def __init__(self, adapted, weight=None, settings=()):
        self._adapted, self._weight = adapted, weight
        self._slots = SlotShape(num_slots=2, rank=RANK, settings=settings)
        self._rngs = nnx.Rngs(0)
        self.norm = make_norm(
            CONFIG, CONFIG.hidden_size, "norm", dtype=jnp.dtype(jnp.bfloat16)
        )
        self.mlp = Mlp(CONFIG, Builder(self))

    def linear(self, name, in_features, out_features):
        is_adapted = name.removeprefix("mlp.") in self._adapted
        kernel, projection = None, 4 + ALL.index(name.removeprefix("mlp."))
        if self._weight is not None:
            w = normal(9 + projection, (out_features, in_features))
            kernel = self._weight.quantize(w / in_features**0.5)
        made = MultiLoraLinear(
            in_features,
            out_features,
            slots=self._slots if is_adapted else None,
            layer=0,
            projection=projection,
            implementation="mosaic",
            kernel=kernel,
            rngs=self._rngs,
        )
        if is_adapted:
            for i, table in enumerate((made.lora_a, made.lora_b)):
                drawn = normal(2 * projection + i, table.shape)
                table[...] = jnp.asarray(np.float32(0.1) * np.asarray(drawn))
            made.scaling[...] = jnp.array([1.0, 2.0])
            made.rank[...] = jnp.array([RANK, RANK])
            made.dropout[...] = jnp.array([0.3, 0.0])
        return made

    def __call__(self, h, rows):
        h, x = normed_input(self.norm, h, self.mlp.input_linears, rows.routing)
        return h + self.mlp(x, rows)


def make_rows():
    tokens = jnp.arange(T, dtype=jnp.int32)
    return PackedRows(
        ropes=layer_ropes(CONFIG, tokens),
        segment_ids=jnp.zeros_like(tokens),
        routing=Routing(
            block_adapter=jnp.asarray(SLOTS),
            token_index=tokens,
            seed=jnp.array([3, 4]),
            step=jnp.array([0, 7]),
        ),
        lengths=SegmentLengths(T),
    )


def both_ways(block):
    """Returns the result, and the gradients of the input and of the adapters."""
    graph, tables, rest = nnx.split(block, nnx.LoRAParam, ...)

    @jax.jit
    def run(tables, h, dy):
        rows = make_rows()
        y, vjp = jax.vjp(lambda t, h: nnx.merge(graph, t, rest)(h, rows), tables, h)
        return jax.tree.leaves((y, vjp(dy)))

    h, dy = (normal(seed, (T, D), jnp.bfloat16) for seed in (1, 2))
    return run(tables, h, dy)


@pytest.fixture(autouse=True)
def _kernels():
    with mosaic_kernels():
        yield


ALL = "gate_proj", "up_proj", "down_proj"


def calls(monkeypatch, module=producers, names=("produce", "multi_lora_gate")):
    """Returns the list that gets the calls of a module's functions."""
    found = []
    for name in names:
        run = getattr(module, name)

        def recorded(*args, run=run, name=name, **options):
            found.append(name)
            return run(*args, **options)

        monkeypatch.setattr(module, name, recorded)
    return found


@pytest.mark.parametrize(
    ("adapted", "weight", "used"),
    [
        (ALL, None, ["produce", "multi_lora_gate"]),
        pytest.param(("up_proj",), None, ["produce"], marks=pytest.mark.grid),
        pytest.param(
            ALL, Int8Weight, ["produce", "multi_lora_gate"], marks=pytest.mark.grid
        ),
        pytest.param(ALL, Fp8Weight, [], marks=pytest.mark.grid),
    ],
    ids=["all", "up", "int8", "fp8"],
)
def test_the_results_are_the_same(adapted, weight, used, monkeypatch):
    """In the interpreter, they are the same bits; a GPU's exponentials are inexact."""
    block = Block(adapted, weight)
    norms = calls(monkeypatch, norm, ["norm_gradient"])
    with monkeypatch.context() as patched:
        patched.setattr(producers, "_can_serve", lambda linears: False)
        want = both_ways(block)
    found = calls(monkeypatch)
    got = both_ways(block)
    assert found == used
    assert len(norms) == 2  # both ways
    for pair in zip(got, want, strict=True):
        one, other = (np.asarray(x, np.float32) for x in pair)
        allowed = 0.02 * np.abs(other).max() if ON_HOPPER else 0
        np.testing.assert_allclose(one, other, rtol=0, atol=allowed)


@pytest.mark.parametrize("setting", ["use_dora", "use_vera"])
def test_not_with_other_adapters(setting, monkeypatch):
    found, block = calls(monkeypatch), Block(ALL, settings=(setting,))
    h = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    jax.eval_shape(lambda h: block(h, make_rows()), h)
    assert not found


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_not_where_linears_are_divided(axis, monkeypatch):
    """The devices of other axes have rows of their own, and whole linears."""
    found, block = calls(monkeypatch), Block(ALL)
    h = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    mesh = jax.sharding.AbstractMesh((2,), (axis,))
    on_each = jax.shard_map(
        lambda h: block(h, make_rows()),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    jax.eval_shape(on_each, h)
    assert bool(found) == (axis == "data")
