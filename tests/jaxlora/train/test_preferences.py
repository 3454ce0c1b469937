"""Jobs that learn from preferences train beside others, each as if it were alone."""

import json
import pathlib

import numpy as np
import pytest

from jaxlora import LoraJob
from tests.jaxlora.train.test_contracts import assert_same_training

SETTINGS = {
    "simpo": {"beta": 2.5, "simpo_gamma": 1.0, "cpo_alpha": 0.3},
    "cpo": {"loss_type": "hinge", "beta": 0.3},
    "orpo": {"beta": 0.5},
}


def write_pairs(path: pathlib.Path, count: int, seed: int) -> str:
    """Writes prompts; the chosen answer repeats one in capitals, the other does not."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for _ in range(count):
            prompt = "".join(rng.choice(list("abcdefgh "), rng.integers(3, 40)))
            length = rng.integers(2, len(prompt) + 1)
            worse = "".join(rng.choice(list("xyz"), rng.integers(1, 30)))
            answers = {"chosen": prompt[:length].upper(), "rejected": worse}
            file.write(json.dumps({"prompt": prompt} | answers) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def preference_jobs(jobs, tmp_path_factory) -> dict[str, LoraJob]:
    """A job of each objective."""
    folder = tmp_path_factory.mktemp("pairs")
    return {
        objective: jobs[i].replace(
            name=objective,
            objective=objective,
            objective_args=args,
            data={"path": write_pairs(folder / f"{i}.jsonl", 15 + i, seed=i)},
            batch_size=3 + i,
        )
        for i, (objective, args) in enumerate(SETTINGS.items())
    }


@pytest.fixture(scope="module")
def done():
    """The run that several tests compare with; it is trained once."""
    return {}


@pytest.fixture
def together(train, jobs, preference_jobs, done):
    if not done:
        done["run"] = train([jobs[3], *preference_jobs.values()])
    return done["run"]


def test_each_job_trains_as_if_it_were_alone(train, jobs, preference_jobs, together):
    for job in (preference_jobs["simpo"], preference_jobs["orpo"], jobs[3]):
        alone = train([job], max_concurrent_jobs=4)
        assert_same_training(together, alone, [job.name])


def test_layout_does_not_matter(train, jobs, preference_jobs, together):
    """Global batches that need several microbatches."""
    both = [jobs[3], *preference_jobs.values()]
    small = train(both, microbatch_tokens=192)
    assert_same_training(together, small, [job.name for job in both])
