"""The capacity is chosen by the device's memory; runs that do not fit are refused."""

import dataclasses
import itertools
import logging
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.common.note import log_notes
from jaxlora.costs.gpus import UNKNOWN_DEVICE
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.forecast import plan_run
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.memory import device_memory as device_module
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.capacity import fit
from jaxlora.plan.memory.footprint import Footprint, StagePrograms
from jaxlora.plan.mesh.choose import choose
from jaxlora.plan.mesh.machine import Machine
from jaxlora.run.folder import write_run_record
from jaxlora.train.saved.resume import as_begun, resolved_config
from tests.jaxlora.plan.made_up import search_of
from tests.jaxlora.train import made_run
from tests.jaxlora.train.runs import AtWindow


@pytest.fixture(scope="module", autouse=True)
def memory_of_runs():
    """Memory is estimated from traces, as for users."""


@pytest.fixture
def config(model, jobs, tmp_path):
    numbers = itertools.count()
    # With few adapted linears, a step is compiled in half the time.
    small = {"max_length": 64, "target_modules": ("down_proj",)}

    def make(**settings) -> RunConfig:
        defaults = {
            "model": str(model.folder),
            "output_dir": str(tmp_path / f"run{next(numbers)}"),
            "jobs": [job.replace(**small) for job in jobs[:2]],
            "microbatch_tokens": "auto",
            "block_tokens": 16,
            "dtype": "float32",
            "implementation": "xla",
            "attention": "xla",
        }
        return RunConfig(**defaults | settings)

    return make


@pytest.fixture(scope="module")
def spec(model) -> DecoderSpec:
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=64)
    return DecoderSpec(
        config=model.config,
        options=options,
        slots=SlotShape(num_slots=2, rank=4),
        adapted=("layers.0.mlp.up_proj",),
    )


PROGRAMS = (StagePrograms(last=jax.jit(lambda: 0).lower().compile()),)


def footprint_of(**values) -> Footprint:
    return Footprint(**{"fixed_bytes": 0} | values)


def needed(trainer: Trainer) -> int:
    """Bytes of the run, as reported for the compiled step at the trainer's capacity."""
    limits = trainer.config.limits
    programs = trainer._run.compile(trainer.plan)
    found = mesh_stages.measured_footprint(trainer.plan.stages, programs, limits)
    assert found is not None
    return found.total_bytes(limits.capacity)


def settle(config: RunConfig, spec: DecoderSpec, bounds: Bounds, compile_stages=None):
    """Chooses by an estimate, and corrects it by what is compiled, if anything."""
    available = device_module.device_memory(0)
    here = Machine(num_devices=1, speed=UNKNOWN_DEVICE, memory=available)
    plan = choose(search_of(config, spec, bounds, here, num_jobs=2))
    log_notes(plan.notes)
    if compile_stages is None:
        return plan.config
    plan = dataclasses.replace(plan, bounds=bounds)
    fitted = fit(plan, lambda plan: compile_stages(plan.config))
    log_notes(fitted.notes)
    return fitted.config


@pytest.mark.usefixtures("compiled_when_called")
def test_auto_fills_what_can_be_filled(config, model, have):
    have(2**40)
    trainer = Trainer(config(), model)
    bounds = trainer.plan.bounds
    assert trainer.config.microbatch_tokens == bounds.largest
    means = [
        run.settings.batch_size * sum(lengths) / len(lengths)
        for run in trainer.jobs
        if (lengths := [len(s.token_ids) for s in run.prepared.train_data.samples])
    ]
    assert sum(means) <= bounds.largest <= sum(means) + 2 * 16 + bounds.unit
    assert plan_run(config()).whole.schedule.limits.capacity == bounds.largest


def test_the_compiled_step_has_the_last_word(config, model, have):
    have(2**40)
    largest = Trainer(config(), model)
    most, bounds = needed(largest), largest.plan.bounds
    smallest = Trainer(config(microbatch_tokens=bounds.smallest), model)
    limit = (most + needed(smallest)) // 2
    have(limit)
    trainer = Trainer(config(), model)
    # As if it had been estimated to fit.
    config = trainer.config.replace(microbatch_tokens=bounds.largest)
    run = trainer._run
    run.plan = fit(run.plan.with_config(config), run.compile)
    tokens = trainer.config.microbatch_tokens
    assert bounds.smallest <= tokens < bounds.largest and tokens % bounds.unit == 0
    assert needed(trainer) <= limit


