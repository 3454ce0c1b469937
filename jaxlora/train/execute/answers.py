"""Answers to held-out records from the slots of a run, and their metric."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.config.sweep_config import Metric
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.errors import ConfigError
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.batch import Batch, Request
from jaxlora.generate.batch_shape import batch_shape
from jaxlora.generate.generator import end_ids
from jaxlora.generate.metrics import metric_function, value_of
from jaxlora.hf.load import FrozenModel
from jaxlora.train.execute.slot_decoder import SlotDecoder
from jaxlora.train.job_state import JobState

# Answers that are generated together. It is always the same, as a batch of another
# shape rounds differently: so a job has the same answers alone and beside others.
_ROWS = 32


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


def questions(
    data: TokenizedData, tokenizer: Tokenizer, ends: Sequence[int], limit: int | None
) -> list[Question]:
    """Returns held-out records as questions: the last answer of each, and all before.

    Args:
        data: The held-out samples. Of a group (a preference), the first one counts.
        tokenizer: The model's tokenizer.
        ends: Tokens that end an answer.
        limit: Number of records; None: all.

    Raises:
        ConfigError: A record has nothing before its answer.
    """
    whole = data.samples[:: data.group_size]
    return [
        _question(sample, data.source, tokenizer, ends)
        for sample in whole[: len(whole) if limit is None else limit]
    ]


def _question(
    sample: TokenizedSample, source: str, tokenizer: Tokenizer, ends: Sequence[int]
) -> Question:
    ids, is_target = sample.token_ids.tolist(), sample.is_target
    stop = int(np.flatnonzero(is_target)[-1]) + 1
    start = stop - int(np.argmin(is_target[:stop][::-1]))
    if start < 2:  # the first token is never a target
        raise ConfigError(
            f"sweep.metric: a record of {source} is an answer without a question, as "
            "its loss is on all of it. Give records with prompt and completion, or "
            "chats, with loss_on: completion; or rank by eval_loss."
        )
    answer = ids[start:stop]
    cut = next((i for i, token in enumerate(answer) if token in ends), len(answer))
    text = AnswerText(tokenizer, ids[:start], (), ends)
    return Question(token_ids=ids[:start], text=text, reference=text.of(answer[:cut]))


class AnswerMeter:
    """Generates answers with the adapters of a run, and computes a metric of them.

    The slots are only read, so training does the same, to the bit, with and without it.
    """

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
        self._asked: dict[str, list[Question]] = {}

    def measure(self, jobs: Sequence[JobState], tables: Any) -> dict[str, float]:
        """Returns the metric of each job that has held-out samples, by name.

        Args:
            jobs: Jobs that have slots, between two of their optimizer steps.
            tables: The slots of the run.

        Raises:
            ConfigError: A record is no question, or the metric has no finite value.
        """
        answers = self.answers(jobs, tables)
        return {
            name: value_of(
                self._metric,
                self._function,
                found,
                [question.reference for question in self._asked[name]],
            )
            for name, found in answers.items()
        }

    def answers(self, jobs: Sequence[JobState], tables: Any) -> dict[str, list[str]]:
        """Returns the answers of each job, in the order of its held-out samples."""
        for job in jobs:
            self._ask(job)
        loaded = self._decoder.loaded(tables)
        out = {job.name: [""] * len(self._asked[job.name]) for job in jobs}
        settings = GenerationSettings(max_new_tokens=self._metric.max_new_tokens)
        slots = {job.name: job.slot for job in jobs}
        for width, rows in self._rows(slots):
            shape = batch_shape(_ROWS, width, settings.max_new_tokens)
            requests = [self._request(name, i, slots) for name, i in rows]
            batch = Batch(loaded, requests, settings, self._ends, shape)
            while not batch.is_done:
                batch.advance()
            for (name, i), answer in zip(rows, batch.answers, strict=True):
                out[name][i] = self._asked[name][i].text.of(answer.token_ids)
        return out

    def _ask(self, job: JobState) -> None:
        if job.name in self._asked:
            return
        data = job.prepared.eval_data
        assert data is not None, "the configurations of a sweep are evaluated"
        limit = self._metric.limit
        found = questions(data, self._tokenizer, self._ends, limit)
        longest = max(len(question.token_ids) for question in found)
        if longest >= self._positions:
            raise ConfigError(
                f"sweep.metric: a question of job {job.name!r} has {longest} tokens, "
                f"and the model has positions for {self._positions} with the answer. "
                "Lower max_length."
            )
        self._asked[job.name] = found

    def _rows(
        self, slots: Mapping[str, int]
    ) -> Iterator[tuple[int, list[tuple[str, int]]]]:
        """Yields the questions of each batch, with the length of its prompts.

        The length is that of the power of two above, whoever else is asked.
        """
        by_width: dict[int, list[tuple[str, int]]] = {}
        for name in slots:
            for i, question in enumerate(self._asked[name]):
                width = 1 << (len(question.token_ids) - 1).bit_length()
                by_width.setdefault(width, []).append((name, i))
        for width in sorted(by_width):
            rows = by_width[width]
            for begin in range(0, len(rows), _ROWS):
                yield width, rows[begin : begin + _ROWS]

    def _request(self, name: str, number: int, slots: Mapping[str, int]) -> Request:
        ids = self._asked[name][number].token_ids
        most = min(self._metric.max_new_tokens, self._positions - len(ids))
        return Request(
            token_ids=np.array(ids, np.int32),
            slot=slots[name],
            seed=0,
            max_new_tokens=most,
        )
