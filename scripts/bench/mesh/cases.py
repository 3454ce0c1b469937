"""Cases of the mesh benchmark, one for each process, and the jobs that it trains."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.bench.scheduler.lengths import lengths
from jaxlora.bench.shapes import config_json
from jaxlora.bench.tokens import job_batch
from jaxlora.bench.training import Setup
from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.tokenize import TokenizedData
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.scheduler import Limits
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.job_run import JobRun
from jaxlora.train.kernel_choice import choose_attention, choose_kernels

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
        traced_microbatches: As `num_microbatches`, for the profiled window; 0: no
            window is profiled.
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
    traced_microbatches: int = 16

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

    def setup(self) -> Setup:
        """Returns the decoder with a slot for each of the most adapters."""
        model = model_config(config_json(self.model, self.num_layers))
        dtype = jnp.dtype(self.dtype)
        options = DecoderOptions(
            dtype=dtype,
            remat=self.remat,  # type: ignore[arg-type]
            attention=choose_attention(self.attention, dtype, model).name,
            max_segment_tokens=self.longest,
            # Attention also has room for the probes of `pass_times`.
            mean_segment_tokens=max(1, min(self.longest // 4, 480)),
        )
        setup = Setup(
            model=model,
            options=options,
            limits=self.limits,
            num_jobs=max(self.adapters),
            rank=self.rank,
            dropout=self.dropout,
        )
        return self._with_kernels(setup)

    def _with_kernels(self, setup: Setup) -> Setup:
        chosen = self.implementation
        if chosen == "auto":
            chosen = choose_kernels("auto", setup.spec(), self.block_tokens).name
        options = dataclasses.replace(setup.options, implementation=chosen)
        return dataclasses.replace(setup, options=options)


def make_runs(
    case: Case, num_jobs: int, num_microbatches: int, start: Adapter
) -> dict[int, JobRun]:
    """Makes jobs with random tokens and ragged lengths, by slot.

    They depend only on the jobs and on the number of tokens, not on the mesh.

    Args:
        case: The case.
        num_jobs: Number of jobs. All of them have as many global batches.
        num_microbatches: Full microbatches of which all jobs together have the tokens.
        start: The adapter that each job starts from.
    """
    rngs = [np.random.default_rng([0, slot]) for slot in range(num_jobs)]
    drawn: list[list[int]] = [[] for _ in rngs]
    while sum(map(sum, drawn)) < num_microbatches * case.capacity:
        for name, own, rng in zip(case.data_sets, drawn, rngs, strict=False):
            batch = lengths(name, case.batch_samples, rng)
            own += np.minimum(batch, case.longest).tolist()
    vocab_size = config_json(case.model)["vocab_size"]
    return {
        slot: _run(case, slot, job_batch(slot, own, vocab_size, rng).samples, start)
        for slot, (own, rng) in enumerate(zip(drawn, rngs, strict=True))
    }


def _run(case: Case, slot: int, samples, start: Adapter) -> JobRun:
    job = LoraJob(
        name=f"job{slot}",
        data=DataConfig(path="random"),
        rank=case.rank,
        dropout=case.dropout,
        batch_size=case.batch_samples,
        learning_rate=1e-5,
        shuffle=False,
        seed=slot,
    )
    data = TokenizedData(
        source="random",
        samples=samples,
        max_length=case.longest,
        num_records=len(samples),
        num_truncated=0,
        num_dropped=0,
        num_without_target=0,
    )
    return JobRun(job, start, data, None)
