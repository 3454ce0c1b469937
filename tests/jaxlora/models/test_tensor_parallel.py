"""Devices that share a microbatch compute what one device computes."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlora.adapters.exchange import exchanged_slots
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.division import table_axes, weight_specs
from jaxlora.models.forward import SlotKeys, job_losses
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.score import ScoreHead
from jaxlora.models.slot_settings import SlotSettings, settings_of_base
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.models.structure import linears
from jaxlora.models.tensor_parallel import check_divides
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.mesh.predict import EXCHANGED_AGAIN, EXCHANGES
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.execute.step import CompiledSteps
from tests import tiny
from tests.jaxlora.models.test_remat import primitives
from tests.oracle import relative_error
from tests.pallas_kernels.problems import QUICK_TO_COMPILE

pytestmark = pytest.mark.needs_devices(4)

SLOTS, TOKENS = 3, 48
ROUNDING = 5e-6
ALL = ("q", "k", "v", "o", "gate", "up", "down")
EACH_KIND = ("q", "o", "up", "down")  # divided by outputs and by inputs
DORA = {"settings": ("use_dora",), "dora_dropout": True}
VERA = {"settings": ("use_vera",)}
ROWS = {"outside": (("head_rows", 2), ("token_rows", 3))}


def make_spec(
    layers: int = 2,
    *,
    adapted=ALL,
    dtype="float32",
    tied=False,
    shape=(),
    sizes=(),
    model=None,
    **options,
) -> DecoderSpec:
    """A Llama with biases in all linears, or the model of a config.json."""
    fields = {
        "num_hidden_layers": layers,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": tied,
        **dict(sizes),
    }
    config = model_config(model or tiny.CONFIG | fields)
    short = lambda name: name.split(".")[1].removesuffix("_proj")
    names = [n for n in linears(config) if short(n) in adapted]
    paths = (f"layers.{i}.{n}" for i in range(layers) for n in names)
    return DecoderSpec(
        config=config,
        options=DecoderOptions(
            dtype=jnp.dtype(dtype), max_segment_tokens=TOKENS, **options
        ),
        slots=SlotShape(num_slots=SLOTS, rank=4, **dict(shape)),
        adapted=tuple(sorted(paths)),
    )


def placement_of(mesh: str) -> StageSharding:
    (found,) = stage_meshes(MeshSizes.parse(mesh))
    return StageSharding(mesh=found)


def random(shapes, seed: int):
    rng = np.random.default_rng(seed)

    def one(path: str, like) -> np.ndarray:
        if np.issubdtype(like.dtype, np.integer):  # codes of a quantized weight
            most = np.iinfo(like.dtype).max
            return rng.integers(0, most, like.shape, like.dtype, endpoint=True)
        scale = 0.002 if path.endswith("kernel.scale") else 0.2
        return np.asarray(rng.normal(size=like.shape, scale=scale), like.dtype)

    return {path: one(path, shapes[path]) for path in sorted(shapes)}


def batch() -> PackedBatch:
    """A microbatch of samples of ragged lengths, with padding."""
    rng = np.random.default_rng(2)
    ends = np.array([5, 16, 25, 32, 40, 48])
    segments = np.searchsorted(ends, np.arange(TOKENS), side="right").astype(np.int32)
    starts = np.concatenate([[0], ends])[segments]
    return PackedBatch(
        token_ids=rng.integers(0, 288, TOKENS).astype(np.int32),
        positions=(np.arange(TOKENS) - starts).astype(np.int32),
        segment_ids=np.where(segments == 3, -1, segments).astype(np.int32),
        labels=rng.integers(0, 288, TOKENS).astype(np.int32),
        loss_inputs={"next_token": {"weight": rng.random(TOKENS, np.float32)}},
        token_index=np.arange(TOKENS, dtype=np.int32),
        block_adapter=np.array([0, 0, 2, -1, 1, 1], np.int32),
    )


def settings(spec: DecoderSpec) -> SlotSettings:
    """Settings of three slots, of which two have each of the kinds that slots can have.

    Tokens whose rows are trained are in the samples, and on all devices.
    """
    found, rng = settings_of_base(spec.settings_shapes()), np.random.default_rng(3)
    scaling = found["scaling"]  # each linear and slot has one of its own
    scaling[:] = np.linspace(1, 2, scaling.size).reshape(scaling.shape)
    found["dropout"][:] = [0.3, 0.0, 0.1]
    found["rank"][:] = [4, 3, 2]
    for name in sorted(found.keys() & {"vera_a", "vera_b"}):
        found[name][:] = rng.normal(size=found[name].shape)
        found["has_vera"][:] = [True, False, True]
    for module in found.keys() & {"token_rows.ids", "head_rows.ids"}:
        own = [*batch().token_ids[4:6], *batch().token_ids[20:22]]
        own += [*batch().token_ids[40:42]] if module == "token_rows.ids" else []
        found[module][0, :2] = np.reshape(own, (2, -1))
    return found


KEYS = SlotKeys(seed=np.arange(SLOTS, dtype=np.int32), step=np.full(SLOTS, 5, np.int32))


def arguments(spec: DecoderSpec, placement: StageSharding, steps: CompiledSteps):
    """Arguments of the training step, on the devices."""
    put = jax.device_put
    base, specs = random(spec.base_shapes(), 0), weight_specs(spec)
    base = {p: put(x, placement.sharding(specs[p])) for p, x in base.items()}
    state = steps.make_empty()
    params = random(spec.adapter_shapes(), 1)
    params = {n: put(x, state.params[n].sharding) for n, x in params.items()}
    return base, params, state.pending, settings(spec), batch(), KEYS


def step_of(spec: DecoderSpec, mesh: str | None, change=lambda params: params):
    """Returns losses, gradients and their norm on a mesh; None: on one device."""
    placement = ONE_DEVICE if mesh is None else placement_of(mesh)
    spec = spec.divided(tensor=placement.num_tensor)
    steps = CompiledSteps(spec, placement)
    base, params, *others = arguments(spec, placement, steps)
    pending, out, _ = steps.accumulate(base, change(params), *others)
    for slot in exchanged_slots(range(SLOTS), placement):
        pending = steps.exchange(pending, slot)
    norms = np.asarray(steps.measure(pending).squares)
    gradients = jax.tree.map(np.asarray, pending.gradients)
    if mesh is not None:
        gradients = {name: x[0] for name, x in gradients.items()}
    return np.asarray(out.loss).ravel(), gradients, norms


DELTA_NET = {
    "model_type": "qwen3_5_text",
    "vocab_size": tiny.CONFIG["vocab_size"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SPECS = {
    "delta": {
        "layers": 1,
        "model": DELTA_NET,
        "adapted": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out"),
        "shape": tuple(DORA.items()),
        "base_format": BaseFormat.named("int8"),
    },
    "biases": {},
    "tied": {
        "layers": 1,
        "tied": True,
        "adapted": ("k", "v", "o", "down"),
        "shape": (("outside", (("token_rows", 3),)),),
    },
    "vera": {
        "layers": 1,
        "adapted": EACH_KIND,
        "shape": tuple((VERA | ROWS).items()),
    },
    "dora": {"layers": 1, "adapted": EACH_KIND, "shape": tuple(DORA.items())},
    "int8": {
        "layers": 1,
        "base_format": BaseFormat.named("int8"),
        "adapted": ("o", "down"),
    },
    "nf4": {
        "base_format": BaseFormat.named("nf4", double_quant=False),
        "adapted": ("q", "o", "down"),
        "sizes": (("hidden_size", 128), ("intermediate_size", 256)),
    },
}


@functools.cache
def wanted(name: str):
    return step_of(make_spec(**SPECS[name]), None)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        # The others have biases, too, in one layer.
        pytest.param("tensor=2", "biases", marks=pytest.mark.grid),
        ("tensor=2", "dora"),
        ("tensor=2", "delta"),
        ("tensor=4", "tied"),  # more devices than key-value heads
        ("tensor=4", "vera"),
        ("tensor=2", "int8"),
        pytest.param("tensor=2", "vera", marks=pytest.mark.grid),
        pytest.param("tensor=4", "biases", marks=pytest.mark.grid),
        pytest.param("tensor=4", "dora", marks=pytest.mark.grid),
        pytest.param("tensor=2", "nf4", marks=pytest.mark.grid),
    ],
)
def test_losses_gradients_and_norms(mesh, name):
    loss, gradients, norms = step_of(make_spec(**SPECS[name]), mesh)
    loss_one, gradients_one, norms_one = wanted(name)
    assert relative_error(loss, loss_one) < ROUNDING
    assert relative_error(norms, norms_one) < ROUNDING
    for path, gradient in gradients_one.items():
        assert gradient.any(), path
        assert relative_error(gradients[path], gradient) < ROUNDING, path


@pytest.mark.grid
@pytest.mark.parametrize("remat", ["elementwise", "mlp", "layer"])
def test_layers_that_are_recomputed_give_the_same(remat):
    loss, gradients, norms = step_of(make_spec(remat=remat), "tensor=2")
    loss_one, gradients_one, norms_one = wanted("biases")
    assert relative_error(loss, loss_one) < ROUNDING
    assert relative_error(norms, norms_one) < ROUNDING
    for path, gradient in gradients_one.items():
        assert relative_error(gradients[path], gradient) < ROUNDING, path


def test_what_is_not_finite_stays_in_its_slot():
    def diverged(params):
        name = next(n for n in params if n.endswith("lora_a"))
        return params | {name: params[name].at[1].set(np.nan)}

    loss, gradients, _ = step_of(make_spec(**SPECS["dora"]), "tensor=2", diverged)
    loss_one, gradients_one, _ = wanted("dora")
    assert np.isfinite(loss).tolist() == [True, False, True]
    others = [0, 2]
    assert relative_error(loss[others], loss_one[others]) < ROUNDING
    for path, gradient in gradients_one.items():
        assert relative_error(gradients[path][others], gradient[others]) < ROUNDING


@pytest.mark.grid
@pytest.mark.parametrize("copies", [1, 2])
def test_activations_in_fp8(copies):
    """A device scales its own features of a row, so that they are rounded otherwise."""
    base_format = BaseFormat.named("fp8", weight_copies=copies)
    spec = make_spec(base_format=base_format)
    (loss, gradients, _), (loss_one, gradients_one, _) = (
        step_of(spec, mesh) for mesh in ("tensor=2", None)
    )
    assert 0 < relative_error(loss, loss_one) < 0.01
    for path, gradient in gradients_one.items():
        assert relative_error(gradients[path], gradient) < 0.3, path


def test_a_score_head_that_all_devices_use_is_trained_once():
    """Its gradients are summed over the devices, which compute the same ones."""
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(TOKENS, 32)), rng.normal(size=(SLOTS, 32))
    slots = jnp.asarray(batch().block_adapter)

    def gradients(tensor: int, table, hidden):
        def total(table, hidden):
            head = ScoreHead(SLOTS, 32, tensor=tensor)
            head.weight[...] = table
            return jnp.square(head(hidden, slots)).sum()

        own, of_hidden = jax.grad(total, (0, 1))(table, hidden)
        return jax.lax.psum(own, "tensor") if tensor > 1 else own, of_hidden

    mesh = placement_of("tensor=2").mesh
    assert mesh is not None
    whole = PartitionSpec()
    run = jax.shard_map(
        functools.partial(gradients, 2),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    args = np.float32(table), np.float32(hidden)
    alone = jax.jit(functools.partial(gradients, 1))
    for found, wanted in zip(jax.jit(run)(*args), alone(*args), strict=True):
        assert relative_error(found, wanted) < ROUNDING


# ---- exchanges of a pass -------------------------------------------------------------


@functools.cache
def lowered(layers: int, adapted):
    spec = make_spec(layers, adapted=adapted, dtype="bfloat16")
    spec = spec.divided(tensor=2)
    placement = placement_of("tensor=2")
    steps = CompiledSteps(spec, placement)
    return steps.accumulate.jitted.lower(*arguments(spec, placement, steps))


@functools.cache
def num_reductions(layers: int, adapted) -> Counter:
    text = lowered(layers, adapted).compile(QUICK_TO_COMPILE).as_text()
    kinds = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    return Counter(re.findall(rf" {kinds}(?:-start)?\(", text))


@pytest.mark.parametrize(
    "adapted",
    [
        EACH_KIND,
        *(pytest.param(some, marks=pytest.mark.grid) for some in (ALL, ("q",))),
    ],
    ids=["each kind", "all", "one"],
)
def test_a_layer_gathers_and_scatters_twice_in_each_pass(adapted):
    """Adapters exchange nothing. Others are those of the embedding and of the loss."""
    more = num_reductions(2, adapted) - num_reductions(1, adapted)
    assert more == {"all-gather": 4, "reduce-scatter": 4}


def num_traced(layers: int, remat) -> int:
    """Gathers and scatters of a layer in both passes, before XLA compiles them."""
    # Inputs of linears without adapters are not needed again.
    spec = make_spec(layers, adapted=EACH_KIND, remat=remat).divided(tensor=2).part(2)

    def loss(tables, base, *inputs):
        by_path = to_modules(spec.stacks, tables)
        return job_losses(spec, base, by_path, *inputs).loss.sum()

    traced = jax.make_jaxpr(jax.grad(loss), axis_env=[("tensor", 2)])(
        spec.adapter_shapes(), spec.base_shapes(), settings(spec), batch(), KEYS
    )
    found = Counter(primitives(traced.jaxpr))
    return found["all_gather"] + found["reduce_scatter"]


@pytest.mark.parametrize("remat", EXCHANGED_AGAIN)
def test_layers_that_are_recomputed_exchange_again(remat):
    """As the prediction of time counts it."""
    more = num_traced(3, remat) - num_traced(2, remat)
    assert more == 2 * EXCHANGES + EXCHANGED_AGAIN[remat]


def test_hidden_states_are_exchanged_in_the_dtype_of_activations():
    text = lowered(2, EACH_KIND).as_text()
    found = {
        kind: re.findall(
            rf"stablehlo\.{kind}\".*?\(tensor<([\dx]+)x(\w+)>\) ->", text, re.DOTALL
        )
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    # The first layer's input is not trained; the loss gathers, and the embedding adds.
    own, whole = f"{TOKENS // 2}x32", f"{TOKENS}x32"
    assert Counter(found["all_gather"]) == {(own, "bf16"): 9}
    assert Counter(found["reduce_scatter"]) == {(whole, "bf16"): 9}
    assert {shape for shape, _ in found["all_reduce"]} <= {f"{TOKENS}", f"{TOKENS}x2"}


# ---- what is divided -----------------------------------------------------------------


def test_placements():
    spec = make_spec().divided(fsdp=2, tensor=2)
    specs, axes = weight_specs(spec), table_axes(spec)
    P = PartitionSpec
    assert specs["embed_tokens.embedding"] == P("tensor", "fsdp")
    assert specs["lm_head.kernel"] == P("fsdp", "tensor")
    assert specs["layers.0.self_attn.k_proj.kernel"] == P("fsdp", "tensor")
    assert specs["layers.0.self_attn.k_proj.bias"] == P("tensor")
    assert specs["layers.1.mlp.down_proj.kernel"] == P(("tensor", "fsdp"))
    assert specs["layers.1.mlp.down_proj.bias"] == P()
    assert specs["norm.scale"] == P()
    assert axes["self_attn.q_proj.lora_b"] == 3 and axes["mlp.down_proj.lora_a"] == 2
    assert "self_attn.q_proj.lora_a" not in axes and "mlp.down_proj.lora_b" not in axes
    copies = make_spec().divided(tensor=4)
    assert weight_specs(copies)["layers.0.self_attn.k_proj.kernel"] == P()
    assert "self_attn.k_proj.lora_b" not in table_axes(copies)


@pytest.mark.parametrize(
    ("changes", "tensor", "match"),
    [
        ({}, 3, "tensor=3 does not divide num_attention_heads=4 of the model"),
        ({"intermediate_size": 49}, 2, "does not divide intermediate_size=49"),
        ({"vocab_size": 289}, 2, "does not divide vocab_size=289"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_key_value_heads=3: one must be"),
    ],
)
def test_models_that_cannot_be_divided(changes, tensor, match):
    config = dataclasses.replace(make_spec().config, **changes)
    with pytest.raises(ValueError, match=match):
        check_divides(config, tensor)


def test_heads_of_gated_delta_nets_that_cannot_be_divided():
    config = model_config(DELTA_NET | {"linear_num_key_heads": 1})
    with pytest.raises(ValueError, match="does not divide linear_num_key_heads=1 of"):
        check_divides(config, 2)


def test_a_gated_delta_net_is_divided_by_heads():
    spec = make_spec(**SPECS["delta"]).divided(fsdp=2, tensor=2)
    specs, axes = weight_specs(spec), table_axes(spec)
    mixer, P = "layers.0.linear_attn", PartitionSpec
    assert specs[f"{mixer}.in_proj_qkv.kernel.values"] == P(None, "fsdp")
    assert specs[f"{mixer}.in_proj_z.kernel.values"] == P(("tensor", "fsdp"))
    assert specs[f"{mixer}.conv"] == P()
    assert specs[f"{mixer}.a_log"] == P("tensor")
    assert "linear_attn.in_proj_qkv.lora_b" not in axes
    assert axes["linear_attn.in_proj_a.lora_b"] == 3


def test_quantized_blocks_that_a_border_would_cut():
    config = dataclasses.replace(make_spec().config, hidden_size=64, head_dim=64)
    config = dataclasses.replace(config, intermediate_size=192)
    nf4 = functools.partial(BaseFormat.named, "nf4")
    with pytest.raises(ValueError, match="Set double_quant: false"):
        check_divides(config, 2, nf4())
    with pytest.raises(ValueError, match=r"mlp\.down_proj with K=96: nf4"):
        check_divides(config, 2, nf4(double_quant=False))
    config = dataclasses.replace(config, intermediate_size=256)
    check_divides(config, 2, nf4(double_quant=False))
    check_divides(config, 2, BaseFormat.named("int8"))
