"""A decoder whose weights are divided among devices computes what a whole one does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlora.models.division import weight_specs
from jaxlora.models.forward import SlotKeys, job_losses, run_stage
from jaxlora.models.options import DecoderOptions
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.registry import model_config
from jaxlora.models.residuals import Pullback, pull_back
from jaxlora.models.slot_settings import SlotSettings, settings_of_base
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_paths
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
    tables = to_paths(spec.stacks, random(spec.adapter_shapes(), 1), axis=1)
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


@functools.cache
def wanted_losses_and_gradients(*, tied: bool):
    """Those of a whole decoder that recomputes nothing, for each of `MOST_DEVICES`."""
    spec = make_spec(tied=tied)
    run = jax.vmap(functools.partial(loss_and_gradients, spec), (None, None, 0))
    program = jax.jit(run, compiler_options=QUICK_TO_COMPILE)
    return program(*arrays(spec), batches(MOST_DEVICES))


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


def first_of(tree, count: int):
    return jax.tree.map(lambda x: x[:count], tree)


def with_axis(tree):
    return jax.tree.map(lambda x: x[None], tree)


def assert_equal(got, wanted):
    """Within the rounding of float32: programs of another mesh fuse differently."""

    def check(got, wanted):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * scale)

    jax.tree.map(check, got, wanted)


@pytest.mark.needs_devices(4)
@pytest.mark.parametrize(
    ("fsdp", "remat", "tied"),
    [
        (2, "none", True),
        pytest.param(4, "none", False, marks=pytest.mark.grid),
        pytest.param(4, "mlp", True, marks=pytest.mark.grid),
        pytest.param(2, "layer", False, marks=pytest.mark.grid),
    ],
)
def test_each_device_gets_the_losses_and_gradients_of_a_whole_decoder(
    fsdp, remat, tied
):
    spec = make_spec(fsdp=fsdp, remat=remat, tied=tied)
    base, tables = arrays(spec)

    def local(base, tables, batch):
        return with_axis(loss_and_gradients(spec, base, tables, first(batch)))

    run = on_devices(spec, local, PartitionSpec(), PER_DEVICE)
    got = run(base, tables, batches(fsdp))
    wanted = first_of(wanted_losses_and_gradients(tied=tied), fsdp)
    assert np.abs(wanted[1].loss).min() > 0
    assert_equal(got, wanted)


@pytest.mark.needs_devices(2)
def test_evaluation_gives_the_losses_of_a_whole_decoder():
    spec = make_spec(fsdp=2)

    def losses(spec, base, tables, batch):
        return job_losses(spec, base, tables, settings(spec), batch, None)

    def local(base, tables, batch):
        return with_axis(losses(spec, base, tables, first(batch)))

    args = *arrays(spec), batches(2)
    got = on_devices(spec, local, PartitionSpec(), PER_DEVICE)(*args)
    whole = functools.partial(losses, whole_spec(spec))
    assert_equal(got, jax.jit(jax.vmap(whole, (None, None, 0)))(*args))


@pytest.mark.needs_devices(2)
def test_a_stage_keeps_only_activations_for_its_backward_program():
    """The backward pass of the first stage runs in a program of its own."""
    spec = make_spec(fsdp=2, tied=True)
    (base, tables), batch = arrays(spec), batches(2)
    pullbacks: list[Pullback] = []
    first_stage, last_stage = spec.stage(0, 2), spec.stage(2, LAYERS)

    def own(stage):
        adapters = {p: tables[p] for stack in stage.stacks for p in stack.paths}
        return {p: base[p] for p in stage.base_shapes()}, adapters

    def forward(base, tables, batch):
        def run(tables):
            part = settings(first_stage)
            return run_stage(first_stage, base, tables, part, first(batch), KEYS)

        h, made, kept = pull_back(run, (tables,), (base, tables))
        pullbacks.append(made)
        shapes = {s.shape for s in spec.base_shapes().values() if s.ndim > 1}
        shapes |= {(k // 2, n) for k, n in shapes}
        assert not shapes & {array.shape for array in kept}
        return with_axis((h, kept))

    def both(base, tables, batch, h):
        def total(tables, h):
            part = settings(last_stage)
            out = run_stage(last_stage, base, tables, part, first(batch), KEYS, h)
            return out.loss.sum(), out

        return with_axis(jax.grad(total, (0, 1), has_aux=True)(tables, first(h)))

    def backward(base, tables, kept, dh):
        (gradients,) = pullbacks[-1].join(first(kept), (base, tables))(first(dh))
        return with_axis(gradients)

    whole = PartitionSpec()
    of_first, of_last = own(first_stage), own(last_stage)
    h, kept = on_devices(first_stage, forward, whole, PER_DEVICE)(*of_first, batch)
    last = on_devices(last_stage, both, whole, PER_DEVICE, PER_DEVICE)
    (gradients, dh), out = last(*of_last, batch, h)
    first_backward = on_devices(first_stage, backward, whole, PER_DEVICE, PER_DEVICE)
    gradients |= first_backward(*of_first, kept, dh)
    wanted, wanted_out = first_of(wanted_losses_and_gradients(tied=True), 2)
    assert_equal((gradients, out), (wanted, wanted_out))


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