@pytest.mark.parametrize("off_by", [0.3, 0.8, 1.0, 1.2, 5.0])
@pytest.mark.parametrize("kib", [1200, 2000, 3000, 10**6])
def test_auto_takes_the_most_that_fits(config, spec, have, monkeypatch, off_by, kib):
    """Finds it in at most two compilations, however wrong the estimate is."""
    bounds = Bounds(smallest=64, largest=1024, unit=32)
    truth = footprint_of(base_bytes=2**20, adapter_bytes=2**10, bytes_per_token=2048.0)
    guess = dataclasses.replace(truth, bytes_per_token=2048.0 * off_by)
    for name, found in (("resident", truth), ("estimated", guess), ("measured", truth)):
        one = mesh_stages.MeshFootprint(stages=(found,))
        monkeypatch.setattr(mesh_stages, f"{name}_footprint", lambda *_, one=one: one)
    have(kib * 1024)
    compiled = []

    def compile_stages(config):
        compiled.append(config)
        return PROGRAMS

    chosen = settle(config(), spec, bounds, compile_stages)
    tokens = chosen.microbatch_tokens
    assert truth.total_bytes(tokens) <= kib * 1024
    best = bounds.choose(truth.fitting_tokens(kib * 1024))
    assert tokens == best or truth.total_bytes(tokens) >= 0.85 * kib * 1024
    assert len(compiled) <= 2
    assert settle(chosen, spec, bounds) == chosen


