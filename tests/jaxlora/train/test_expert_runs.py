"""Runs on experts: a quantized base, and how many adapters share a microbatch."""

from unittest import mock

import numpy as np
import pytest

import jaxlora
from jaxlora import LoraJob, Trainer, merge_adapter
from jaxlora.data import pack
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import prepare_jobs
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.resolve import resolve
from jaxlora.train.execute.texts import _plain
from tests import tiny
from tests.jaxlora.models.test_quantized_experts import (
    config_of,
    weights_of,
    write,
    write_quantized,
)
from tests.jaxlora.train.runs import (
    InterruptAt,
    assert_same_bits,
    outcome,
    two_slots,
)
from tests.jaxlora.train.test_bfloat16 import only

EXPERTS = ("down_proj", "up_proj")
RUN = {
    "max_concurrent_jobs": 4,
    "microbatch_tokens": 256,
    "slot_targets": EXPERTS,
    "window_steps": 1,
    "checkpoint_every": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> FrozenModel:
    config = config_of("olmoe") | {"num_hidden_layers": 1}
    folder = write(tmp_path_factory.mktemp("base") / "m", config, weights_of(config))
    return load_model(folder, dtype="float32", quantize="nf4")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> list[LoraJob]:
    folder = tmp_path_factory.mktemp("data")
    return [
        LoraJob(
            name=f"job{i}",
            data={"path": tiny.write_records(folder / f"{i}.jsonl", 12, seed=i)},
            eval_fraction=0.3,
            eval_every=2,
            rank=4,
            dropout=0.1,
            target_modules=EXPERTS[: 1 + i % 2],
            batch_size=3,
            steps=3,
            learning_rate=1e-2,
            max_length=64,
            seed=i,
        )
        for i in range(4)
    ]


class Sharing:
    """Notes the adapters of each microbatch that is packed."""

    def __init__(self):
        self.numbers = []
        self._whole = pack.pack_microbatch

    def __call__(self, *args):
        made = self._whole(*args)
        self.numbers.append(len(set(np.asarray(made.block_adapter)) - {-1}))
        return made


@pytest.fixture(scope="module")
def whole(model, jobs, tmp_path_factory):
    """The run that tests compare with, and its microbatches."""
    config = two_slots(
        model,
        tmp_path_factory.mktemp("runs") / "whole",
        jobs,
        **RUN,
        adapters_per_microbatch=2,
    )
    with mock.patch.object(pack, "pack_microbatch", Sharing()) as sharing:
        return config, outcome(config, model), sharing.numbers


def test_a_microbatch_has_at_most_so_many_adapters(model, jobs, whole):
    """In training and evaluations; and whatever the packer, the results are alike."""
    config, run, numbers = whole
    assert max(numbers) == 2
    spec = run.trainer.plan.spec
    assert spec.options.most_adapters == spec.num_expert_slots == 2
    assert _plain(spec).options.most_adapters is None  # texts are of any number
    for settings in ({"packer": "greedy"}, {"adapters_per_microbatch": 4}):
        name = f"{config.output_dir}_{next(iter(settings))}"
        own = config.replace(output_dir=name, **settings)
        with mock.patch.object(pack, "pack_microbatch", Sharing()) as sharing:
            other = outcome(own, model)
        assert (max(sharing.numbers) <= 2) == ("packer" in settings)
        for job in jobs:
            for found in ("losses", "evals"):
                values = getattr(other, found)[job.name]
                assert values == pytest.approx(getattr(run, found)[job.name], rel=1e-4)
                assert np.isfinite(values).all()


def test_no_bit_depends_on_the_rows_of_others(model, jobs, whole, tmp_path):
    config, run, _ = whole
    with only(1):
        same = outcome(config.replace(output_dir=str(tmp_path / "one")), model)
    assert same.losses["job1"] == run.losses["job1"]
    assert same.bytes["job1"] == run.bytes["job1"]


def test_an_interrupted_run_has_the_same_bits(model, whole, tmp_path):
    config, run, _ = whole
    config = config.replace(output_dir=str(tmp_path / "stopped"))
    assert Trainer(config, model).train(callbacks=[InterruptAt(1)]).interrupted
    assert_same_bits(outcome(config, model, resume=True), run)
    dense = load_model(model.folder, dtype="float32")
    with pytest.raises(CheckpointError, match="quantize_base is 'nf4' in run"):
        Trainer(config, dense).train(resume=True)


def test_texts_are_those_of_the_merged_model(whole, model, tmp_path):
    """The base is merged as its experts are stored, so it is no other one."""
    _, run, _ = whole
    write_quantized(tmp_path / "stored", "int8-channel", family="olmoe", num_layers=1)
    base = load_model(tmp_path / "stored", dtype="float32")
    adapter = run.folder / "adapters" / "job1"
    out = merge_adapter(base.folder, adapter, tmp_path / "merged", dtype="float32")
    given = {"max_new_tokens": 6}
    (one,) = jaxlora.generate(base, ["Abc"], adapters=[adapter], **given)
    (other,) = jaxlora.generate(load_model(out, dtype="float32"), ["Abc"], **given)
    assert one.token_ids == other.token_ids
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_a_number_of_adapters_without_experts_is_refused(model, jobs, tmp_path):
    few = [job.replace(target_modules=["q_proj"]) for job in jobs]
    given = RUN | {"slot_targets": ("q_proj",), "adapters_per_microbatch": 2}
    with pytest.raises(ConfigError, match=r"adapters_per_microbatch is 2, and no job"):
        Trainer(two_slots(model, tmp_path, few, **given), model)


def test_a_run_goes_on_when_its_jobs_on_experts_have_ended(model, jobs, tmp_path):
    """Its number of adapters in a microbatch is not refused then."""
    few = [jobs[0], jobs[1].replace(target_modules=["q_proj"])]
    given = RUN | {"slot_targets": None, "adapters_per_microbatch": 1}
    config = two_slots(model, tmp_path, few, **given)
    chosen = [choose_modules(job, model.config) for job in few]
    reader = DataReader(load_tokenizer(model.folder))
    prepared = prepare_jobs(few, chosen, model.config, reader)
    given = config, PlannedModel.of(config, model), prepared, this_machine()
    plan = resolve(*given, ended=["job0"])
    assert plan.spec.options.most_adapters is None
