"""VeRA beside LoRA in one run, each job as if it were alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import LoraJob
from jaxlora.adapters.optimizers.adafactor import adafactor
from jaxlora.errors import ConfigError
from jaxlora.models.slot_settings import shared_settings
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.variants.lora import LORA_A
from jaxlora.modules.variants.vera import VERA_B, VERA_D
from jaxlora.plan.job.slot_spec import check_fits
from jaxlora.plan.memory.estimate import scratch_bytes
from jaxlora.plan.memory.footprint import num_bytes, stage_resident
from tests.jaxlora.train.runs import ONE_STAGE, tiny_spec
from tests.jaxlora.train.test_contracts import assert_same_training


def vera(job: LoraJob, **changes) -> LoraJob:
    """The job with VeRA, which has neither a scaling nor LoRA+."""
    given = {"use_vera": True, "lora_alpha": 32.0, "use_rslora": False}
    return job.replace(**given | {"lora_plus_ratio": 1.0, "rank": 8} | changes)


def test_jobs_train_beside_vera_as_if_alone(train, jobs):
    """With dropout; a run of VeRA alone has no tables of A and B."""
    # `test_peft_run.py` has linears of several sizes.
    jobs = [job.replace(target_modules=("down_proj",)) for job in jobs[:5]]
    slots = {"slot_targets": jobs[0].target_modules}
    first, third = vera(jobs[0]), vera(jobs[2], rank=3, projection_prng_key=3)
    dora = jobs[1].replace(use_dora=True)
    together = train([first, dora, third], **slots)
    alone = train([first, third], microbatch_tokens=256, **slots)
    assert_same_training(together, alone, [first.name, third.name])
    slots = alone.trainer.layout.stages[0].spec.slots
    assert slots.tensors == (VERA_D, VERA_B)
    assert LORA_A in together.trainer.layout.stages[0].spec.slots.tensors
    with pytest.raises(ConfigError, match="has A and B, and the slots of this run"):
        alone.trainer.add_job(jobs[4])
    spec = together.trainer.layout.stages[0].spec
    without = dataclasses.replace(spec.slots, settings=("use_dora",))
    spec = dataclasses.replace(spec, slots=without)
    with pytest.raises(ConfigError, match="has use_vera, and the slots of this run"):
        check_fits(together.trainer.jobs[0].prepared, spec, 512)


def test_adafactor_clips_by_the_mean_over_the_own_rank():
    """Not over the rank of the slot, which another job may need."""
    made = adafactor(0.1, 0.0, clip_threshold=0.5, decay_rate=0.8)
    gradient, updates = np.array([3.0, -1.0, 0.5], np.float32), []
    for size in (3, 8):
        given = {VERA_D.name: jnp.zeros(size).at[:3].set(gradient)}
        state = made.init(given)
        found, _ = made.update(given, state, given, rank=3)
        updates.append(found[VERA_D.name][:3])
    np.testing.assert_array_equal(*updates)


def test_memory_counts_the_matrices_once():
    adapted = ["layers.0.self_attn.k_proj", "layers.0.self_attn.q_proj"]
    spec = tiny_spec(adapted, settings=("use_vera",), has_lora=False)
    found = stage_resident(spec, ONE_STAGE)
    sizes = [spec.linear(path) for path in spec.adapted]
    trained = 4 * 2 * sum(4 + linear.out_features for linear in sizes)
    k = max(linear.in_features for linear in sizes)
    n = max(linear.out_features for linear in sizes)
    matrices = 4 * 2 * 4 * (k + n) + 2
    assert found.adapter_bytes == 4 * trained + matrices
    assert found.gradient_bytes == trained + matrices
    assert num_bytes(shared_settings(spec.settings_shapes())) == matrices
    both = sum(linear.in_features + linear.out_features for linear in sizes)
    assert scratch_bytes(spec) == 2 * 4 * 2 * 4 * both
    plain = dataclasses.replace(spec, slots=SlotShape(num_slots=2, rank=4))
    assert list(plain.settings_shapes()) == ["scaling", "dropout", "rank"]
    assert plain.settings_shapes()["scaling"].shape == (2, 2)
    np.testing.assert_equal(scratch_bytes(plain), 0)
