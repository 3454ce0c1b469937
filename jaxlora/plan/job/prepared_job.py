"""A job of a run before the base model has weights: its modules and its samples.

`jaxlora plan` and the trainer both begin here, so they refuse the same jobs.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.table import find_optimizer
from jaxlora.common.counted import counted
from jaxlora.common.note import Note
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.strict import MOST_STEPS
from jaxlora.data.order import JobOrder
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.token_cache import user_token_cache
from jaxlora.data.tokens.tokenize import DataReader, check_enough
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import ConfigError
from jaxlora.models.config import LongRopeScaling, ModelConfig, is_of_expert
from jaxlora.models.structure import linear_shapes
from jaxlora.objectives.base import Objective, reference_of
from jaxlora.objectives.kto import recombined
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.objectives.table import find_objective, smallest_batch
from jaxlora.plan.job.chosen_modules import (
    ChosenModules,
    check_objective,
    choose_modules,
)
from jaxlora.problems import Problems

# A forward pass over so many tokens takes minutes with a model of 8B on an H100.
_MANY_TOKENS = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreparedJob(ChosenModules):
    """The modules that a job adapts, and its samples.

    Attributes:
        settings: Settings of the job.
        train_data: Training samples.
        eval_data: Held-out samples, if any.
        first_step: Optimizer steps that it has done in another run.
        notes: Lines for the log about its samples and modules.
    """

    settings: LoraJob
    train_data: TokenizedData
    eval_data: TokenizedData | None
    first_step: int = 0
    notes: tuple[Note, ...] = ()

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.settings.name

    @property
    def data(self) -> tuple[TokenizedData, ...]:
        """The training samples, and those that are held out."""
        held_out = self.eval_data
        return (self.train_data,) if held_out is None else (self.train_data, held_out)

    def __post_init__(self):
        for data in self.data:
            assert data.group_size == self.objective.group_size, "read for another"

    @property
    def further_references(self) -> tuple[Adapter, ...]:
        """The adapter of the objective, unless the job starts from it."""
        reference = self.reference
        return () if reference is None or reference is self.start else (reference,)

    @property
    def adapted(self) -> dict[str, int]:
        """Largest rank in each linear that the job or its reference adapts."""
        found = {name: module.rank for name, module in self.modules.items()}
        for reference in self.further_references:
            for name, module in reference.modules.items():
                found[name] = max(found.get(name, 0), module.rank)
        return found

    @functools.cached_property
    def order(self) -> JobOrder:
        """Order of the samples, which defines the global batches."""
        settings = self.settings
        return JobOrder(
            num_samples=len(self.train_data.group_lengths),
            batch_size=settings.batch_size,
            seed=settings.seed,
            shuffle=settings.shuffle,
            epochs=settings.epochs,
            steps=settings.steps,
            smallest_batch=smallest_batch(settings.objective, settings.objective_args),
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.order.num_steps

    @property
    def longest_group(self) -> int:
        """Tokens of the longest group of samples, held out or not."""
        return max(data.longest_group for data in self.data)

    @property
    def batch_tokens(self) -> float:
        """Mean number of tokens of a global batch."""
        return self.train_data.mean_batch_tokens(self.settings.batch_size)

    @functools.cached_property
    def fingerprints(self) -> dict[str, Any]:
        """Hashes of the inputs that the settings only name."""
        held_out, start = self.eval_data, self.start
        found: dict[str, Any] = {
            "data_fingerprint": self.train_data.fingerprint,
            "eval_data_fingerprint": None if held_out is None else held_out.fingerprint,
            "init_from_fingerprint": None if start is None else start.fingerprint(),
        }
        for reference in self.further_references:
            found["reference_fingerprint"] = reference.product_fingerprint()
        return found

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """The settings and fingerprints by which a resumed job is compared; kept."""
        return self.settings.model_dump(mode="json") | self.fingerprints

    @property
    def objective(self) -> Objective:
        """The job's objective, which defines its loss."""
        return find_objective(self.settings.objective)

    @functools.cached_property
    def objective_settings(self) -> Any:
        """The settings of the job's objective, of its own class."""
        return self.objective.settings_of(self.settings.objective_args)

    @property
    def baseline(self) -> Objective | None:
        """Defines the baselines of the job's global batches; None: it has none."""
        is_needed = self.objective.needs_baseline(self.objective_settings)
        return self.objective.baseline if is_needed else None

    @functools.cached_property
    def neighbors(self) -> Mapping[str, Int[np.ndarray, " N"]]:
        """The sample whose completion is recombined with each sample's prompt."""
        out = {"train": self.order.neighbors()}
        if self.eval_data is not None:
            out["eval"] = np.roll(np.arange(len(self.eval_data.samples)), 1)
        return out

    def describe_reference(self) -> str:
        """Names what the objective compares with."""
        match reference_of(self.objective_settings):
            case "base":
                return "the base"
            case "start":
                return "the adapter that it starts from"
            case folder:
                return f"the adapter in {folder}"

    @functools.cached_property
    def starts_as_reference(self) -> bool:
        """Whether the job's first weights are those with which it compares."""
        start, reference = self.start, self.reference
        match reference_of(self.objective_settings):
            case None:
                return False
            case "base":  # fresh adapters change nothing
                return start is None
        if start is None or reference is None:
            return False
        return start.product_fingerprint() == reference.product_fingerprint()

    @functools.cached_property
    def runs_reference(self) -> bool:
        """Whether the reference runs in each step, and its results are not kept.

        It does where its results could not be computed before, or only with a long
        delay and for nothing: no sample is used twice. The job alone decides, so that
        the choice is the same when it is resumed beside others.
        """
        if not self.chooses_reference:
            settings = self.objective_settings
            has_reference = self.objective.needs_reference
            return has_reference and settings.reference_logps == "in_step"
        is_used_once = self.num_steps <= self.order.batches_per_epoch
        return is_used_once and self.has_many_tokens

    @property
    def chooses_reference(self) -> bool:
        """Whether `runs_reference` is chosen by cost."""
        settings = self.objective_settings
        has_reference = self.objective.needs_reference
        return has_reference and settings.reference_logps == "auto"

    @property
    def needs_reference_table(self) -> bool:
        """Whether an adapter may be the reference in its steps.

        If `runs_reference` is chosen by cost, a job that was resumed with other
        settings goes on as it began.
        """
        may_run = self.chooses_reference and self.has_many_tokens
        return self.reference is not None and (self.runs_reference or may_run)

    @property
    def has_many_tokens(self) -> bool:
        """Whether a forward pass over all samples would take long."""
        return self.train_data.num_tokens > _MANY_TOKENS

    def recombined(self, which: str, number: int) -> TokenizedSample:
        """Returns the prompt of a sample with its neighbor's completion.

        Args:
            which: `train` or `eval`.
            number: Number of the sample.
        """
        data = self.train_data if which == "train" else self.eval_data
        assert data is not None
        other = data.samples[int(self.neighbors[which][number])]
        return recombined(data.samples[number], other, self.settings.max_length)

    def sample_numbers(self, step: int) -> Int[np.ndarray, " B"]:
        """Returns the indices of the samples of an optimizer step's global batch."""
        size = self.train_data.group_size
        return (size * self.order.batch(step)[:, None] + np.arange(size)).ravel()

    def take_samples(self, step: int) -> list[TokenizedSample]:
        """Returns the samples of an optimizer step's global batch."""
        numbers = self.sample_numbers(step).tolist()
        return [self.train_data.samples[i] for i in numbers]

    def lengths_in_group(self, step: int, index: int) -> list[int]:
        """Returns the tokens of each sample of a group of a global batch."""
        size = self.train_data.group_size
        numbers = self.sample_numbers(step)[index * size : (index + 1) * size]
        return self.train_data.lengths[numbers].tolist()

    def is_set(self, setting: str) -> bool:
        """Whether the adapter has the trained tensors that a setting adds."""
        if self.start is not None:
            return self.start.is_set(setting)
        return getattr(self.settings, setting)

    def lengths(self, step: int) -> list[int]:
        """Returns the tokens of each group of an optimizer step's global batch."""
        return self.train_data.group_lengths[self.order.batch(step)].tolist()

    def first_steps(self, num_steps: int) -> "PreparedJob":
        """Returns the job with at most so many optimizer steps."""
        settings = self.settings.replace(steps=min(num_steps, self.num_steps))
        return dataclasses.replace(self, settings=settings)


