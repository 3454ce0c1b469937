"""Rows of the step benchmark, measured in this process."""

import dataclasses
import fcntl
import importlib.util
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.registry import model_config
from jaxlora.plan.job import kernel_choice
from jaxlora.profile import training
from jaxlora.programs import program
from scripts.bench.kernel_times import Kernel
from scripts.bench.shapes import config_json
from scripts.bench.step import measure
from scripts.bench.step.cases import FROZEN, PEER, ROWS, Case, microbatches
from tests.scripts.bench.tables import broken_base

TINY = Case(
    model="tiny",
    row=FROZEN,
    layers=1,
    adapters=2,
    microbatch_tokens=128,
    block_tokens=32,
    median_tokens=20,
    longest_tokens=40,
    dtype="float32",
    repeats=2,
)


def test_kernels_that_cannot_run_here_say_why(monkeypatch):
    monkeypatch.setattr(
        kernel_choice, "kernels_unsupported", lambda *_: "no Hopper GPU"
    )
    found = measure.measure(dataclasses.replace(TINY, row="jaxlora mosaic"))
    assert found.keys() == {"skipped"}
    assert "mosaic cannot run this: no Hopper GPU" in found["skipped"]


def test_the_base_alone():
    found = measure.measure(TINY)
    assert found["tokens"] == 128
    assert found["p10_ms"] <= found["step_ms"] <= found["p90_ms"]


class Traced(Exception):
    """A program was traced and lowered."""


def test_a_quantized_base_may_keep_linears(monkeypatch):
    name, made = "jaxlora mosaic, fp8, down_proj kept", {}
    settings = {**ROWS[name].settings, "implementation": "xla"}
    row = dataclasses.replace(ROWS[name], settings=settings)
    monkeypatch.setitem(measure.ROWS, name, row)

    def compile_program(lowered):
        if "f8E4M3FN" in lowered.as_text():
            raise Traced
        return compiled(lowered)

    def random_base(*args, **kwargs):
        made.update(make(*args, **kwargs))
        return made

    make, compiled = training.random_base, program.compile_program
    monkeypatch.setattr(training, "random_base", random_base)
    monkeypatch.setattr(program, "compile_program", compile_program)
    with pytest.raises(Traced):  # compiling it would take longest
        measure.measure(dataclasses.replace(TINY, row=name))
    assert {k.split(".")[-1] for k in made if "up_proj" in k} > {"values", "scale"}
    assert {k.split(".")[-1] for k in made if "down_proj" in k} == {"kernel"}


@pytest.mark.parametrize("row", [FROZEN, "jaxlora xla"])
def test_gradients_that_are_not_finite_are_not_timed(row, monkeypatch):
    monkeypatch.setattr(training, "random_base", broken_base)
    found = measure.measure(dataclasses.replace(TINY, row=row))
    assert found == {"skipped": "the gradients are not finite"}


@pytest.mark.parametrize("optimizer", ["jit_step", None])
def test_kernels_of_the_optimizer_are_a_part(optimizer, monkeypatch, capsys):
    """Some kernels, such as products in a CUDA graph, belong to no known program."""
    runs = [("lora_expand", "jit_pass"), ("nvjet_a", ""), ("fusion", "jit_step(7)")]
    kernels = [
        Kernel(name=name, instruction="", module=module, start_ms=2.0 * i, ms=1.0)
        for i, (name, module) in enumerate(runs * measure._PROFILED)
    ]
    monkeypatch.setattr(measure, "trace", lambda run, repeats: kernels)
    found = measure.parts(lambda: None, optimizer, 4.0)
    assert found["optimizer"] == (1.0 if optimizer else 0)
    assert found["frozen products with s B"] == found["XLA's products"] == 1.0
    assert found["gaps"] == 1.0 and sum(found.values()) == 4.0
    assert "1 x lora_expand" in capsys.readouterr().err


def test_the_time_limit_does_not_count_waiting_for_the_device(tmp_path, monkeypatch):
    waits = []

    def flock(file, how):
        assert how == fcntl.LOCK_EX
        waits.append(signal.getitimer(signal.ITIMER_REAL)[0])

    monkeypatch.setattr(measure.fcntl, "flock", flock)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with (tmp_path / "turn").open("w") as file:
            measure.take_turn(file)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert waits == [0]  # the timer is stopped
    assert 900 < left <= 1000


@pytest.mark.live
@pytest.mark.filterwarnings("default")  # torch and its libraries emit many warnings
@pytest.mark.parametrize("row", [PEER, "peft, padded"])
def test_peers(row):
    found = measure.measure(dataclasses.replace(TINY, row=row))
    if importlib.util.find_spec("peft") is None:
        assert "not installed" in found["skipped"]
    else:
        assert found["tokens"] == 128 and found["step_ms"] > 0


def test_the_base_alone_has_gradients_from_every_job():
    """Products of zeros draw less power, so a base that had them would look fast."""
    model = model_config(config_json("tiny", 1))
    drawn = microbatches(TINY, model.vocab_size)
    plan, _ = measure.plan_row(TINY, ROWS[FROZEN], model, drawn)
    training, batch = measure.BaseAlone(plan), drawn[0].packed

    weights = batch.loss_inputs["next_token"]["weight"]

    def gradient(weights):
        inputs = {"next_token": {"weight": weights}}
        weighted = dataclasses.replace(batch, loss_inputs=inputs)
        (made,) = training.start([weighted])()
        return made

    is_first = np.repeat(batch.block_adapter == 0, TINY.block_tokens)
    first = gradient(np.where(is_first, weights, 0))
    second = gradient(np.where(is_first, 0, weights))
    assert jnp.abs(first).max() > 0 and jnp.abs(second).max() > 0
    np.testing.assert_allclose(gradient(weights), first + second, rtol=1e-4, atol=1e-6)
