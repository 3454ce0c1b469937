"""A decoder whose weights are divided among devices computes what a whole one does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlora.models import sharded
from jaxlora.models.division import weight_specs
from jaxlora.models.forward import SlotKeys, job_losses, run_stage
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.residuals import pull_back
from jaxlora.models.slot_settings import SlotSettings, settings_of_base
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from tests import tiny
from tests.pallas_kernels.problems import QUICK_TO_COMPILE

LAYERS, SLOTS, TOKENS = 3, 2, 40
MOST_DEVICES = 4
PER_DEVICE = PartitionSpec(("data", "fsdp"))
# The first linear is not adapted in any layer, the last one in all.
ADAPTED = ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
KEYS = SlotKeys(seed=jnp.arange(SLOTS), step=jnp.full(SLOTS, 5, jnp.int32))


def make_spec(**options) -> DecoderSpec:
    """A model with biases, whose embedding and head are one if `tied`."""
    fields = {
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": options.pop("tied", False),
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
    }
    config = model_config(tiny.CONFIG | fields)
    dtype = jnp.dtype("float32")
    return DecoderSpec(
        config=config,
        options=DecoderOptions(dtype=dtype, max_segment_tokens=TOKENS, **options),
        slots=SlotShape(num_slots=SLOTS, rank=4),
        adapted=tuple(
            sorted(f"layers.{i}.{name}" for i in range(LAYERS) for name in ADAPTED)
        ),
    )


def whole_spec(spec: DecoderSpec) -> DecoderSpec:
    options = dataclasses.replace(spec.options, fsdp=1)
    return dataclasses.replace(spec, options=options)


def random(shapes, seed: int):
    rng = np.random.default_rng(seed)
    return {
        path: jnp.asarray(rng.normal(size=s.shape, scale=0.1), s.dtype)
        for path, s in sorted(shapes.items())
    }


def arrays(spec: DecoderSpec):
    """Random weights and adapter tables, by path."""
    tables = to_modules(spec.stacks, random(spec.adapter_shapes(), 1))
    return random(spec.base_shapes(), 0), tables


def settings(spec: DecoderSpec) -> SlotSettings:
    values = settings_of_base(spec.settings_shapes())
    values["scaling"][:], values["dropout"][:], values["rank"][:] = 1.5, 0.2, 4
    return jax.tree.map(jnp.asarray, values)


def batches(num_devices: int) -> PackedBatch:
    """A microbatch of its own for each device; the first axis is that of devices.

    Those of fewer devices are the first of `MOST_DEVICES`.
    """
    rng = np.random.default_rng(2)
    shape = MOST_DEVICES, TOKENS
    rows = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), shape)
    values = PackedBatch(
        token_ids=rng.integers(0, 50, shape).astype(np.int32),
        positions=rows % 12,
        segment_ids=rows // 12,
        labels=rng.integers(0, 50, shape).astype(np.int32),
        loss_inputs={"next_token": {"weight": rng.random(shape, np.float32)}},
        token_index=rows + TOKENS * np.arange(MOST_DEVICES, dtype=np.int32)[:, None],
        block_adapter=np.stack(
            [np.roll([0, 1, -1, 1], i) for i in range(MOST_DEVICES)]
        ).astype(np.int32),
    )
    return jax.tree.map(lambda x: jnp.asarray(x[:num_devices]), values)


def loss_and_gradients(spec: DecoderSpec, base, tables, batch):
    def total(tables):
        out = job_losses(spec, base, tables, settings(spec), batch, KEYS)
        return out.loss.sum(), out

    return jax.grad(total, has_aux=True)(tables)


def on_devices(
    spec: DecoderSpec,
    run,
    *args_specs: PartitionSpec,
    compiler_options: dict | None = QUICK_TO_COMPILE,
):
    """Runs `run(base, *args)` on each device of a mesh, with shards of the base."""
    (mesh,) = stage_meshes(MeshSizes(fsdp=spec.options.fsdp))
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(weight_specs(spec), *args_specs),
            out_specs=PER_DEVICE,
            check_vma=False,
        ),
        compiler_options=compiler_options,
    )


def first(tree):
    return jax.tree.map(lambda x: x[0], tree)


def with_axis(tree):
    return jax.tree.map(lambda x: x[None], tree)


@pytest.mark.needs_devices(2)
def test_a_stage_keeps_only_activations_for_its_backward_program():
    """Weights are gathered again, or each stage would hold them all at once."""
    spec = make_spec(fsdp=2, tied=True)
    (base, tables), stage = arrays(spec), spec.stage(0, 2)
    base = {path: base[path] for path in stage.base_shapes()}
    tables = {path: tables[path] for s in stage.stacks for path in s.paths}
    shapes = {s.shape for s in spec.base_shapes().values() if s.ndim > 1}
    shapes |= {(k // 2, n) for k, n in shapes}

    def forward(base, tables, batch):
        def run(tables):
            return run_stage(stage, base, tables, settings(stage), first(batch), KEYS)

        h, _, kept = pull_back(run, (tables,), (base, tables))
        assert kept and not shapes & {array.shape for array in kept}
        return with_axis((h, kept))

    run = on_devices(stage, forward, PartitionSpec(), PER_DEVICE)
    jax.eval_shape(run, base, tables, batches(2))


# ---- placements, and wrong meshes ----------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_placements_of_the_weights(tied):
    spec = make_spec(fsdp=4, tied=tied)
    specs = weight_specs(spec)
    assert specs.keys() == spec.base_shapes().keys()
    rows, columns = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
    assert specs["embed_tokens.embedding"] == columns
    assert specs.get("lm_head.kernel", rows) == rows
    assert specs["layers.0.mlp.down_proj.kernel"] == rows
    assert specs["layers.0.self_attn.q_proj.bias"] == PartitionSpec()
    assert specs["layers.0.mlp_norm.scale"] == PartitionSpec()
    assert set(weight_specs(whole_spec(spec)).values()) == {PartitionSpec()}


def test_weights_that_the_devices_do_not_divide_are_refused():
    match = r"embed_tokens.embedding of shape \(288, 32\) cannot .* fsdp=3 devices"
    with pytest.raises(ValueError, match=match):
        weight_specs(make_spec(fsdp=3))
    with pytest.raises(ValueError, match="fsdp=0 must be a number of devices"):
        make_spec(fsdp=0)


def test_shards_outside_of_a_mesh_are_refused():
    spec = make_spec(fsdp=2)
    base, tables = arrays(spec)
    match = "among fsdp=2 devices, but there is no such axis here. .* has 2 devices"
    with pytest.raises(ValueError, match=match):
        loss_and_gradients(spec, base, tables, first(batches(1)))


@pytest.mark.needs_devices(2)
def test_a_mesh_of_another_size_is_refused():
    spec = make_spec(fsdp=2)

    def local(base, tables, batch):
        other = dataclasses.replace(spec.options, fsdp=4)
        part = dataclasses.replace(spec, options=other)
        return with_axis(loss_and_gradients(part, base, tables, first(batch)))

    run = on_devices(spec, local, PartitionSpec(), PER_DEVICE)
    with pytest.raises(ValueError, match="fsdp=4 devices, but there is an axis of 2"):
        run(*arrays(spec), batches(2))


@pytest.mark.needs_devices(2)
def test_alike_layers_are_traced_once(monkeypatch):
    spec, traced, run = make_spec(fsdp=2), [], sharded.run_layer

    def counted(*args):
        traced.append(args)
        return run(*args)

    monkeypatch.setattr(sharded, "run_layer", counted)
    base, tables = arrays(whole_spec(spec))

    def gradients(base, batch):
        return with_axis(loss_and_gradients(spec, base, tables, first(batch)))

    jax.eval_shape(on_devices(spec, gradients, PER_DEVICE), base, batches(2))
    assert len(traced) == 1
