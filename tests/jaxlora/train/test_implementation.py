"""Which LoRA kernels a run takes, and that it learns the same with either."""

import dataclasses
import logging
import re

import numpy as np
import pytest

from jaxlora import Trainer
from jaxlora.errors import ConfigError
from jaxlora.pallas_kernels import BACKENDS
from tests.jaxlora.train import fused
from tests.jaxlora.train.runs import events_of, run_of


def trainer(model, jobs, output_dir, **settings) -> Trainer:
    config = run_of(
        model,
        output_dir,
        jobs,
        checkpoint_every=None,
        microbatch_tokens=1024,
        **settings,
    )
    return Trainer(config, model)


def run(model, jobs, output_dir, **settings):
    trainer(model, jobs, output_dir, **settings).train()
    events = events_of(output_dir)
    return {
        job.name: [
            e["loss"] for e in events if e.get("job") == job.name and "loss" in e
        ]
        for job in jobs
    }


@pytest.mark.usefixtures("compiled_when_called")
def test_auto_says_why_it_takes_xla(model, jobs, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trainer(model, jobs[:1], tmp_path / "auto")
    assert re.search("LoRA kernels: xla; .*mosaic.* cannot run this", caplog.text)


def test_mosaic_where_it_cannot_run_is_refused(model, jobs, tmp_path):
    with pytest.raises(ConfigError, match="mosaic cannot run this"):
        trainer(model, jobs[:1], tmp_path / "asked", implementation="mosaic")


@pytest.fixture
def backends():
    """The table of back ends; its entries and their order are restored."""
    before = dict(BACKENDS)
    yield BACKENDS
    BACKENDS.clear()
    BACKENDS.update(before)


def test_auto_takes_the_first_that_can(model, jobs, tmp_path, caplog, backends):
    """Also one that no other file knows, which then trains the adapters."""
    calls, xla = [], BACKENDS["xla"]

    def forward(*args, **options):
        calls.append(options)
        return xla.forward(*args, **options)

    first = dataclasses.replace(BACKENDS["mosaic"], unsupported=lambda _: "it is small")
    toy = dataclasses.replace(xla, name="toy", forward=forward)
    backends.clear()
    backends.update({"mosaic": first, "toy": toy, "xla": xla})
    with caplog.at_level(logging.INFO):
        got = run(model, jobs[:1], tmp_path / "auto")
    message = r"LoRA kernels: toy; .*mosaic cannot run this: it is small"
    assert re.search(message, caplog.text)
    assert calls
    plain = run(model, jobs[:1], tmp_path / "asked", implementation="xla")
    assert got == plain and all(plain.values())


@fused.only_where_it_runs
def test_a_run_learns_the_same_with_either(jobs, tmp_path, caplog):
    model = fused.wide_model(tmp_path / "wide")
    with caplog.at_level(logging.INFO):
        fast = run(model, jobs[:4], tmp_path / "fast")
    assert "LoRA kernels: mosaic" in caplog.text
    plain = run(model, jobs[:4], tmp_path / "plain", implementation="xla")
    for name, losses in plain.items():
        assert len(losses) == len(fast[name]) > 2
        np.testing.assert_allclose(fast[name], losses, rtol=2e-2)
