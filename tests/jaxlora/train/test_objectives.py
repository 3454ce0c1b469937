"""A user's objective over pairs is registered, and trains beside next-token jobs.

The objective here prefers the first of two samples to the second, by a margin of their
mean log likelihoods; SimPO (arXiv 2405.14734) has such a loss.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import LoraJob, RunConfig, Trainer, register_objective
from jaxlora.data.pack import JobBatch, pack_microbatch
from jaxlora.errors import ConfigError
from jaxlora.objectives.base import Objective, Terms, next_token_targets
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.objectives.table import NEXT_TOKEN, OBJECTIVES
from jaxlora.scheduler import Limits
from tests.jaxlora.train.runs import LINEARS
from tests.jaxlora.train.test_contracts import assert_same_training
from tests.jaxlora.train.test_preferences import write_pairs

SCALE, MARGIN = 2.0, 0.5
ADAPTED = ("down_proj",)


def row_inputs(group, terms: Terms) -> dict[str, np.ndarray]:
    targets = [next_token_targets(sample).astype(np.float32) for sample in group]
    first = np.zeros(sum(map(len, targets)), np.float32)
    first[0] = terms.weight
    # The sign tells the samples apart, and the size makes a mean.
    signs = [one / one.sum() * sign for one, sign in zip(targets, (1, -1), strict=True)]
    return {"term": first, "share": np.concatenate(signs)}


def losses(nll, inputs, groups):
    difference = jax.ops.segment_sum(-nll * inputs["share"], groups, len(nll))[groups]
    loss = jax.nn.softplus(MARGIN - SCALE * difference)
    return jnp.where(inputs["term"] > 0, loss * inputs["term"], 0.0)


PAIRS = Objective(
    name="pairs",
    kinds=("preference",),
    group_size=2,
    input_names=("term", "share"),
    num_terms=lambda samples: len(samples) // 2,
    row_inputs=row_inputs,
    is_target=lambda inputs: inputs["share"] != 0,
    losses=losses,
)


@pytest.fixture
def train(train):
    """Trains in slots of one linear, as an objective is above all of them."""
    return functools.partial(train, slot_targets=ADAPTED)


@pytest.fixture(autouse=True)
def _registered():
    """A user's objective, as long as a test runs."""
    register_objective(PAIRS)
    yield
    del OBJECTIVES[PAIRS.name]


@pytest.fixture
def jobs(jobs) -> list[LoraJob]:
    return [job.replace(target_modules=ADAPTED) for job in jobs]


@pytest.fixture
def of_pairs(tmp_path):
    """Gives a job the objective and pairs."""
    path = write_pairs(tmp_path / "pairs.jsonl", 24, seed=1)

    def change(job: LoraJob, **changes) -> LoraJob:
        own = {"objective": "pairs", "name": f"{job.name}-pairs"}
        return job.replace(data={"path": path}, **own, **changes)

    return change


def test_each_job_trains_as_if_it_were_alone(train, jobs, of_pairs):
    """Beside others, and beside one that ends after its first step.

    Their objective takes no part in a next-token job.
    """
    pairs, single = of_pairs(jobs[1]), jobs[0]
    together = train([single, pairs, of_pairs(jobs[2])])
    for job, other in ((pairs, single), (single, pairs)):
        alone = train([other.replace(steps=1), job], max_concurrent_jobs=3)
        assert_same_training(together, alone, [job.name])


def test_groups_lie_in_one_microbatch_as_samples_of_their_own():
    rng = np.random.default_rng(3)

    def sample(length: int) -> TokenizedSample:
        is_target = np.arange(length) > 1
        return TokenizedSample(rng.integers(1, 99, length, np.int32), is_target)

    lengths = (5, 3, 9, 4)
    samples = [sample(length) for length in lengths]
    both = {
        0: JobBatch(slot=0, step=0, samples=samples, weight=0.5, objective=PAIRS),
        1: JobBatch(slot=1, step=0, samples=samples[:1], weight=1.0),
    }
    groups = both[0].to_schedule()
    assert [group.num_tokens for group in groups] == [8, 13]
    packed = pack_microbatch(
        (groups[1], groups[0], *both[1].to_schedule()),
        both,
        Limits(capacity=48, block_tokens=8),
        (NEXT_TOKEN.name, PAIRS.name),
    )
    # 21 rows of the pairs, padding to a block, and the next-token job's 5 rows.
    numbers = [0] * 9 + [1] * 4 + [2] * 5 + [3] * 3 + [-1] * 3 + [4] * 5 + [-1] * 19
    assert packed.segment_ids.tolist() == numbers
    of_group = [0] * 13 + [1] * 8 + [-1] * 3 + [2] * 5 + [-1] * 19
    assert packed.group_ids.tolist() == of_group
    starts = [*range(8, 21), *range(8)]
    assert packed.token_index[:21].tolist() == starts
    shares = packed.loss_inputs["pairs"]["share"]
    assert shares[1:8].tolist() == pytest.approx([1 / 7] * 7)
    assert shares[9:13].tolist() == pytest.approx([0, -1 / 2, -1 / 2, 0])
    assert not shares[21:].any()
    weights = packed.loss_inputs["next_token"]["weight"]
    assert weights.nonzero()[0].tolist() == [25, 26, 27]


@pytest.mark.usefixtures("compiled_when_called")
def test_a_job_that_joins_needs_an_objective_of_the_run(
    jobs, model, of_pairs, tmp_path
):
    own = {"model": str(model.folder), "output_dir": str(tmp_path / "run")}
    slots = {"slot_rank": 8, "slot_targets": LINEARS}
    trainer = Trainer(RunConfig(jobs=jobs[:1], **own, **slots), model)
    with pytest.raises(
        ConfigError, match=r"objective 'pairs'.* started for next_token"
    ):
        trainer.add_job(of_pairs(jobs[1]))


def test_a_pair_that_no_microbatch_holds_is_refused(train, jobs, of_pairs):
    with pytest.raises(ConfigError, match="2 samples that are trained on together"):
        train([of_pairs(jobs[0])], microbatch_tokens=96)
