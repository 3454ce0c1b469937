"""Cases of the mesh benchmark, one for each process, and the jobs that it trains."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.config import RunConfig
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.run_plan import RunPlan
from jaxlora.profile.tokens import job_batch
from jaxlora.profile.training import make_job, model_of_shapes, plan_run
from jaxlora.scheduler import Lanes, Sample, Schedule
from jaxlora.scheduler.stream.state import Rules
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.job_state import JobState
from scripts.bench.mesh.fixed_ticks import pack_stream, pack_whole
from scripts.bench.scheduler.benchmark import KINDS
from scripts.bench.scheduler.lengths import lengths
from scripts.bench.workload import Workload

# The sources of the jobs' lengths, in the order of the jobs; see
# `bench.scheduler.lengths`.
DATA_SETS = ("mix", "wikisum", "cnn", "xsum")

# What is measured after the programs are compiled, where a mesh has it. `routes` has a
# program of its own for all layers, which takes long to compile for a deep model.
PARTS = ("routes", "step", "passes", "kinds", "windows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Workload):
    """A mesh, and what runs on it.

    Attributes:
        mesh: Sizes of the mesh, as in a run file.
        adapters: Numbers of adapters to measure.
        num_microbatches: Full microbatches of which all jobs together have the tokens.
        batch_samples: Samples in a global batch of each job.
        implementation: LoRA kernels, or `auto` for the first that can run the model.
        remat: What the backward pass recomputes.
        kinds: Kinds of jobs of the scheduler's benchmark that a pipeline trains.
        padding_share: The setting of a run, by which these are packed.
        layers_per_program: The setting of a run.
        parts: Which of `PARTS` to measure.
    """

    mesh: str
    adapters: tuple[int, ...] = (1, 2, 4)
    num_microbatches: int = 128
    batch_samples: int = 32
    implementation: str = "auto"
    remat: str = "none"
    kinds: tuple[str, ...] = ()
    padding_share: float | str = "auto"
    layers_per_program: int | str = "auto"
    parts: tuple[str, ...] = PARTS

    def __post_init__(self):
        most = len(DATA_SETS)
        if not self.adapters or not all(1 <= n <= most for n in self.adapters):
            raise ValueError(
                f"adapters={self.adapters} must be numbers from 1 to {most}, as each "
                "adapter has one of the data sets."
            )
        for kind in self.kinds:
            if len(KINDS[kind].num_samples) > max(self.adapters):
                raise ValueError(
                    f"kinds: {kind!r} has {len(KINDS[kind].num_samples)} jobs, and "
                    f"adapters={self.adapters} are fewer."
                )

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of the mesh."""
        return MeshSizes.parse(self.mesh)

    def run_config(self) -> RunConfig:
        """Returns the run, with a job for each of the most adapters."""
        return self.config(
            max(self.adapters),
            self.batch_samples,
            mesh=self.mesh,
            implementation=self.implementation,
            remat=self.remat,
            padding_share=self.padding_share,
            layers_per_program=self.layers_per_program,
        )

    def plan(self) -> RunPlan:
        """Plans the run.

        Raises:
            ConfigError: The run cannot be trained here.
        """
        jobs = make_jobs(self, max(self.adapters), 1)
        # Attention also has room for the probes of `MeshTraining`.
        mean = max(1, min(self.longest // 4, 480))
        config = self.run_config()
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
    while sum(map(sum, drawn)) < num_microbatches * case.microbatch_tokens:
        for name, own, rng in zip(DATA_SETS, drawn, rngs, strict=False):
            batch = lengths(name, case.batch_samples, rng)
            own += np.minimum(batch, case.longest).tolist()
    model, jobs = case.model_config(), []
    for settings, own, rng in zip(case.run_config().jobs, drawn, rngs, strict=False):
        samples = job_batch(len(jobs), own, model.vocab_size, rng).samples
        jobs.append(make_job(settings, samples, model))
    return jobs


def make_jobs_of_kind(case: Case, kind: str) -> list[PreparedJob]:
    """Makes the jobs of one of `KINDS`, with random tokens."""
    model, jobs = case.model_config(), []
    lengths_of: dict[int, list[int]] = {}
    for sample in KINDS[kind].samples():
        own = lengths_of.setdefault(sample.owner, [])
        own.append(min(sample.num_tokens, case.longest))
    for slot, own in lengths_of.items():
        settings = case.run_config().jobs[slot]
        settings = settings.replace(batch_size=KINDS[kind].batch_size)
        rng = np.random.default_rng([1, slot])
        samples = job_batch(slot, own, model.vocab_size, rng).samples
        jobs.append(make_job(settings, samples, model))
    return jobs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Microbatches of some jobs, after which the devices have nothing to do.

    Attributes:
        jobs: The jobs, by slot.
        schedule: All samples of the jobs.
    """

    jobs: Mapping[int, JobState]
    schedule: Schedule

    @staticmethod
    def of(
        case: Case, num_microbatches: int, starts: Sequence[Adapter], lanes: Lanes
    ) -> "Window":
        """Packs the samples of a job for each adapter; see `make_jobs`."""
        prepared = make_jobs(case, len(starts), num_microbatches)
        jobs = _started(prepared, starts)
        schedule = pack_whole(samples_of(jobs), case.limits, "joint", lanes)
        return Window(jobs=jobs, schedule=schedule)

    @staticmethod
    def of_kind(
        case: Case, kind: str, starts: Sequence[Adapter], rules: Rules
    ) -> "Window":
        """Packs the jobs of one of `KINDS` as the trainer's stream does."""
        jobs = _started(make_jobs_of_kind(case, kind), starts)
        return Window(jobs=jobs, schedule=pack_stream(samples_of(jobs), rules))


def _started(
    prepared: Sequence[PreparedJob], starts: Sequence[Adapter]
) -> dict[int, JobState]:
    pairs = enumerate(zip(prepared, starts, strict=False))
    return {slot: JobState(job, start) for slot, (job, start) in pairs}


def samples_of(jobs: Mapping[int, JobState]) -> list[Sample]:
    """Returns all samples of some jobs, which they name by slot."""
    return [
        Sample(owner=slot, batch=step, index=i, num_tokens=int(num_tokens))
        for slot, job in jobs.items()
        for step in range(job.num_steps)
        for i, num_tokens in enumerate(job.prepared.lengths(step))
    ]
