"""DoRA beside LoRA in one run, each job as if it were alone."""

import dataclasses

import numpy as np
import pytest

from jaxlora import LoraJob, RunConfig
from jaxlora.adapters.files.peft_export import PREFIX
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.adapters.targets import resolve_targets
from jaxlora.config import DataConfig
from jaxlora.errors import ConfigError
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.variants.dora import MAGNITUDE
from jaxlora.modules.variants.vera import VERA_B
from jaxlora.plan.job.slot_spec import check_fits
from jaxlora.plan.memory.estimate import scratch_bytes, step_bytes
from jaxlora.plan.memory.footprint import stage_resident
from tests import tiny
from tests.jaxlora.train.mesh_runs import write_untied
from tests.jaxlora.train.runs import ONE_STAGE, tiny_spec, trained_tensors
from tests.jaxlora.train.test_contracts import ROUNDING, assert_same_training
from tests.jaxlora.train.test_vera import vera
from tests.oracle import relative_error
from tests.pallas_kernels.quantized.weights import dequantized, quantized


def dora(job: LoraJob, **changes) -> LoraJob:
    return job.replace(use_dora=True, **changes)


def test_jobs_train_beside_dora_as_if_alone(train, jobs):
    """With dropout and without; a run of LoRA alone has other programs and tables."""
    one = {"target_modules": ("down_proj",)}
    first, second = dora(jobs[0], **one), jobs[1].replace(**one)
    third = dora(jobs[2], dropout=0.0)
    slots = {"slot_targets": one["target_modules"], "microbatch_tokens": 256}
    together, lora = train([first, second, third], **slots), train([second], **slots)
    # In the programs of the run of three.
    with_dropout = train([first], max_concurrent_jobs=3, **slots)
    assert_same_training(together, lora, [second.name])
    assert_same_training(together, with_dropout, [first.name])
    plain = together.adapters[second.name].values()
    assert all(MAGNITUDE.name not in weights.tensors for weights in plain)
    trainer = together.trainer
    slots = dataclasses.replace(trainer.layout.stages[0].spec.slots, dora_dropout=False)
    spec = dataclasses.replace(trainer.layout.stages[0].spec, slots=slots)
    with pytest.raises(ConfigError, match="has use_dora with dropout"):
        check_fits(trainer.jobs[0].prepared, spec, 256)
    start = {"init_lora_weights": "pissa", "dropout": 0.0, "weight_decay": 0.0}
    kept = dataclasses.replace(
        trainer.jobs[0].prepared, settings=trainer.jobs[0].settings.replace(**start)
    )
    with pytest.raises(
        ConfigError, match=r"has init_lora_weights .* were made without"
    ):
        check_fits(kept, spec, 256)
    with pytest.raises(ConfigError, match="has use_dora, and the slots of this run"):
        lora.trainer.add_job(third)


@pytest.fixture
def train_on(jobs, tmp_path_factory):
    """Trains jobs, five by default, in two slots; returns the adapters, by job."""
    # Few linears, and no evaluation: other tests have them on meshes.
    common = {"steps": 4, "eval_fraction": 0.0, "eval_every": None}
    run = [job.replace(**common, target_modules=("q_proj",)) for job in jobs[:5]]
    run = [dora(run[0]), run[4], dora(run[2]), run[3]]
    # A state of other shapes than the weights': factors.
    run[1] = run[1].replace(optimizer="adafactor", adam_eps=1e-8)
    # A head of its own, as rows of a tied one would be on two stages.
    model = write_untied(tmp_path_factory.mktemp("base") / "a", tiny.CONFIG)
    rows = {"embed_tokens": (100, 101, 110), "lm_head": (100, 111)}
    run[0] = run[0].replace(trainable_token_indices=rows)
    run[3] = vera(run[3], rank=6, projection_prng_key=5)
    run[3] = run[3].replace(modules_to_save=["embed_tokens", "lm_head"])
    copy = {"name": "copy", "clone_of": {"job": run[3].name, "step": 2}}
    run.append(run[3].replace(**copy, learning_rate=3e-3))

    def train(
        mesh: str, names: tuple[str, ...], *, stop: bool = False
    ) -> dict[str, dict[str, np.ndarray]]:
        folder = tmp_path_factory.mktemp("run")
        config = RunConfig(
            model=str(model),
            output_dir=str(folder),
            jobs=[job for job in run if job.name in names],
            max_concurrent_jobs=2,
            window_steps=1,
            microbatch_tokens=256,
            block_tokens=16,
            checkpoint_every=1,
            dtype="float32",
            mesh=mesh,
        )
        return trained_tensors(config, stop=stop)

    return train


