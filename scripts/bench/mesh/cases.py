"""Cases of the mesh benchmark, one for each process, and the jobs that it trains."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.bench.scheduler.lengths import lengths
from jaxlora.bench.shapes import config_json
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.config import model_config
from jaxlora.profile.tokens import job_batch
from jaxlora.profile.training import make_job, model_of_shapes, plan_run
from jaxlora.scheduler import Limits
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.job_state import JobState
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.run_plan import RunPlan

# The sources of the jobs' lengths, in the order of the jobs; see
# `bench.scheduler.lengths`.
DATA_SETS = ("mix", "wikisum", "cnn", "xsum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh, and what runs on it.

    Attributes:
        model: One of `shapes.MODELS`.
        mesh: Sizes of the mesh, as in a run file.
        num_layers: Replaces the model's own number of layers, unless None.
        adapters: Numbers of adapters to measure.
        num_microbatches: Full microbatches of which all jobs together have the tokens.
        data_sets: Source of the lengths of each job's samples. There are at least as
            many as the most adapters.
        batch_samples: Samples in a global batch of each job.
        round_robin_samples: Most samples in a microbatch of mLoRA's round robin; 0: as
            many as fit on average.
        capacity: Tokens of a microbatch on each device.
        block_tokens: Tokens of a block.
        longest_tokens: Largest length of a sample.
        in_flight: Numbers of ticks in flight on the first stage; 0: the number of
            stages.
        rank: Rank of each adapter.
        dropout: Dropout rate of each adapter.
        dtype: Dtype of weights and activations.
        attention: Implementation of attention: `auto`, `cudnn`, `triton` or `xla`.
        implementation: LoRA kernels, or `auto` for the first that can run the model.
        remat: What the backward pass recomputes.
        repeats: Number of timed calls of a pass or a step.
        window_repeats: Number of timed runs of a window.
    """

    model: str
    mesh: str
    num_layers: int | None = None
    adapters: tuple[int, ...] = (1, 2, 4)
    num_microbatches: int = 128
    data_sets: tuple[str, ...] = DATA_SETS
    batch_samples: int = 32
    round_robin_samples: int = 0
    capacity: int = 8192
    block_tokens: int = 64
    longest_tokens: int = 4096
    in_flight: tuple[int, ...] = (0,)
    rank: int = 16
    dropout: float = 0.1
    dtype: str = "bfloat16"
    attention: str = "auto"
    implementation: str = "auto"
    remat: str = "none"
    repeats: int = 10
    window_repeats: int = 1

    def __post_init__(self):
        most = len(self.data_sets)
        if not self.adapters or not all(1 <= n <= most for n in self.adapters):
            raise ValueError(
                f"adapters={self.adapters} must be numbers from 1 to {most}, as each "
                "adapter has one of the data sets. Give more data sets, or the same "
                "one several times."
            )

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Reads what `to_json` writes."""
        fields = json.loads(text)
        lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        return cls(**fields | lists)

    def to_json(self) -> str:
        """Describes the case in one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of the mesh."""
        return MeshSizes.parse(self.mesh)

    @property
    def limits(self) -> Limits:
        """Limits of a microbatch."""
        return Limits(capacity=self.capacity, block_tokens=self.block_tokens)

    @property
    def longest(self) -> int:
        """Largest length of a sample that fits into a microbatch, in tokens."""
        return min(self.longest_tokens, self.capacity)

    def config(self) -> RunConfig:
        """Returns the run, with a job for each of the most adapters."""
        return RunConfig(
            model=self.model,
            jobs=[self._job(slot) for slot in range(max(self.adapters))],
            mesh=self.mesh,
            microbatch_tokens=self.capacity,
            block_tokens=self.block_tokens,
            dtype=self.dtype,  # type: ignore[arg-type]
            attention=self.attention,  # type: ignore[arg-type]
            implementation=self.implementation,
            remat=self.remat,  # type: ignore[arg-type]
        )

    def _job(self, slot: int) -> LoraJob:
        return LoraJob(
            name=f"job{slot}",
            data=DataConfig(path="random"),
            rank=self.rank,
            dropout=self.dropout,
            batch_size=self.batch_samples,
            max_length=self.longest,
            learning_rate=1e-5,
            shuffle=False,
            seed=slot,
        )

    def model_config(self) -> ModelConfig:
        """Returns the architecture of the model."""
        return model_config(config_json(self.model, self.num_layers))

    def plan(self) -> RunPlan:
        """Plans the run.

        Raises:
            ConfigError: The run cannot be trained here.
        """
        jobs = make_jobs(self, max(self.adapters), 1)
        # Attention also has room for the probes of `MeshTraining`.
        mean = max(1, min(self.longest // 4, 480))
        config = self.config()
        return plan_run(
            config,
            model_of_shapes(config, self.model_config()),
            jobs,
            this_machine(),
            mean_segment_tokens=mean,
        )


def make_jobs(case: Case, num_jobs: int, num_microbatches: int) -> list[PreparedJob]:
    """Makes jobs with random tokens and ragged lengths.

    They depend only on the jobs and on the number of tokens, not on the mesh.

    Args:
        case: The case.
        num_jobs: Number of jobs. All of them have as many global batches.
        num_microbatches: Full microbatches of which all jobs together have the tokens.
    """
    rngs = [np.random.default_rng([0, slot]) for slot in range(num_jobs)]
    drawn: list[list[int]] = [[] for _ in rngs]
    while sum(map(sum, drawn)) < num_microbatches * case.capacity:
        for name, own, rng in zip(case.data_sets, drawn, rngs, strict=False):
            batch = lengths(name, case.batch_samples, rng)
            own += np.minimum(batch, case.longest).tolist()
    model, jobs = case.model_config(), []
    for settings, own, rng in zip(case.config().jobs, drawn, rngs, strict=False):
        samples = job_batch(len(jobs), own, model.vocab_size, rng).samples
        jobs.append(make_job(settings, samples, model))
    return jobs


def make_runs(
    case: Case, num_microbatches: int, starts: Sequence[Adapter]
) -> dict[int, JobState]:
    """Makes a job for each adapter that it starts from; see `make_jobs`."""
    jobs = make_jobs(case, len(starts), num_microbatches)
    pairs = zip(jobs, starts, strict=True)
    return {slot: JobState(job, start) for slot, (job, start) in enumerate(pairs)}
