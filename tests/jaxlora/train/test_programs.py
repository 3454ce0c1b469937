"""Resuming, and a second trainer, compile nothing that a fresh run did not."""

import collections
import contextlib
import logging

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxlora import RunConfig, Trainer
from jaxlora.train import step
from tests.jaxlora.train import fused

RUN = ("accumulate", "evaluate", "optimizer_step", "write_slot")


@contextlib.contextmanager
def counting():
    """Counts the programs compiled inside, by name, and those not found on the disk."""
    compiled, missed = collections.Counter(), collections.Counter()

    def on_duration(event, seconds, **names):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled[names.get("fun_name", "?").removeprefix("jit(").rstrip(")")] += 1

    class Misses(logging.Handler):
        def emit(self, record):
            if str(record.msg).startswith("PERSISTENT COMPILATION CACHE MISS"):
                missed[str(record.args[0])] += 1

    handler, log = Misses(), logging.getLogger("jax._src.compiler")
    level = log.level
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield compiled, missed
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
        log.removeHandler(handler)
        log.setLevel(level)


@pytest.fixture
def disk_cache(tmp_path):
    """A persistent cache of its own, which keeps every program."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path / "cache"))
    jax.config.update(names[1], 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def forget_programs():
    """As in a new process."""
    step.compiled_steps.cache_clear()
    jax.clear_caches()


@pytest.fixture(params=["xla", pytest.param("fused", marks=fused.only_where_it_runs)])
def make_trainer(request, model, jobs, tmp_path):
    """Trainers of runs of three jobs through two slots, with evaluations."""
    settings = {"microbatch_tokens": 256, "block_tokens": 16}
    if request.param == "fused":
        model = fused.wide_model(tmp_path / "wide")
        settings = fused.SETTINGS | {"microbatch_tokens": 512}

    def make(name: str, **more) -> Trainer:
        config = RunConfig(
            model=str(model.folder),
            output_dir=str(tmp_path / name),
            jobs=jobs[:3],
            max_concurrent_jobs=2,
            window_steps=1,
            checkpoint_every=1,
            **settings,
            **more,
        )
        return Trainer(config, model)

    return make


def interrupt(trainer):
    """Ends a run in its second window, as a crash would; its checkpoints stay."""
    if trainer._round == 2:
        raise RuntimeError("stop here")


def test_a_second_trainer_of_the_same_shapes_compiles_nothing(make_trainer):
    make_trainer("first").train()
    with counting() as (compiled, _):
        second = make_trainer("second").train()
    assert {name: compiled[name] for name in RUN} == dict.fromkeys(RUN, 0)
    assert second.num_compilations == 0


def test_a_resumed_run_compiles_what_a_fresh_one_does(make_trainer, disk_cache):
    forget_programs()
    with counting() as (fresh, new):
        make_trainer("whole").train()
    assert {name: fresh[name] for name in RUN} == dict.fromkeys(RUN, 1)
    assert {f"jit_{name}" for name in RUN} <= set(new)
    with pytest.raises(RuntimeError, match="stop here"):
        make_trainer("cut").train(on_window=interrupt)
    forget_programs()
    with counting() as (resumed, missed):
        result = make_trainer("cut").train(resume=True)
    assert all(job.progress.status == "finished" for job in result.jobs)
    assert {name: resumed[name] for name in RUN} == dict.fromkeys(RUN, 1)
    # A kernel is compiled beside its program, until that is found.
    assert not set(missed) - {"jit_mosaic_kernel"}, missed


def test_resuming_in_the_same_process_compiles_nothing(make_trainer):
    with pytest.raises(RuntimeError, match="stop here"):
        make_trainer("cut").train(on_window=interrupt)
    with counting() as (compiled, _):
        make_trainer("cut").train(resume=True)
    assert {name: compiled[name] for name in RUN} == dict.fromkeys(RUN, 0)
