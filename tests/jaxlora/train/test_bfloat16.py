"""Jobs alone against together, as a user of a bfloat16 base sees it."""

import contextlib
import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from jaxlora import LoraJob, load_model
from jaxlora.data import pack
from tests import tiny
from tests.jaxlora.train.runs import LINEARS, outcome, run_of
from tests.oracle import relative_error

STEPS = 4


@contextlib.contextmanager
def only(slot):
    """Leaves the rows of all other slots empty in every microbatch."""
    whole = pack.pack_microbatch

    def packed(microbatch, batches, limits, objectives):
        made = whole(microbatch, batches, limits, objectives)
        is_other = np.asarray(made.block_adapter) != slot
        rows = np.repeat(is_other, limits.block_tokens)
        return dataclasses.replace(
            made,
            token_ids=np.where(rows, 0, made.token_ids),
            segment_ids=np.where(rows, -1, made.segment_ids),
            loss_inputs=jax.tree.map(
                lambda values: np.where(rows, np.float32(0), values), made.loss_inputs
            ),
            block_adapter=np.where(is_other, -1, made.block_adapter),
        )

    with mock.patch.object(pack, "pack_microbatch", packed):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two jobs with dropout: together, alone in the same layout, alone in their own.

    All runs have slots for both jobs, and lengths of the same data, so that they share
    programs.
    """
    folder = tmp_path_factory.mktemp("bfloat16")
    config = {**tiny.CONFIG, "num_hidden_layers": 1}
    base = tiny.write_model(folder / "base", config=config)
    model = load_model(base, dtype="bfloat16")
    records = tiny.write_records(folder / "records.jsonl", 40, seed=0)
    jobs = tuple(
        LoraJob(
            name=f"job{i}",
            data={"path": records},
            eval_fraction=0.2,
            rank=(4, 8)[i],
            dropout=(0.1, 0.3)[i],
            target_modules=(LINEARS, ("q_proj",))[i],
            batch_size=(8, 6)[i],
            steps=STEPS,
            learning_rate=(1e-3, 3e-4)[i],
            lr_schedule="constant",
            max_length=128,
            seed=i,
            eval_every=2,
        )
        for i in range(2)
    )

    def train(name, some):
        config = run_of(
            model,
            folder / name,
            some,
            max_concurrent_jobs=2,
            slot_rank=8,
            slot_targets=LINEARS,
            slot_dropout=True,
            microbatch_tokens=512,
            checkpoint_every=None,
        )
        return outcome(config, model)

    together, same, other = train("together", jobs), {}, {}
    for slot, job in enumerate(jobs):
        with only(slot):
            same[job.name] = train(f"same-{slot}", jobs)
        other[job.name] = train(f"other-{slot}", (job,))
    return together, same, other


def test_in_the_same_layout_no_bit_differs(trained):
    together, same, _ = trained
    for name, alone in same.items():
        assert len(alone.losses[name]) == STEPS and len(alone.evals[name]) >= 2
        assert alone.losses[name] == together.losses[name]
        assert alone.evals[name] == together.evals[name]
        assert alone.bytes[name] == together.bytes[name]
        # The negative control: the other job's rows were empty.
        (neighbour,) = {*together.losses} - {name}
        assert alone.losses.get(neighbour) != together.losses[neighbour]


def test_in_another_layout_losses_differ_by_rounding(trained):
    """Weights differ more: Adam divides small gradients by their own size."""
    together, _, other = trained
    for name, alone in other.items():
        assert alone.losses[name] == pytest.approx(together.losses[name], rel=2e-3)
        assert alone.evals[name] == pytest.approx(together.evals[name], rel=2e-3)
        assert alone.bytes[name] != together.bytes[name]
        for module, weights in alone.adapters[name].items():
            theirs = together.adapters[name][module]
            assert relative_error(weights.a, theirs.a) < 2e-2
            assert relative_error(weights.b, theirs.b) < 2e-2
