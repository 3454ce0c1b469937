"""LoRA on every linear equals torch's, for families with blocks of their own.

These are experts and gated delta nets; see tests/golden.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import DecoderOptions, DecoderSpec, Routing, SlotShape, load_model
from jaxlora.adapters.slot_state import padded_rows
from jaxlora.errors import ModelError
from jaxlora.hf.convert import convert
from jaxlora.models.blocks.experts import choose_experts
from jaxlora.models.config import shared_path
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.stacks import to_modules, to_paths
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.modules.loss import target_nll
from jaxlora.modules.rows import PackedRows, layer_ropes
from jaxlora.modules.scoring import softcap
from jaxlora.modules.shared_inputs import with_shared_inputs
from tests.jaxlora.models.test_logits import MODELS, pack
from tests.oracle import relative_error

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
CASES = sorted(path.parent.name for path in MODELS.glob("*/lora.safetensors"))
RANK = 2  # of make_logits.py
OF_PEFT = {"lora_a": "lora_A", "lora_b": "lora_B"}


@functools.partial(jax.jit, static_argnums=0)
def run(spec: DecoderSpec, tables, base, settings, rows, is_target):
    """Returns the gradients of the loss, and the logits."""
    tokens, *_ = rows
    cap = spec.config.logit_softcap

    def loss(tables):
        own = to_modules(spec.stacks, tables)
        decoder = spec.bind(base, own, settings=settings)
        hidden = decoder(*rows, Routing(block_adapter=jnp.zeros(1, jnp.int32)))
        head, transposed = decoder.stored_head(hidden)
        nll = target_nll(
            hidden,
            head,
            jnp.roll(tokens, -1),
            is_target,
            head_transposed=transposed,
            logit_softcap=cap,
        )
        logits = hidden @ (head.T if transposed else head)
        return nll.sum(), softcap(logits, cap)

    return jax.grad(loss, has_aux=True)(tables)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_those_of_torch(case):
    model = load_model(MODELS / case, dtype="float32")
    golden = safetensors.numpy.load_file(MODELS / case / "lora.safetensors")
    sampled = np.load(MODELS / case / "logits.npz")
    # The one that is compared ran alone there; here another one comes before it.
    other, sample = sampled["tokens_1"], sampled["tokens_0"]
    own = slice(len(other), len(other) + len(sample))
    names = {linear_path(name): name for name in linear_shapes(model.config)}
    adapted = tuple(sorted({shared_path(path) for path in names}))
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=128),
        slots=SlotShape(num_slots=1, rank=RANK),
        adapted=adapted,
    )
    ones = np.ones((len(adapted), 1), np.float32)
    settings = SlotSettings(
        scaling=ones, dropout=0 * ones, rank=np.full_like(ones, RANK, np.int32)
    )
    by_path = {
        f"{path}.{table}": golden[f"{name}.{theirs}"].T
        for path, name in names.items()
        for table, theirs in OF_PEFT.items()
    }
    padded = padded_rows(spec.stacks, spec.adapter_shapes(), by_path)
    tables = {name: jnp.asarray(row[None]) for name, row in padded.items()}
    is_target = (jnp.arange(128) >= own.start) & (jnp.arange(128) < own.stop - 1)

    rows = pack([other, sample], total=128)
    gradients, logits = run(spec, tables, model.params, settings, rows, is_target)
    gradients = to_paths(spec.stacks, {n: x[0] for n, x in gradients.items()})
    # Up to 1.1e-5, and 1.3e-4 of gradients, on some processors: sums have other orders.
    assert relative_error(logits[own], golden["logits"]) < 2e-5
    for path, name in names.items():
        for table, theirs in OF_PEFT.items():
            wanted = golden[f"{name}.{theirs}.gradient"]
            actual = np.asarray(gradients[f"{path}.{table}"]).T
            assert relative_error(actual, wanted) < 2e-4, name


def test_experts_that_are_stored_in_two_tensors(tmp_path):
    """As transformers 5 can save them; the model is the same to the last bit."""
    weights = safetensors.numpy.load_file(MODELS / "olmoe" / "model.safetensors")
    experts = {name: weights.pop(name) for name in list(weights) if "experts" in name}
    for block in {name.partition(".experts.")[0] for name in experts}:
        for fused, linears in FUSED.items():
            name = f"{block}.experts.{{}}.{{}}.weight".format
            number = sum(x.startswith(block) for x in experts) // 3
            parts = [experts[name(i, x)] for i in range(number) for x in linears]
            rows = np.concatenate(parts).reshape(number, -1, parts[0].shape[1])
            weights[f"{block}.experts.{fused}"] = rows
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(weights))
    config = (MODELS / "olmoe" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    fused, single = load_model(tmp_path), load_model(MODELS / "olmoe")
    assert fused.fingerprint == single.fingerprint
    for path, array in single.params.items():
        np.testing.assert_array_equal(fused.params[path], array)
    out = convert(tmp_path, tmp_path / "out", dtype="float32")
    again = safetensors.numpy.load_file(out / "model.safetensors")
    assert again.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(again[name], array)


@pytest.mark.parametrize("shape", [(0, 40, 32), (9, 41, 32)])
def test_tensors_of_all_experts_have_rows_of_each(tmp_path, shape):
    weights = safetensors.numpy.load_file(MODELS / "olmoe" / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weights[name] = np.zeros(shape, np.float32)
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(weights))
    config = (MODELS / "olmoe" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=rf"{name} has shape .*; wanted experts"):
        load_model(tmp_path)


def block_of(case: str):
    """Returns the first mixture of a model, two of whose linears have two slots."""
    model = load_model(MODELS / case, dtype="float32")
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=128),
        slots=SlotShape(num_slots=2, rank=3, expert_rank=2),
        adapted=("layers.0.mlp.experts.down_proj", "layers.0.mlp.experts.gate_proj"),
    )
    tables = to_modules(spec.stacks, noise(spec.adapter_shapes(), 1))
    settings = SlotSettings(
        (name, jnp.full(x.shape, {"rank": 2, "scaling": 0.5}.get(name, 0), x.dtype))
        for name, x in spec.settings_shapes().items()
    )
    decoder = spec.bind(model.params, tables, settings=settings)
    return decoder.layers["0"].mlp, spec, model.config.expert_shape(0)


def noise(shapes, seed):
    rng = np.random.default_rng(seed)
    return {
        n: jnp.asarray(rng.normal(size=x.shape) / 4, x.dtype) for n, x in shapes.items()
    }


@pytest.mark.parametrize("case", ["olmoe", "qwen2_moe"])
def test_a_mixture_equals_its_definition_in_float64(case):
    """With the routes given, and with two adapters beside each other."""
    block, spec, shape = block_of(case)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(192, spec.config.hidden_size)).astype(np.float32)
    slots = np.array([1, -1, 0])  # of blocks of 64 rows
    count = jnp.arange(len(x))

    @jax.jit
    def run(x):
        rows = PackedRows(
            ropes=layer_ropes(spec.config, count),
            routing=Routing(block_adapter=jnp.asarray(slots)),
            segment_ids=jnp.zeros_like(count),
            lengths=spec.options.lengths,
            implementation="xla",
        )
        return block(x, rows)

    actual = np.asarray(run(x), np.float64)
    logits = x.astype(np.float64) @ np.asarray(block.gate[...], np.float64)
    weights, chosen = choose_experts(jnp.asarray(logits, jnp.float32), shape)
    order = np.sort(logits, axis=1)[:, ::-1]
    is_clear = order[:, shape.chosen - 1] - order[:, shape.chosen] > 1e-4
    assert is_clear.mean() > 0.9
    own = np.argsort(-logits, axis=1, kind="stable")[:, : shape.chosen]
    np.testing.assert_array_equal(np.asarray(chosen)[is_clear], own[is_clear])
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shares = np.take_along_axis(shares, np.asarray(chosen), 1)
    if shape.normalizes:
        shares /= shares.sum(1, keepdims=True)
    assert relative_error(weights, shares) < 1e-6

    def linear(name, row, expert, slot):
        one = getattr(block.experts, name)
        w = np.asarray(one.kernel[expert], np.float64)
        if one.slots is not None:
            a, b = (
                np.asarray(t[slot, expert], np.float64)
                for t in (one.lora_a, one.lora_b)
            )
            w = w + 0.5 * a @ b
        return row @ w

    wanted = np.zeros_like(actual)
    for t in np.flatnonzero(np.repeat(slots, 64) >= 0):
        slot = slots[t // 64]
        for expert, share in zip(np.asarray(chosen)[t], shares[t], strict=True):
            given = x[t].astype(np.float64), expert, slot
            gate, up = (linear(f"{n}_proj", *given) for n in ("gate", "up"))
            inner = gate / (1 + np.exp(-gate)) * up
            wanted[t] += share * linear("down_proj", inner, expert, slot)
    if shape.shared_features is not None:
        shared = block.shared_expert
        gate, up = (
            x @ np.asarray(one.weight, np.float64) for one in shared.input_linears
        )
        inner = gate / (1 + np.exp(-gate)) * up
        share = x @ np.asarray(block.shared_expert_gate[...], np.float64)
        down = inner @ np.asarray(shared.down_proj.weight, np.float64)
        wanted += down / (1 + np.exp(-share))
    live = np.repeat(slots, 64) >= 0
    assert relative_error(actual[live], wanted[live]) < 1e-6


def test_routes_and_output_of_a_token_depend_on_no_other():
    """Its routes whatever the others are; its output if they keep their places.

    The others are of another slot. Doubled, they have the same experts, and in another
    order, each expert has as many of them.
    """
    block, spec, shape = block_of("olmoe")
    x = np.random.default_rng(0).normal(size=(192, 32)).astype(np.float32)
    own, count = slice(64, 128), jnp.arange(len(x))
    rows = PackedRows(
        ropes=layer_ropes(spec.config, count),
        routing=Routing(block_adapter=jnp.array([1, 0, 1])),
        segment_ids=jnp.zeros_like(count),
        lengths=spec.options.lengths,
        implementation="xla",
    )
    routes = jax.jit(lambda x: choose_experts(x @ block.gate[...], shape))

    @jax.jit
    def both_ways(x):
        y, back = jax.vjp(lambda x: block(x, rows), x)
        return y, *back(jnp.ones_like(y))

    def with_others(change):
        return np.concatenate([change(x[:64]), x[own], change(x[128:])])

    alone = [np.asarray(one)[own] for one in (*routes(x), *both_ways(x))]
    doubled, turned = (
        with_others(lambda one: 2 * one),
        with_others(lambda one: one[::-1]),
    )
    for other in (doubled, turned):
        found = [np.asarray(one)[own] for one in (*routes(other), *both_ways(other))]
        for one, wanted in zip(found, alone, strict=True):
            np.testing.assert_array_equal(one, wanted)
    for change in (np.zeros_like, lambda one: one * np.nan):
        for one, wanted in zip(routes(with_others(change)), alone[:2], strict=True):
            np.testing.assert_array_equal(np.asarray(one)[own], wanted)


def test_a_linear_without_slots_beside_one_that_drops():
    """`up` has none; `gate` drops features of the same input."""
    block, spec, _ = block_of("olmoe")
    count = jnp.arange(128)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 32)), jnp.float32)
    zeros = jnp.zeros(2, jnp.int32)
    plain = Routing(block_adapter=jnp.arange(2))
    drops = dataclasses.replace(plain, token_index=count, seed=zeros, step=zeros)

    @jax.jit
    def run(block, routing):
        own = block.experts
        adapted = {(0, x.place[1]): x for x in (own.gate_proj, own.down_proj)}
        rows = PackedRows(
            ropes=layer_ropes(spec.config, count),
            routing=with_shared_inputs(adapted, routing).for_layer(0),
            segment_ids=jnp.zeros_like(count),
            lengths=spec.options.lengths,
            implementation="xla",
        )
        return block(x, rows)

    def output(routing, rate):
        block.experts.gate_proj.dropout[...] = jnp.full(2, rate)
        return np.asarray(run(block, routing))

    whole = output(plain, 0.0)
    np.testing.assert_array_equal(output(drops, 0.0), whole)
    assert 1e-3 < relative_error(output(drops, 0.5), whole) < 10