EVERY = "job0", "job4", "job2", "job3", "copy"


@pytest.mark.needs_devices(8)
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        # Adafactor on meshes: test_optimizers.py.
        ("stage=2", ("job0", "job3", "copy")),
        pytest.param("stage=2,fsdp=2", EVERY, marks=pytest.mark.grid),
        pytest.param("data=2,stage=2,fsdp=2", EVERY, marks=pytest.mark.grid),
    ],
    ids=["few", "all", "all on replicas"],
)
def test_a_run_resumed_on_a_mesh_equals_one_device(train_on, mesh, names):
    """Magnitudes start from shards of the weights, and are parked, saved and staged.

    So are the vectors of VeRA, beside matrices for the linears of all stages, whole
    embeddings and heads, and the state of another optimizer.
    """
    one, other = train_on("stage=1", names), train_on(mesh, names, stop=True)
    assert len(one) == len(other) == len(names)
    for name, tensors in one.items():
        is_dora = name in ("job0", "job2")
        assert any(MAGNITUDE.peft_name in key for key in tensors) == is_dora
        is_vera = name in ("job3", "copy")
        assert any(VERA_B.peft_name in key for key in tensors) == is_vera
        for module in (one for one in SLOT_MODULES.values() if one.frozen):
            wanted = is_vera if module.is_whole else name == "job0"
            assert (f"{PREFIX}{module.peft_name}" in tensors) == wanted
        for key, array in tensors.items():
            assert relative_error(other[name][key], array) < ROUNDING, key


def test_magnitudes_start_from_the_norms_of_what_is_multiplied(linear_shapes):
    """With a quantized base, of the dequantized weights."""
    job = LoraJob(
        name="a", data=DataConfig(path="x"), use_dora=True, target_modules=["o_proj"]
    )
    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 128)).astype(np.float32)
    in_nf4 = quantized("nf4", w)
    targets = resolve_targets(job, list(linear_shapes))
    for kernel, dense in ((w.T, w.T), (in_nf4, dequantized(in_nf4).T)):
        found = fresh_adapter(job, targets, dict.fromkeys(targets, kernel))
        norms = np.linalg.norm(np.asarray(dense, np.float64), axis=0)
        for weights in found.modules.values():
            assert relative_error(weights.tensors[MAGNITUDE.name], norms) < 1e-6


def test_memory_counts_the_magnitudes():
    spec = tiny_spec(["layers.0.self_attn.q_proj"], settings=("use_dora",))
    found = stage_resident(spec, ONE_STAGE)
    assert found.adapter_bytes == 4 * 4 * 2 * (32 * 4 + 4 * 32 + 32)
    assert scratch_bytes(spec) == 2 * 4 * 2 * 4 * 32
    plain = dataclasses.replace(spec, slots=SlotShape(num_slots=2, rank=4))
    assert scratch_bytes(plain) == 0
    # The outputs of linears are kept for the gradient of the magnitudes.
    both = (*spec.adapted, "layers.1.self_attn.q_proj")
    specs = (dataclasses.replace(s, adapted=both) for s in (spec, plain))
    kept, without = (step_bytes(s, 16, None).kept_by_layer for s in specs)
    assert kept == pytest.approx(without + 32 * 4)
