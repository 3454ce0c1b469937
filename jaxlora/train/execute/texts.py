"""Texts that jobs generate at their evaluations, from the slots that train them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.adapters.slots import SlotTable
from jaxlora.config.generation_settings import GenerationSettings, SamplesConfig
from jaxlora.config.sweep_config import Metric
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import ConfigError
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.batch import Batch, Request, batch_shape
from jaxlora.generate.generator import TextDecoder, end_ids
from jaxlora.generate.loaded import LoadedDecoder, LoadedStage
from jaxlora.generate.metrics import metric_function, value_of
from jaxlora.generate.prompt import prompt_text, sample_prompts
from jaxlora.hf.load import FrozenModel
from jaxlora.models.forward import Base
from jaxlora.models.spec import DecoderSpec
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.train.execute.layout import Layout
from jaxlora.train.job_state import JobState

_SAMPLE_ROWS = 16  # texts of samples that are generated together
# Answers that are generated together. It is always the same, as a batch of another
# shape rounds differently: so a job has the same answers alone and beside others.
_ANSWER_ROWS = 32


class SlotDecoder:
    """Makes decoders of the present weights, on the devices that train them.

    The slots are only read, and generation has programs of its own. So training does
    the same, to the bit, with and without it.
    """

    def __init__(self, layout: Layout, base: Base):
        """Makes the object; nothing is copied or compiled yet.

        Args:
            layout: The stages of the run.
            base: The frozen weights.
        """
        self._layout, self._base = layout, base
        self._bases: list[Base] | None = None

    def loaded(self, tables: Sequence[SlotTable]) -> LoadedDecoder:
        """Returns a decoder of the present weights, which a step would invalidate.

        Args:
            tables: The slots of each stage.
        """
        if self._bases is None:
            self._bases = self._layout.bases(self._base)
        stages = [
            LoadedStage(
                spec=_plain(stage.spec),
                base=base,
                adapters=table.weights,
                settings=table.settings,
                mesh=stage.placement.mesh,
            )
            for stage, base, table in zip(
                self._layout.stages, self._bases, tables, strict=True
            )
        ]
        return LoadedDecoder(stages=tuple(stages))


def _plain(spec: DecoderSpec) -> DecoderSpec:
    """Returns a decoder that generates.

    A few rows of tokens are bound by reading weights, whatever the kernels.
    """
    options = dataclasses.replace(
        spec.options,
        implementation="xla",
        attention="xla",
        remat="none",
        most_adapters=None,  # any number of jobs generates at the same time
    )
    return dataclasses.replace(spec, options=options).divided()


# ---- samples -------------------------------------------------------------------------


class Sampler:
    """Generates texts with the adapters of a run while it trains."""

    def __init__(
        self,
        config: SamplesConfig,
        model: FrozenModel,
        tokenizer: Tokenizer,
        decoder: SlotDecoder,
    ):
        """Makes the object; nothing is compiled yet.

        Args:
            config: Prompts and settings.
            model: The base model of the run.
            tokenizer: The model's tokenizer.
            decoder: The run's decoder with its slots.

        Raises:
            JaxloraError: As for `sample_prompts`.
        """
        self._config, self._tokenizer, self._decoder = config, tokenizer, decoder
        self._end_ids = end_ids(model, tokenizer)
        self._prompts = sample_prompts(config, model.config, tokenizer)

    def generate(
        self, slots: Mapping[str, int], tables: Sequence[SlotTable]
    ) -> dict[str, list[dict[str, Any]]]:
        """Generates a text for each prompt with each of some adapters.

        Args:
            slots: Slots of the adapters, by job.
            tables: The slots of the run, between two optimizer steps of these jobs.

        Returns:
            The values of a `SampleEvent` for each text, in the order of the prompts, by
            job.
        """
        prompts = [
            dataclasses.replace(prompt, adapter=job)
            for job in slots
            for prompt in self._prompts
        ]
        decoder = TextDecoder(
            decoder=self._decoder.loaded(tables),
            tokenizer=self._tokenizer,
            slots=slots,
            end_ids=self._end_ids,
        )
        texts: dict[str, list[dict[str, Any]]] = {job: [] for job in slots}
        for made in decoder.generate(prompts, self._config, _SAMPLE_ROWS):
            mine = texts[str(made.prompt.adapter)]
            mine.append(
                {
                    "number": len(mine),
                    "prompt": prompt_text(made.prompt),
                    "text": made.text,
                    "finish_reason": made.finish_reason,
                }
            )
        return texts


# ---- answers -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Question:
    """A held-out record as a question.

    Attributes:
        token_ids: The tokens before the answer.
        text: Decodes the tokens of answers.
        reference: The answer of the record.
    """

    token_ids: list[int]
    text: AnswerText
    reference: str


def _question(
    sample: TokenizedSample, source: str, tokenizer: Tokenizer, ends: Sequence[int]
) -> Question:
    """Returns a record as a question: its last answer, and all before.

    Raises:
        ConfigError: It has nothing before its answer.
    """
    ids, is_target = sample.token_ids.tolist(), sample.is_target
    stop = int(np.flatnonzero(is_target)[-1]) + 1
    start = stop - int(np.argmin(is_target[:stop][::-1]))
    if start < 2:  # the first token is never a target
        raise ConfigError(
            f"sweep.metric: a record of {source} is an answer without a question, as "
            "its loss is on all of it. Give records with prompt and completion, or "
            "chats, with loss_on: completion; or rank by eval_loss."
        )
    answer = itertools.takewhile(lambda token: token not in ends, ids[start:stop])
    text = AnswerText(tokenizer, ids[:start], (), ends)
    return Question(token_ids=ids[:start], text=text, reference=text.of([*answer]))


class AnswerMeter:
    """Generates answers with the adapters of a run, and computes a metric of them."""

    def __init__(
        self,
        metric: Metric,
        model: FrozenModel,
        tokenizer: Tokenizer,
        decoder: SlotDecoder,
    ):
        """Makes the object; nothing is compiled yet.

        Args:
            metric: The metric.
            model: The base model of the run.
            tokenizer: Its tokenizer.
            decoder: The run's decoder with its slots.

        Raises:
            ConfigError: The metric cannot be found.
        """
        self._metric, self._tokenizer, self._decoder = metric, tokenizer, decoder
        self._function = metric_function(metric.name)
        self._ends = end_ids(model, tokenizer)
        self._positions = model.config.max_positions
        self._asked: dict[str, list[Question]] = {}  # by job

    def measure(
        self, jobs: Sequence[JobState], tables: Sequence[SlotTable]
    ) -> dict[str, float]:
        """Returns the metric of each job that has held-out samples, by name.

        Args:
            jobs: Jobs that have slots, between two of their optimizer steps.
            tables: The slots of the run.

        Raises:
            ConfigError: A record is no question, or the metric has no finite value.
        """
        metrics = {}
        for name, found in self.answers(jobs, tables).items():
            references = [question.reference for question in self._asked[name]]
            metrics[name] = value_of(self._metric, self._function, found, references)
        return metrics

    def answers(
        self, jobs: Sequence[JobState], tables: Sequence[SlotTable]
    ) -> dict[str, list[str]]:
        """Returns the answers of each job, in the order of its held-out samples."""
        # Prompts have the length of the power of two above, whoever else is asked.
        by_width: dict[int, list[tuple[JobState, int, Question]]] = {}
        for job in jobs:
            for i, question in enumerate(self._questions(job)):
                width = 1 << (len(question.token_ids) - 1).bit_length()
                by_width.setdefault(width, []).append((job, i, question))
        decoder = self._decoder.loaded(tables)
        settings = GenerationSettings(max_new_tokens=self._metric.max_new_tokens)
        out = {job.name: [""] * len(self._asked[job.name]) for job in jobs}
        for width in sorted(by_width):
            shape = batch_shape(_ANSWER_ROWS, width, settings.max_new_tokens)
            for rows in itertools.batched(by_width[width], _ANSWER_ROWS):
                requests = [
                    Request(
                        token_ids=np.array(question.token_ids, np.int32),
                        slot=job.slot,
                        seed=0,
                        max_new_tokens=min(
                            settings.max_new_tokens,
                            self._positions - len(question.token_ids),
                        ),
                        end_ids=self._ends,
                    )
                    for job, _, question in rows
                ]
                batch = Batch.of(decoder, requests, shape)
                while not batch.is_done:
                    batch.advance()
                for (job, i, question), answer in zip(rows, batch.answers, strict=True):
                    out[job.name][i] = question.text.of(answer.token_ids)
        return out

    def _questions(self, job: JobState) -> list[Question]:
        """Returns held-out records of a job; of a group (a preference), the first.

        Raises:
            ConfigError: A record is no question, or one is too long.
        """
        if job.name in self._asked:
            return self._asked[job.name]
        data = job.prepared.eval_data
        assert data is not None, "the configurations of a sweep are evaluated"
        found = [
            _question(sample, data.source, self._tokenizer, self._ends)
            for sample in data.samples[:: data.group_size][: self._metric.limit]
        ]
        longest = max(len(question.token_ids) for question in found)
        if longest >= self._positions:
            raise ConfigError(
                f"sweep.metric: a question of job {job.name!r} has {longest} tokens, "
                f"and the model has positions for {self._positions} with the answer. "
                "Lower max_length."
            )
        return self._asked.setdefault(job.name, found)
