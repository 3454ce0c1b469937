"""The workload of step and mesh: a model, and jobs with random tokens."""

import dataclasses
import json
from typing import Any, Self

from jaxlora.config import RunConfig
from jaxlora.models.config import ModelConfig
from jaxlora.models.registry import model_config
from jaxlora.profile.training import random_jobs
from jaxlora.scheduler import Limits
from scripts.bench.shapes import config_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, and the settings of its jobs; a case goes to its process as JSON.

    Attributes:
        model: One of `shapes.MODELS`.
        layers: Replaces the model's own number of layers, unless None.
        rank: Rank of each adapter.
        dropout: Dropout rate of each adapter.
        microbatch_tokens: Tokens of a microbatch on each device.
        block_tokens: Tokens of a block.
        longest_tokens: Largest length of a sample.
        dtype: Dtype of weights and activations.
        attention: Implementation of attention: `auto`, `cudnn`, `triton` or `xla`.
        repeats: Number of timed calls.
    """

    model: str
    layers: int | None = None
    rank: int = 16
    dropout: float = 0.1
    microbatch_tokens: int = 8192
    block_tokens: int = 64
    longest_tokens: int = 2048
    dtype: str = "bfloat16"
    attention: str = "auto"
    repeats: int = 10

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` writes."""
        fields = json.loads(text)
        lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        return cls(**fields | lists)

    def to_json(self) -> str:
        """Describes the case in one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def limits(self) -> Limits:
        """Limits of a microbatch."""
        capacity = self.microbatch_tokens
        return Limits(capacity=capacity, block_tokens=self.block_tokens)

    @property
    def longest(self) -> int:
        """Largest length of a sample that fits into a microbatch, in tokens."""
        return min(self.longest_tokens, self.microbatch_tokens)

    def model_config(self) -> ModelConfig:
        """Returns the architecture of the model."""
        return model_config(config_json(self.model, self.layers))

    def config(self, num_jobs: int, batch_size: int, **settings: Any) -> RunConfig:
        """Returns a run of equal jobs.

        Args:
            num_jobs: Number of jobs.
            batch_size: Samples of a job's global batch.
            **settings: Further settings of the run.
        """
        jobs = random_jobs(
            num_jobs,
            rank=self.rank,
            dropout=self.dropout,
            batch_size=batch_size,
            max_length=self.longest,
            shuffle=False,
        )
        return RunConfig(
            model=self.model,
            jobs=jobs,
            microbatch_tokens=self.microbatch_tokens,
            block_tokens=self.block_tokens,
            dtype=self.dtype,  # type: ignore[arg-type]
            attention=self.attention,  # type: ignore[arg-type]
            **settings,
        )