@pytest.mark.usefixtures("compiled_when_called")
@pytest.mark.parametrize("settings", [{}, {"microbatch_tokens": 256}])
def test_a_run_that_does_not_fit_says_what_would(config, model, have, settings):
    have(2**40)
    asked = config(**settings)
    trainer = Trainer(asked, model)
    [resident] = mesh_stages.resident_footprint(trainer.plan.stages).stages
    base, adapters = resident.base_bytes, resident.adapter_bytes
    have(base + adapters - 1)
    with pytest.raises(
        ConfigError, match=r"this run needs .* \(base .*, adapters "
    ) as e:
        Trainer(asked, model)
    assert "a pretended device" in str(e.value) and "max_concurrent_jobs: 1" in str(
        e.value
    )
    have(base // 2)
    with pytest.raises(ConfigError, match="No single setting of remat"):
        Trainer(asked, model)


@pytest.mark.parametrize("pattern", [{}, {"up_proj": 10**9}])
def test_a_rank_that_no_weight_has_is_refused(config, model, jobs, pattern):
    """Before any memory is taken for it; the widest weights have 32 features."""
    shape = {"rank": 4, "rank_pattern": pattern} if pattern else {"rank": 10**9}
    job = jobs[0].replace(target_modules="all-linear", **shape)
    message = "'job0' has rank 1000000000 on .*at most rank 32. Lower rank .* to 32"
    for refuse in (lambda c: Trainer(c, model), plan_run):
        with pytest.raises(ConfigError, match=message):
            refuse(config(jobs=[job]))


def test_a_step_that_does_not_fit_says_what_would(config, model, have):
    have(2**40)
    whole = Trainer(config(microbatch_tokens=512), model)
    part = Trainer(config(microbatch_tokens=128), model)
    have((needed(whole) + needed(part)) // 2)
    trainer = Trainer(config(microbatch_tokens=512), model)
    with pytest.raises(ConfigError, match="a training step of 512 tokens") as error:
        trainer.train()
    assert not trainer.output_dir.exists()
    advice = str(error.value).split("- microbatch_tokens: ")[1]
    advised = Trainer(config(microbatch_tokens=int(advice.split()[0])), model)
    fit(advised.plan, advised._run.compile)


def test_the_largest_slots_that_fit_are_found_at_once(config, spec, have):
    """The numbers are so large that they cannot be tried one after the other."""
    bounds = Bounds(smallest=64, largest=1024, unit=32)
    have(2**30)
    for num_slots, message in (
        (10**12, "No single setting of remat"),
        (2, r"slot_rank: \d{4,6}, and no job"),
    ):
        slots = SlotShape(num_slots=num_slots, rank=10**12)
        with pytest.raises(ConfigError, match=message):
            settle(config(), dataclasses.replace(spec, slots=slots), bounds)


def test_a_run_that_is_resumed_keeps_its_number(config, model, have):
    have(2**40)
    first = config(checkpoint_every=1, window_steps=1)
    trainer = Trainer(first, model)
    trainer.train(callbacks=[AtWindow(lambda t: t.stop_job("job0"))])
    tokens = trainer.config.microbatch_tokens
    assert resolved_config(trainer.plan)["microbatch_tokens"] == tokens
    resident = mesh_stages.resident_footprint(trainer.plan.stages).total_bytes(0)
    have(needed(trainer))  # a smaller device, which an estimate would not trust
    again = Trainer(first, model)
    assert again.config.microbatch_tokens == tokens
    again.train(resume=True)
    assert plan_run(first).whole.schedule.limits.capacity == tokens
    have(resident + 1)
    with pytest.raises(ConfigError, match=f"a training step of {tokens} tokens"):
        Trainer(first, model).train(resume=True)


def test_a_run_that_is_resumed_keeps_its_blocks(config):
    first = config()
    folder = pathlib.Path(first.output_dir)
    write_run_record(folder, made_run.record({}, microbatch_tokens=176))
    assert as_begun(first).config == first.replace(microbatch_tokens=176)
    given = first.replace(microbatch_tokens=64)
    assert as_begun(given).config == given
    other = first.replace(block_tokens=64)
    message = r"(?s)began with microbatch_tokens: 176, .* block_tokens.*Give"
    for resume in (as_begun, plan_run):
        with pytest.raises(CheckpointError, match=message):
            resume(other)


def test_a_run_that_is_resumed_keeps_its_remat(config):
    first = config(remat="auto", microbatch_tokens=64)
    folder = pathlib.Path(first.output_dir)
    write_run_record(folder, made_run.record({}, remat="mlp"))
    assert as_begun(first).config == first.replace(remat="mlp")
    given = first.replace(remat="layer")
    assert as_begun(given).config == given
    write_run_record(folder, made_run.record({}, remat="some"))
    with pytest.raises(CheckpointError, match=r"(?s)began with remat: some, .* remat"):
        as_begun(first)


def test_a_run_that_is_resumed_keeps_its_share_of_padding(config):
    first = config(microbatch_tokens=64, mesh="stage=2")
    folder = pathlib.Path(first.output_dir)
    for recorded, share in (({"padding_share": 0.24}, 0.24), ({}, 1.0)):
        record = made_run.record({}, mesh="stage=2", **recorded)
        write_run_record(folder, record)
        assert as_begun(first).config == first.replace(padding_share=share)
    given = first.replace(padding_share=0.5)
    assert as_begun(given).config == given
    # With one stage, there was nothing to choose.
    write_run_record(folder, made_run.record({}, mesh="fsdp=2", padding_share=1.0))
    assert as_begun(first).config == first


def test_an_automatic_remat_becomes_stronger_if_the_step_needs_more(
    config, model, have, monkeypatch
):
    """The estimate takes none; the compiler says that only `layer` fits."""
    have(2**40)
    measure = mesh_stages.measured_footprint

    def too_large(stages, programs, limits):
        found = measure(stages, programs, limits)
        remats.append(stages.spec.options.remat)
        if remats[-1] == "layer":
            return found
        [stage] = found.stages
        stage = dataclasses.replace(stage, fixed_bytes=2**41)
        return dataclasses.replace(found, stages=(stage,))

    remats: list[str] = []
    monkeypatch.setattr(mesh_stages, "measured_footprint", too_large)
    trainer = Trainer(config(remat="auto"), model)
    assert trainer.config.remat == "none"
    bounds = dataclasses.replace(trainer.plan.bounds, remats=("none", "layer"))
    trainer._run.plan = dataclasses.replace(trainer.plan, bounds=bounds)
    result = trainer.train()
    assert [job.progress.status for job in result.jobs] == ["finished"] * 2
    assert remats[0] == "none" and remats[-1] == "layer"
    assert trainer.config.remat == trainer.plan.spec.options.remat == "layer"
    assert resolved_config(trainer.plan)["remat"] == "layer"


@pytest.mark.usefixtures("compiled_when_called")
def test_a_plan_takes_the_remat_of_the_trainer(config, model, have):
    have(2**40)
    trainer = Trainer(config(remat="auto"), model)
    planned = plan_run(config(remat="auto"))
    assert planned.whole.schedule.limits == trainer.config.limits


def test_what_is_measured_is_not_compiled_again(config, model, caplog):
    caplog.set_level(logging.DEBUG)
    with jax.log_compiles():
        Trainer(config(slot_rank=9), model).train()  # no other run has this shape
    compiled = [r for r in caplog.messages if "XLA compilation of jit(accumulate)" in r]
    assert len(compiled) == 1


def test_bounds_choose_whole_units():
    bounds = Bounds(smallest=256, largest=4096, unit=256)
    found = footprint_of(
        base_bytes=1000, adapter_bytes=400, fixed_bytes=600, bytes_per_token=10.0
    )
    for num_bytes, tokens in ((2000 + 9999, 768), (2000 + 2559, None), (10**9, 4096)):
        assert bounds.choose(found.fitting_tokens(num_bytes)) == tokens
    assert bounds.choose(10**9, below=1024) == 768


def test_the_estimate_stands_if_the_compiler_does_not_report(
    config, spec, have, monkeypatch
):
    monkeypatch.setattr(mesh_stages, "measured_footprint", lambda *_: None)
    have(2**30)
    bounds = Bounds(smallest=64, largest=1024, unit=32)
    chosen = settle(config(), spec, bounds, lambda config: PROGRAMS)
    assert chosen.microbatch_tokens == 1024


def test_a_device_that_does_not_report_its_memory(config, spec, monkeypatch, caplog):
    """It takes a number, or at most 4,096, which are then not checked."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(device_module, "device_memory", lambda *_: None)
    bounds = Bounds(smallest=64, largest=1024, unit=32)
    for largest, tokens in ((1024, 1024), (8192, 4096)):
        more = dataclasses.replace(bounds, largest=largest)
        assert settle(config(), spec, more).microbatch_tokens == tokens
    assert f"microbatch_tokens: auto: {tokens}, at most 4096" in caplog.text
    fixed = dataclasses.replace(bounds, fixed=2**20)
    needs = r"remat: auto needs .* none, elementwise, mlp or layer"
    with pytest.raises(ConfigError, match=needs):
        settle(config(remat="auto"), spec, fixed)
    given = config(microbatch_tokens=2**20)
    assert settle(given, spec, fixed) == given
    assert settle(given, spec, fixed, lambda config: PROGRAMS) == given
    assert len([m for m in caplog.messages if "memory: not checked" in m]) == 1
