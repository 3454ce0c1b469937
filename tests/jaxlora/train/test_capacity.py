"""A capacity that fits the memory, and the refusal of a run that does not."""

import dataclasses
import itertools
import logging
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.plan import plan_run
from jaxlora.train import memory
from jaxlora.train.capacity import Bounds, Capacity, as_begun
from jaxlora.train.memory import DeviceMemory, Footprint
from jaxlora.train.run_folder import write_run_record
from jaxlora.train.run_identity import RunIdentity
from jaxlora.train.saved_run import RunRecord
from jaxlora.train.step import compiled_steps


@pytest.fixture
def have(monkeypatch):
    """Sets what the device's memory has for a run."""

    def set_to(num_bytes: int) -> None:
        found = DeviceMemory(num_bytes=num_bytes, of="a pretended device")
        monkeypatch.setattr(memory, "device_memory", lambda own_bytes: found)

    return set_to


@pytest.fixture
def config(model, jobs, tmp_path):
    numbers = itertools.count()

    def make(**settings) -> RunConfig:
        defaults = {
            "model": str(model.folder),
            "output_dir": str(tmp_path / f"run{next(numbers)}"),
            "jobs": [job.model_copy(update={"max_length": 64}) for job in jobs[:2]],
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


def needed(trainer: Trainer) -> int:
    """By the compiled step of a trainer as it is."""
    program = memory.compiled_step(
        trainer._spec,
        trainer._steps,
        trainer.model.params,
        trainer._table,
        trainer.config.limits,
    )
    found = memory.measured(trainer._spec, program, trainer.config.limits)
    assert found is not None
    return found.total(trainer.config.limits.capacity)


def test_auto_fills_what_can_be_filled(config, model, have):
    have(2**40)
    trainer = Trainer(config(), model)
    bounds = trainer._capacity._bounds
    assert trainer.config.microbatch_tokens == bounds.largest
    means = [
        run.job.batch_size * sum(lengths) / len(lengths)
        for run in trainer.runs
        if (lengths := [len(s.token_ids) for s in run.train_data.samples])
    ]
    assert sum(means) <= bounds.largest <= sum(means) + 2 * 16 + bounds.unit
    assert plan_run(config()).whole.schedule.limits.capacity == bounds.largest


def test_the_compiled_step_has_the_last_word(config, model, have):
    have(2**40)
    largest = Trainer(config(), model)
    most, bounds = needed(largest), largest._capacity._bounds
    smallest = Trainer(config(microbatch_tokens=bounds.smallest), model)
    limit = (most + needed(smallest)) // 2
    have(limit)
    trainer = Trainer(config(), model)
    trainer._settle_capacity()
    tokens = trainer.config.microbatch_tokens
    assert bounds.smallest <= tokens < bounds.largest and tokens % bounds.unit == 0
    assert needed(trainer) <= limit


@pytest.mark.parametrize("off_by", [0.3, 0.8, 1.0, 1.2, 5.0])
@pytest.mark.parametrize("kib", [1200, 2000, 3000, 10**6])
def test_auto_takes_the_most_that_fits(config, spec, have, monkeypatch, off_by, kib):
    """However wrong the estimate is, in a few compilations."""
    bounds = Bounds(smallest=64, largest=1024, unit=32)
    truth = Footprint(base=2**20, slots=2**10, fixed=0, per_token=2048.0)
    guess = dataclasses.replace(truth, per_token=2048.0 * off_by)
    monkeypatch.setattr(memory, "resident", lambda spec: truth)
    monkeypatch.setattr(memory, "estimated", lambda *_, **__: guess)
    monkeypatch.setattr(memory, "measured", lambda *_: truth)
    have(kib * 1024)
    chosen = Capacity(config(), spec, bounds)
    compilations = 1
    program = jax.jit(lambda: 0).lower().compile()
    while not chosen.settle(program):
        compilations += 1
    tokens = chosen.config.microbatch_tokens
    assert truth.total(tokens) <= kib * 1024
    best = bounds.choose(truth, kib * 1024)
    assert tokens == best or truth.total(tokens) >= 0.85 * kib * 1024
    assert compilations <= 2


@pytest.mark.parametrize("settings", [{}, {"microbatch_tokens": 256}])
def test_a_run_that_does_not_fit_says_what_would(config, model, have, settings):
    have(2**40)
    asked = config(**settings)
    trainer = Trainer(asked, model)
    base, slots = (
        getattr(memory.resident(trainer._spec), k) for k in ("base", "slots")
    )
    have(base + slots - 1)
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


def test_a_step_that_does_not_fit_says_what_would(config, model, have):
    have(2**40)
    whole = Trainer(config(microbatch_tokens=512), model)
    part = Trainer(config(microbatch_tokens=128), model)
    have((needed(whole) + needed(part)) // 2)
    trainer = Trainer(config(microbatch_tokens=512), model)
    with pytest.raises(ConfigError, match="a training step of 512 tokens") as error:
        trainer.train()
    assert not trainer.output_dir.exists()
    words = str(error.value).split("- microbatch_tokens: ")[1]
    cured = Trainer(config(microbatch_tokens=int(words.split()[0])), model)
    cured._settle_capacity()


def test_a_run_that_is_resumed_keeps_its_number(config, model, have):
    have(2**40)
    first = config(checkpoint_every=1, window_steps=1)
    trainer = Trainer(first, model)
    trainer.train(on_window=lambda t: t.stop_job("job0"))
    tokens = trainer.config.microbatch_tokens
    assert trainer._identity().settings["microbatch_tokens"] == tokens
    resident = memory.resident(trainer._spec).total(0)
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
    identity = RunIdentity(base="", settings={"microbatch_tokens": 176}, jobs={})
    record = RunRecord(started="2020-02-03T04:05:06", identity=identity)
    write_run_record(folder, record)
    assert as_begun(first, folder).microbatch_tokens == 176
    other = first.model_copy(update={"block_tokens": 64})
    message = r"176 for microbatch_tokens: auto, which is not .* block_tokens=64. Give"
    for resume in (lambda: as_begun(other, folder), lambda: plan_run(other)):
        with pytest.raises(CheckpointError, match=message):
            resume()


def test_what_is_measured_is_not_compiled_again(config, model, caplog):
    caplog.set_level(logging.DEBUG)
    compiled_steps.cache_clear()  # as if no other run of this process had come before
    with jax.log_compiles():
        Trainer(config(), model).train()
    compiled = [r for r in caplog.messages if "XLA compilation of jit(accumulate)" in r]
    assert len(compiled) == 1


def test_remat_needs_less(spec):
    def needed(remat):
        options = dataclasses.replace(spec.options, remat=remat)
        again = dataclasses.replace(spec, options=options)
        return memory.estimated(again, 16).per_token

    assert needed("layer") < needed("mlp") < needed("none")


def test_bounds_choose_whole_units():
    bounds = Bounds(smallest=256, largest=4096, unit=256)
    footprint = Footprint(base=1000, slots=400, fixed=600, per_token=10.0)
    for num_bytes, tokens in ((2000 + 9999, 768), (2000 + 2559, None), (10**9, 4096)):
        assert bounds.choose(footprint, num_bytes) == tokens
    assert bounds.choose(footprint, 10**9, below=1024) == 768


def test_a_compiler_that_does_not_say(config, spec, have, monkeypatch):
    """The estimate stands."""
    monkeypatch.setattr(memory, "measured", lambda *_: None)
    have(2**30)
    chosen = Capacity(config(), spec, Bounds(smallest=64, largest=1024, unit=32))
    assert chosen.settle(jax.jit(lambda: 0).lower().compile())
    assert chosen.config.microbatch_tokens == 1024


def test_sizes_in_words():
    said = [memory.in_words(n) for n in (2000, 2**20, 90 * 2**20, 2**29)]
    assert said == ["2.0 KiB", "1.00 MiB", "90.00 MiB", "0.50 GiB"]


def test_the_memory_of_this_device():
    found = memory.device_memory(0)
    assert found is not None
    assert 2**28 < found.num_bytes < 2**45
    assert "less 5% in reserve" in found.of


@pytest.fixture
def device(monkeypatch):
    """Pretends that there is another device, and what it says of its memory."""

    def set_to(platform: str, stats: dict | None) -> None:
        found = types.SimpleNamespace(
            platform=platform, device_kind="pretence", memory_stats=lambda: stats
        )
        monkeypatch.setattr(memory.jax, "local_devices", lambda: [found])

    return set_to


def test_the_memory_of_other_devices(device):
    machine = memory.device_memory(0)
    device("cpu", None)
    assert memory.device_memory(0) == machine
    device("gpu", {"bytes_limit": 1000, "bytes_in_use": 300})
    found = memory.device_memory(200)
    assert found is not None and found.num_bytes == 1000 - 50 - 100
    assert "what JAX may take of the pretence's memory" in found.of
    for stats in (None, {}, {"bytes_in_use": 300}):
        device("gpu", stats)
        assert memory.device_memory(0) is None


def test_a_device_that_does_not_say(config, spec, device, caplog):
    """It may be given a number, which is then not checked."""
    caplog.set_level(logging.INFO)
    bounds = Bounds(smallest=64, largest=1024, unit=32)
    device("gpu", None)
    with pytest.raises(ConfigError, match="Give a number for microbatch_tokens"):
        Capacity(config(), spec, bounds)
    given = Capacity(config(microbatch_tokens=2**30), spec, bounds)
    assert given.settle(jax.jit(lambda: 0).lower().compile())
    assert given.config.microbatch_tokens == 2**30
    assert len([m for m in caplog.messages if "is not checked" in m]) == 1
