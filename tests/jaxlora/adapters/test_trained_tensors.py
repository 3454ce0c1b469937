"""A variant with a third trained tensor: all that is no mathematics carries it."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.adapters.optimizer import OptimizerInputs, optimizer_step
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.targets import resolve_targets
from jaxlora.errors import AdapterError
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.modules.variants import lora
from jaxlora.modules.variants import table as variant_table
from jaxlora.modules.variants.variant import TrainedTensor, Variant
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import SavedRun
from jaxlora.train.execute.step import CompiledSteps
from jaxlora.train.saved.checkpoint import Checkpoints
from jaxlora.train.saved.read_checkpoint import read_newest
from tests import tiny
from tests.jaxlora.train.made_run import NO_STREAM

# Like DoRA's magnitudes: a vector per linear, which starts from the norms of the frozen
# weight's columns. It has a learning rate of its own.
MAGNITUDE = TrainedTensor(
    name="lora_example",
    peft_name="lora_example",
    dimensions=("N",),
    start=lambda job, rng, kernel, rank: np.linalg.norm(np.asarray(kernel), axis=0),
    rate_ratio=lambda job: 3.0,
)


class Always(Variant):
    """All adapters have the third tensor."""

    tensors = (MAGNITUDE,)


class BySetting(Always):
    """A setting of the job gives it to an adapter."""

    setting = "use_example"


def add(monkeypatch, variant: Variant) -> None:
    found = *variant_table.variants(), variant
    monkeypatch.setattr(variant_table, "_loaded", lambda: found)


JOB = LoraJob.model_validate(
    {
        "name": "job",
        "data": {"path": "none"},
        "rank": 2,
        "target_modules": ["q_proj"],
        "lora_plus_ratio": 2.0,
    }
)


@pytest.fixture
def spec(monkeypatch):
    """A decoder made while the table has such a variant."""
    add(monkeypatch, Always())
    return DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=16),
        slots=SlotShape(num_slots=2, rank=3),
        adapted=tuple(f"layers.{i}.self_attn.q_proj" for i in range(2)),
    )


@pytest.fixture
def start(spec, linear_shapes):
    rng = np.random.default_rng(0)
    kernels = {name: rng.normal(size=shape) for name, shape in linear_shapes.items()}
    adapter = fresh_adapter(JOB, resolve_targets(JOB, list(kernels)), kernels)
    for name, weights in adapter.modules.items():
        norms = np.linalg.norm(kernels[name], axis=0)
        np.testing.assert_allclose(weights.tensors[MAGNITUDE.name], norms, rtol=1e-6)
    return adapter


def stepped(spec, adapter) -> SlotTable:
    """Slots of which the second holds the adapter, after a step with gradients of 1."""
    table = SlotTable(spec, CompiledSteps(spec).write_slot)
    table.load(1, adapter, "adamw")

    def row(value, dtype=np.float32):
        return np.array([0, value], dtype)

    inputs = OptimizerInputs(
        step_mask=row(True, np.bool_),
        count=row(0, np.int32),
        learning_rate=row(0.01),
        rate_ratio=rate_ratios(lambda ratio: row(ratio(JOB))),
        weight_decay=row(0),
        settings={"adamw": {"b1": row(0.9), "b2": row(0.999), "eps": row(1e-8)}},
        optimizer=np.zeros(2, np.int32),
        max_norm=row(np.inf),
    )
    ones = jax.tree.map(jnp.ones_like, table.state.pending.gradients)
    pending = dataclasses.replace(table.state.pending, gradients=ones)
    state = dataclasses.replace(table.state, pending=pending)
    table.state, _ = jax.jit(optimizer_step)(state, inputs)
    return table


def test_slots_and_the_optimizer_carry_a_third_tensor(spec, start):
    after = stepped(spec, start).read(1, start)
    for name, weights in after.modules.items():
        for tensor, ratio in ((lora.LORA_A, 1), (lora.LORA_B, 2), (MAGNITUDE, 3)):
            moved = weights.tensors[tensor.name]
            moved = moved - start.modules[name].tensors[tensor.name]
            np.testing.assert_allclose(moved, -0.01 * ratio, rtol=1e-3)


def test_a_checkpoint_carries_a_third_tensor(spec, start, tmp_path):
    table = stepped(spec, start)
    run = SavedRun(
        progress={"job": JobProgress(status="running", slot=1, step=1)},
        adapters={"job": start},
        optimizers={"job": "adamw"},
        stream=NO_STREAM,
    )
    with contextlib.closing(Checkpoints(tmp_path, keep=9)) as checkpoints:
        checkpoints.save(1, {"job": table.copy(1)}, run)
    found = read_newest(tmp_path, has_tensors=True)
    table.restore(0, found.parked("job"), found.adapter("job"))
    for kind, before in table.copy(1).by_kind().items():
        after = table.copy(0).by_kind()[kind]
        assert any(path.endswith(MAGNITUDE.name) for path in before)
        for path, tensor in before.items():
            assert tensor.any()
            np.testing.assert_array_equal(after[path], tensor)


def test_export_and_import_carry_a_third_tensor(spec, start, tmp_path, linear_shapes):
    folder = export_peft(
        start, tmp_path / "a", base_model="b", linear_names=list(linear_shapes)
    )
    path = folder / "adapter_model.safetensors"
    stored = safetensors.numpy.load_file(path)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_example"
    assert stored[key].shape == (linear_shapes["model.layers.0.self_attn.q_proj"][1],)
    back = import_peft(folder, linear_shapes).by_path()
    assert back.keys() == start.by_path().keys()
    for name, tensor in start.by_path().items():
        np.testing.assert_array_equal(back[name], tensor)
    safetensors.numpy.save_file({k: t for k, t in stored.items() if k != key}, path)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_example"):
        import_peft(folder, linear_shapes)


class ExampleJob(LoraJob):
    """A job with the setting that gives it a third tensor."""

    use_example: bool = False


def test_a_setting_gives_a_tensor(monkeypatch, tmp_path, linear_shapes):
    add(monkeypatch, BySetting())
    kernels = {name: np.ones(shape) for name, shape in linear_shapes.items()}
    spec = DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=16),
        slots=SlotShape(num_slots=2, rank=3, settings=("use_example",)),
        adapted=tuple(f"layers.{i}.self_attn.q_proj" for i in range(2)),
    )
    paths = {f"{path}.lora_example" for path in spec.adapted}
    for is_set in (True, False):
        job = ExampleJob(**JOB.model_dump(), use_example=is_set)
        start = fresh_adapter(job, resolve_targets(job, list(kernels)), kernels)
        assert paths & start.by_path().keys() == (paths if is_set else set())
        table = stepped(spec, start)
        kept = table.copy(1).params
        assert paths & kept.keys() == (paths if is_set else set())
        folder = export_peft(
            start,
            tmp_path / str(is_set),
            base_model="b",
            linear_names=list(linear_shapes),
        )
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["use_example"] is is_set
        back = import_peft(folder, linear_shapes)
        assert back.is_set("use_example") is is_set
        assert back.by_path().keys() == start.by_path().keys()
        config["use_example"] = not is_set
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(AdapterError, match="lora_example"):
            import_peft(folder, linear_shapes)


def test_an_unknown_tensor_is_refused(linear_shapes, spec, start, tmp_path):
    folder = export_peft(
        start, tmp_path / "a", base_model="b", linear_names=list(linear_shapes)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant_table, "_loaded", lambda: (lora.VARIANT,))
        with pytest.raises(AdapterError, match=r"only lora_A\.weight and lora_B\.we"):
            import_peft(folder, linear_shapes)
