"""The order of a run's work before its first step, and what runs side by side."""

import concurrent.futures
import sys
import zlib

import numpy as np
import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.errors import ConfigError
from jaxlora.plan.mesh.candidates import Search
from jaxlora.run.callback import Callback
from jaxlora.run.events import StepEvent
from jaxlora.train import open_run
from jaxlora.train.report.summary import JobResult
from tests.jaxlora.train.counted_run import interrupt
from tests.jaxlora.train.runs import AtWindow, run_of

_SECONDS = 60.0  # a wait that is longer has failed


@pytest.fixture(scope="module", autouse=True)
def memory_of_runs():
    """Memory is estimated from traces, as for users."""


@pytest.fixture
def config(model, jobs, tmp_path):
    def make(**settings) -> RunConfig:
        small = {"max_length": 64, "target_modules": ("down_proj",)}
        return run_of(
            model,
            tmp_path / "run",
            [job.replace(**small) for job in jobs[:2]],
            **{"block_tokens": 16, "dtype": "float32", "implementation": "xla"}
            | settings,
        )

    return make


def test_the_base_is_loaded_beside_the_estimates(config, monkeypatch, have):
    have(2**40)
    begun: concurrent.futures.Future[None] = concurrent.futures.Future()
    load, estimate = open_run.load_model, Search.best

    def loads(*args, **settings):
        begun.set_result(None)
        return load(*args, **settings)

    def estimates(*args):
        begun.result(timeout=_SECONDS)  # or the load would wait for the estimates
        return estimate(*args)

    monkeypatch.setattr(open_run, "load_model", loads)
    monkeypatch.setattr(Search, "best", estimates)
    trainer = Trainer(config(microbatch_tokens="auto"))
    assert begun.done() and trainer.model.params


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({}, "this run needs"), ({"microbatch_tokens": 16}, "sample of .* tokens")],
)
def test_a_run_that_is_refused_loads_nothing(
    config, monkeypatch, have, settings, refused
):
    have(2**10 if not settings else 2**40)
    loads = []
    monkeypatch.setattr(open_run, "load_model", lambda *_, **__: loads.append(1))
    with pytest.raises(ConfigError, match=refused):
        Trainer(config(**settings))
    assert not loads


def test_fresh_weights_are_drawn_when_a_job_starts(config, model, monkeypatch):
    """They are the bits of one stream for each module; resuming draws none."""
    drawn, draw = [], open_run.fresh_adapter

    def counted(job, *rest):
        drawn.append(job.name)
        return draw(job, *rest)

    monkeypatch.setattr(open_run, "fresh_adapter", counted)
    run = config(microbatch_tokens=128, checkpoint_every=1, window_steps=1)
    trainer = Trainer(run, model)
    assert not drawn
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.train(callbacks=[AtWindow(interrupt)])
    assert drawn == ["job0", "job1"]
    result = Trainer(run, model).train(resume=True)
    assert drawn == ["job0", "job1"]
    assert all(isinstance(job, JobResult) and job.num_modules for job in result.jobs)

    job = open_run.start_job(trainer.jobs[0].prepared, model)
    for name, weights in job.start.modules.items():
        key = [job.settings.seed, zlib.crc32(name.encode())]
        rng = np.random.Generator(np.random.Philox(key=key))
        in_features, bound = weights.a.shape[0], weights.a.shape[0] ** -0.5
        a = rng.uniform(-bound, bound, (in_features, weights.rank))
        np.testing.assert_array_equal(weights.a, a.astype(np.float32))
        assert not weights.b.any()
        assert {n: t.shape for n, t in weights.tensors.items()} == {
            n: t.shape for n, t in job.like.modules[name].tensors.items()
        }


def test_the_first_steps_do_not_wait_for_what_later_ones_need(config, monkeypatch):
    """TensorBoard is imported in a thread, and what writes checkpoints after a step."""
    tensorboard = "jaxlora.trackers.tensorboard"
    checkpoints = "jaxlora.train.saved.checkpoint"
    for name in (tensorboard, checkpoints):
        monkeypatch.delitem(sys.modules, name, raising=False)
    begun, imported = [], []
    start = open_run.in_background
    monkeypatch.setattr(
        open_run, "in_background", lambda run: begun.append(start(run)) or begun[-1]
    )

    class Watch(Callback):
        def on_event(self, event):
            imported.append((type(event), checkpoints in sys.modules))

    settings = {"microbatch_tokens": 128, "checkpoint_every": 100}
    trainer = Trainer(config(report_to="tensorboard", **settings))
    for one in begun:
        one.result(timeout=_SECONDS)
    assert tensorboard in sys.modules
    trainer.train(callbacks=[Watch()])
    first = next(i for i, (kind, _) in enumerate(imported) if kind is StepEvent)
    assert not any(is_there for _, is_there in imported[: first + 1])
    assert checkpoints in sys.modules