def data_reader(config: RunConfig, tokenizer: Tokenizer) -> DataReader:
    """Returns the reader that all jobs of a run share."""
    return DataReader(tokenizer, user_token_cache() if config.token_cache else None)


def prepare_job(job: LoraJob, model: ModelConfig, reader: DataReader) -> PreparedJob:
    """Selects the modules that a job adapts, and reads its samples.

    Raises:
        JaxloraError: The optimizer, the objective, the targets, the adapter to start
            from or the data cannot be used.
    """
    find_optimizer(job)
    check_objective(job)
    chosen = choose_modules(job, model, reader.tokenizer.token_id)
    return _read_job(job, chosen, model, reader)


def _read_job(
    job: LoraJob, chosen: ChosenModules, model: ModelConfig, reader: DataReader
) -> PreparedJob:
    held_out = None
    train = reader.read(job, "train")
    if job.eval_data is not None or job.eval_fraction > 0:
        held_out = reader.read(job, "eval")
    for data in filter(None, (train, held_out)):
        check_enough(data, job)
    prepared = PreparedJob(
        **vars(chosen),
        settings=job,
        train_data=train,
        eval_data=held_out,
    )
    if (num_steps := prepared.num_steps) > MOST_STEPS:
        raise ConfigError(
            f"epochs={job.epochs:g} of job {job.name!r} are {num_steps:.3g} optimizer "
            f"steps, and a job has at most {MOST_STEPS:,}. Lower epochs, or set steps."
        )
    notes = tuple(_notes(prepared, model))
    return dataclasses.replace(prepared, notes=notes)


