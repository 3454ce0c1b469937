"""Runs on a quantized base: the contracts, resuming, meshes, and what they log."""

import functools
import logging

import numpy as np
import pytest

from jaxlora import LoraJob, RunConfig, Trainer, load_model
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.forecast import plan_run
from jaxlora.models.division import weight_specs
from tests import tiny
from tests.jaxlora.train.mesh_runs import SUM_ROUNDING
from tests.jaxlora.train.runs import AtWindow, Outcome, outcome

CONFIG = tiny.CONFIG | {"hidden_size": 64, "intermediate_size": 128}
# One linear of attention and one of the MLP; more compile for longer.
TARGETS = ("q_proj", "down_proj")
# Sums in another order move a few activations to the next number in e4m3, which is 6 to
# 12 % away, and Adam magnifies that from step to step.
FP8_ROUNDING = 1e-2


FORWARD, TWO_COPIES = {"fp8_backward": False}, {"weight_copies": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def jobs(folder) -> tuple[LoraJob, ...]:
    return tuple(
        LoraJob(
            name=f"job{i}",
            data={"path": tiny.write_records(folder / f"{i}.jsonl", 12, seed=i)},
            rank=2 + i,
            dropout=0.1,
            target_modules=(TARGETS, ("down_proj",))[i],
            batch_size=4,
            steps=4,
            learning_rate=1e-2,
            max_length=64,
            seed=i,
        )
        for i in range(2)
    )


@pytest.fixture(scope="module")
def config(folder, jobs):
    """Makes the settings of a run in a new folder."""
    sources, count = {}, iter(range(100))
    for layers in (1, 2):
        changed = CONFIG | {"num_hidden_layers": layers}
        sources[layers] = tiny.write_model(folder / f"model{layers}", config=changed)

    def make(layers: int = 1, **settings) -> RunConfig:
        own = {
            "model": str(sources[layers]),
            "output_dir": str(folder / f"run{next(count)}"),
            "jobs": jobs,
            "microbatch_tokens": 256,
            "block_tokens": 16,
            "slot_rank": 4,
            "slot_targets": TARGETS,
            "max_concurrent_jobs": 2,
            "slot_dropout": True,
            "window_steps": 2,
            "dtype": "float32",
        }
        return RunConfig(**own | settings)

    return make


@pytest.fixture(scope="module")
def train(config, jobs):
    """Trains all jobs or one of them; the same run is trained only once."""

    @functools.cache
    def run(only: int | None = None, **settings) -> Outcome:
        chosen = jobs if only is None else jobs[only : only + 1]
        return outcome(config(jobs=chosen, **settings))

    return run


@pytest.mark.parametrize(
    "name", ["fp8", pytest.param("int8", marks=pytest.mark.grid), "nf4"]
)
def test_a_run_trains_on_a_quantized_base(train, name):
    plain, outcome = train(), train(quantize_base=name)
    for job, losses in outcome.losses.items():
        assert losses != plain.losses[job]
        assert losses == pytest.approx(plain.losses[job], rel=0.15)
        assert losses[-1] < losses[0]


# ---- the contracts -------------------------------------------------------------------


def test_alone_equals_together_and_nothing_recompiles(train, jobs):
    together = train(quantize_base="fp8")
    for i, job in enumerate(jobs):
        alone = train(i, quantize_base="fp8")
        assert max(o.result.num_compilations for o in (alone, together)) <= 7
        ours, theirs = alone.losses[job.name], together.losses[job.name]
        assert ours == pytest.approx(theirs, rel=FP8_ROUNDING)


def test_same_bits_twice_and_after_an_interruption(config, train):
    settings = config(quantize_base="fp8", checkpoint_every=1)

    def interrupt(trainer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(settings).train(callbacks=[AtWindow(interrupt)])
    resumed = outcome(settings, resume=True)
    assert resumed.result.num_compilations == 0
    assert resumed.bytes == train(quantize_base="fp8").bytes


@pytest.mark.needs_devices(4)
@pytest.mark.parametrize(
    ("mesh", "name", "rounding"),
    [
        pytest.param("stage=2,fsdp=2", "fp8", FP8_ROUNDING, marks=pytest.mark.grid),
        ("fsdp=2", "nf4", SUM_ROUNDING),
    ],
)
def test_a_mesh_trains_what_one_device_trains(train, mesh, name, rounding):
    settings = {"quantize_base": name, "layers": 2 if "stage" in mesh else 1}
    one, other = train(**settings), train(**settings, mesh=mesh)
    for job, losses in other.losses.items():
        assert losses == pytest.approx(one.losses[job], rel=rounding)


# ---- settings ------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled_when_called")
def test_a_run_resumes_with_the_same_base_only(config, train):
    folder = str(train(quantize_base="fp8").trainer.output_dir)
    for settings, message in (
        ({}, "quantize_base is 'fp8' in run.json and None now"),
        ({"quantize_base": "nf4"}, "'fp8' in run.json and 'nf4' now"),
        (
            {"quantize_base": "fp8", "quantize_base_args": FORWARD},
            "{'fp8_backward': True} in run.json and {'fp8_backward': False} now",
        ),
        (
            {"quantize_base": "fp8", "keep_bf16": ("0.mlp.up_proj",)},
            r"keep_bf16 is \[\] in run.json and \['layers.0.mlp.up_proj'\] now",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            Trainer(config(output_dir=folder, **settings)).train(resume=True)


@pytest.mark.parametrize("start", [Trainer, plan_run])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_base": "fp8", "keep_bf16": ("gate",)}, "matches no linear"),
        ({"quantize_base_args": FORWARD}, "the base is not quantized"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    config, start, settings, message
):
    with pytest.raises(ConfigError, match=message):
        start(config(**settings))


@pytest.mark.usefixtures("compiled_when_called")
def test_settings_that_do_not_fit_a_given_model_are_refused(config):
    source = config().model
    model = load_model(source, dtype="float32", quantize="int8")
    for settings, message in (
        ({"quantize_base": "nf4"}, "quantize_base is nf4, and the base is in int8"),
        ({"quantize_base_args": TWO_COPIES}, "is no setting of int8"),
        ({"quantize_base": "int8", "keep_bf16": ("up_proj",)}, "keep_bf16 matches"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(config(**settings), model)
    # The format of the model needs no setting.
    assert Trainer(config(), model).plan.spec.options.base_format.name == "int8"


# ---- copies, the log and the plan ----------------------------------------------------


@pytest.mark.usefixtures("compiled_when_called")
def test_the_log_says_how_the_base_is_multiplied(config, caplog):
    caplog.set_level(logging.INFO)
    settings = {"quantize_base": "fp8", "keep_bf16": ("0.*down_proj",)}
    one = Trainer(config(**settings))
    assert (
        "base: fp8, fp8 products of xla forward and backward, with one copy of the "
        "weights; 1 linear kept in float32: 0.mlp.down_proj" in caplog.text
    )
    assert "auto: 1, as xla multiplies with the stored weights" in caplog.text
    two = Trainer(config(quantize_base_args=TWO_COPIES, **settings))
    assert "with a second, transposed copy of the weights" in caplog.text
    more = two.model.params.keys() - one.model.params.keys()
    assert len(more) == 6 and all(path.endswith(".kernel.transposed") for path in more)
    np.testing.assert_array_equal(
        two.model.params["layers.0.mlp.up_proj.kernel.transposed"],
        one.model.params["layers.0.mlp.up_proj.kernel.values"].T,
    )
    Trainer(config(quantize_base="fp8", quantize_base_args=FORWARD))
    assert "of xla forward, dequantized to float32 layer by layer backward" in (
        caplog.text
    )
    Trainer(config(quantize_base="nf4"))
    assert (
        "base: nf4, dequantized to float32 layer by layer for the products of xla"
        in (caplog.text)
    )


@pytest.mark.usefixtures("compiled_when_called")
@pytest.mark.needs_devices(2)
def test_the_second_copy_lies_where_the_mesh_divides_it(config):
    trainer = Trainer(
        config(quantize_base="fp8", quantize_base_args=TWO_COPIES, mesh="fsdp=2")
    )
    specs = weight_specs(trainer.layout.stages[0].spec)
    path = "layers.0.mlp.up_proj.kernel.transposed"
    assert trainer.model.params[path].sharding.spec == specs[path]
    assert specs[path] != specs["layers.0.mlp.up_proj.kernel.scale"]


@pytest.mark.usefixtures("memory_by_formula")
def test_the_plan_says_how_large_the_base_is(config):
    plain, nf4 = plan_run(config()), plan_run(config(quantize_base="nf4"))
    linears = 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert nf4.plan.model.base_format.name == "nf4"
    saved = 4 * linears - linears // 2 - linears // 64
    assert (
        0 < saved - (plain.memory.base_bytes - nf4.memory.base_bytes) < 2000
    )  # nested scales
