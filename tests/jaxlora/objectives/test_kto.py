"""Recombined samples, and the baselines of labelled completions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import LoraJob
from jaxlora.adapters.adapter import Adapter
from jaxlora.data.pack import JobBatch
from jaxlora.data.tokens.tokenize import check_enough
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import ConfigError, DataError
from jaxlora.objectives.kto import recombined
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.plan.job.chosen_modules import check_objective
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.train.job_state import JobState


def sample(
    prompt: int, length: int, label: bool, reference: float | None
) -> TokenizedSample:
    is_target = np.arange(prompt + length) >= prompt
    ids = np.arange(prompt + length, dtype=np.int32)
    return TokenizedSample(ids, is_target, float(label), reference)


def test_a_recombined_sample_has_another_completion():
    one = TokenizedSample(
        np.arange(1, 6, dtype=np.int32), np.array([0, 0, 0, 1, 1], bool)
    )
    # A chat ends with tokens that are no targets.
    other = TokenizedSample(
        np.arange(11, 15, dtype=np.int32), np.array([0, 1, 1, 0], bool)
    )
    found = recombined(one, other, 99)
    assert found.token_ids.tolist() == [1, 2, 3, 12, 13, 14]
    assert found.is_target.tolist() == [False, False, False, True, True, False]
    cut = recombined(one, other, 4)
    assert cut.token_ids.tolist() == [1, 2, 3, 12]
    assert cut.is_target.tolist() == [False, False, False, True]
    assert not recombined(one, other, 3).is_target.any()


def five(batch_size: int) -> JobState:
    """A job of five labelled answers, of which the last one is left over."""
    samples = [
        sample(2 + i, 3 + i % 3, label=i % 2 == 0, reference=None) for i in range(5)
    ]
    data = TokenizedData(
        source="five",
        samples=samples,
        max_length=64,
        num_records=5,
        num_truncated=0,
        num_dropped=0,
        num_without_target=0,
        is_recombined=True,
    )
    args = {"beta": 0.5, "desirable_weight": 1.5, "reference_logps": "in_step"}
    job = LoraJob(
        name="five",
        data={"path": "five"},
        objective="kto",
        objective_args=args,
        batch_size=batch_size,
        epochs=2,
    )
    prepared = PreparedJob(
        settings=job, modules={}, start=None, train_data=data, eval_data=data
    )
    return JobState(prepared, Adapter(modules={}))


def log_ratio(one: TokenizedSample) -> tuple[np.ndarray, np.ndarray]:
    """Negative log likelihoods by a made policy and reference, by token and place."""
    rng = np.random.default_rng(one.token_ids.tolist())
    nll = rng.uniform(0.5, 3.0, (2, len(one.token_ids)))
    return nll[0], nll[1]


def measured(batch: JobBatch, baseline: float) -> float:
    """The loss of a batch by the objective, in float64."""
    parts = [batch.objective.row_inputs([one], batch.terms) for one in batch.samples]
    nlls = [log_ratio(one) for one in batch.samples]
    sizes = [len(one.token_ids) for one in batch.samples]
    inputs = {k: jnp.asarray(np.concatenate([p[k] for p in parts])) for k in parts[0]}
    policy, by_base = (
        jnp.asarray(np.concatenate(side)) for side in zip(*nlls, strict=True)
    )
    is_target = batch.objective.is_target(inputs)
    inputs |= {"reference_nll": jnp.where(is_target, by_base, 0.0)}
    inputs |= {"baseline": jnp.full(len(policy), baseline)}
    groups = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))
    nll = jnp.where(is_target, policy, 0.0)
    return float(batch.objective.losses(nll, inputs, groups).sum())


def defined(samples: list[TokenizedSample]) -> float:
    """The definition in NumPy: each prompt with the answer before it is recombined."""

    def ratio(one: TokenizedSample) -> float:
        policy, by_base = log_ratio(one)
        start = one.prompt_length - 1  # the row that predicts the first token
        return float((by_base - policy)[start:-1].sum())

    others = [recombined(one, samples[i - 1], 64) for i, one in enumerate(samples)]
    baseline = max(0.0, np.mean([ratio(one) for one in others]))
    losses = []
    for one in samples:
        sign, factor = (1, 1.5) if one.value > 0 else (-1, 1.0)
        x = sign * 0.5 * (ratio(one) - baseline)
        losses.append(factor * (1 - 1 / (1 + np.exp(-x))))
    return float(np.mean(losses))


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_an_answer_that_is_left_over_has_a_baseline_of_others(batch_size):
    """In each epoch, and held out."""
    state = five(batch_size)
    assert state.num_steps == 2 * {2: 2, 3: 2, 4: 1}[batch_size]
    with jax.enable_x64(True):
        for step in range(state.num_steps):
            batch = state.batch(0, step)
            others = state.baseline_batch(0, batch)
            assert others is not None and len(others.samples) == len(batch.samples) >= 2
            if step < state.num_steps // 2:  # later epochs keep the first one's pairs
                found = measured(batch, measured(others, 0.0))
                wanted = defined(list(batch.samples))
                assert found == pytest.approx(wanted, rel=1e-12) != 0.5
        held_out = state.prepared.eval_data
        assert held_out is not None
        pairs = state.prepared.neighbors["eval"]
        assert (pairs != np.arange(5)).all()


@pytest.mark.parametrize("args", [{}, {"loss_type": "kto", "beta": 0.3}])
def test_a_batch_of_one_answer_is_refused(args):
    job = LoraJob(
        name="a",
        data={"path": "a.jsonl"},
        objective="kto",
        objective_args=args,
        batch_size=1,
    )
    match = "batch_size=1 of job 'a' must be 2 or more with kto.* Raise batch_size"
    with pytest.raises(ConfigError, match=match):
        check_objective(job)
    check_objective(job.replace(batch_size=2))
    # Without a baseline, a batch may have one.
    check_objective(job.replace(objective_args={"loss_type": "apo_zero_unpaired"}))
    check_objective(job.replace(objective="dpo", objective_args={}))


def test_a_data_set_of_one_answer_is_refused():
    state = five(4)
    data = dataclasses.replace(
        state.prepared.train_data, samples=[sample(2, 3, True, 0.0)]
    )
    with pytest.raises(DataError, match="has 1 sample there, and kto needs 2 or more"):
        check_enough(data, state.settings)
    args = {"loss_type": "apo_zero_unpaired"}
    check_enough(data, state.settings.replace(objective_args=args))