def prepare_jobs(
    jobs: Sequence[LoraJob],
    chosen: Sequence[ChosenModules],
    model: ModelConfig,
    reader: DataReader,
) -> list[PreparedJob]:
    """Reads the samples of a run's jobs.

    Args:
        jobs: The jobs.
        chosen: The modules of each job.
        model: Architecture of the base model.
        reader: Reads the data with the tokenizer of the base model.

    Raises:
        JaxloraError: A job cannot be used. If several cannot, the message lists them.
    """
    problems, prepared = Problems(), []
    for number, (job, modules) in enumerate(zip(jobs, chosen, strict=True)):
        with problems.at("jobs", number):
            prepared.append(_read_job(job, modules, model, reader))
    problems.raise_all()
    return prepared


def _notes(job: PreparedJob, model: ModelConfig) -> Iterator[Note]:
    """Yields lines for the log about a job's samples and modules."""
    name = job.name
    for use, data in zip(("training", "held-out"), job.data, strict=False):
        for line in data.summaries():
            yield Note(f"{use} data {line}", job=name)
    yield from _warnings(job, model)
    yield Note(_describe_modules(job), job=name)
    if experts := _describe_experts(job, model):
        yield Note(experts, job=name)
    if job.runs_reference:
        yield Note(_describe_runs_reference(job), job=name)


def _warnings(job: PreparedJob, model: ModelConfig) -> Iterator[Note]:
    """Warns of held-out records that are trained on, and of too long samples."""
    held_out, shared = job.eval_data, None
    if held_out is not None:
        shared = held_out.describe_shared(job.train_data)
    if shared:
        text = (
            f"{shared} On these, the held-out loss says nothing about new records. "
            "Remove duplicates."
        )
        yield Note(text, is_warning=True, job=job.name)
    lengths, limit = np.concatenate([d.lengths for d in job.data]), model.max_positions
    num_beyond = np.count_nonzero(lengths > limit)
    if num_beyond and isinstance(model.rope.scaling, LongRopeScaling):
        raise ConfigError(
            f"job {job.name!r}: {num_beyond} of {len(lengths)} samples are longer than "
            f"{limit} tokens; the longest has {lengths.max()}. Beyond these, a model "
            f"with longrope is not supported. Set max_length to {limit}."
        )
    if num_beyond:
        are = "is" if num_beyond == 1 else "are"
        text = (
            f"{num_beyond} of {len(lengths)} samples {are} longer than the "
            f"{limit} positions that the model supports (max_position_embeddings); the "
            f"longest has {lengths.max()} tokens. Set max_length to {limit}, or expect "
            "worse results on them."
        )
        yield Note(text, is_warning=True, job=job.name)


def _describe_runs_reference(job: PreparedJob) -> str:
    why = "as reference_logps says"
    if job.chooses_reference:
        why = (
            f"as no sample is used twice, and {job.train_data.num_tokens:,} tokens "
            "would delay the first step. To compute them once, such as for several "
            "jobs with the same data, set reference_logps: kept"
        )
    return (
        f"the log-probabilities by {job.describe_reference()} are computed in each "
        f"step, by a forward pass more, {why}."
    )


def _describe_experts(job: PreparedJob, model: ModelConfig) -> str | None:
    """Says what is trained in experts, and what would be at the job's whole rank."""
    experts = {n: one.rank for n, one in job.modules.items() if is_of_expert(n)}
    if not experts:
        return None
    sizes = {name: sum(shape) for name, shape in linear_shapes(model).items()}
    trained = sum(rank * sizes[name] for name, rank in experts.items())
    ranks, whole = sorted(set(experts.values())), job.settings.rank
    text = (
        f"experts have rank {'/'.join(map(str, ranks))}: {trained:,} parameters. The "
        "router stays as it is, and no loss balances it"
    )
    if job.start is not None or ranks == [whole]:
        return f"{text}."
    full = whole * sum(sizes[name] for name in experts)
    return f"{text}. With expert_rank: full, they would have {full:,}."


def _describe_modules(job: PreparedJob) -> str:
    # The other half is the first weights, which are fixed.
    share = 2 if job.settings.keeps_start else 1
    each = sorted({module.rank // share for module in job.modules.values()})
    ranks = "/".join(map(str, each)) + (" (twice that in a slot)" if share > 1 else "")
    kinds = dict.fromkeys(module.rsplit(".", 1)[-1] for module in job.modules)
    text = f"rank {ranks} on {counted(len(job.modules), 'module')}: {', '.join(kinds)}"
    if whole := job.settings.modules_to_save:
        text += f"; whole copies of {' and '.join(whole)}"
    return text
