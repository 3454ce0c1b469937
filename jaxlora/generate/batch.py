"""Generates the tokens of sequences together, a few steps at a time.

Each row of a batch holds a sequence of its own length, so a sequence may begin when
another ends. It depends on nothing of the others.
"""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int32

from jaxlora.generate.loaded import LoadedDecoder
from jaxlora.generate.programs import (
    MAX_STEPS,
    NO_TOKEN,
    Scores,
    Sequences,
)
from jaxlora.generate.prompt import FinishReason
from jaxlora.programs.program import Prepared, announce, counting, finish

_END_IDS = 8  # that the device knows; the host knows all
# XLA runs products of a matrix and a single row badly on a GPU: it would first convert
# the whole head of a model to float32, for example.
_LEAST_ROWS = 2
# Smallest prompt and cache that programs are compiled for, in tokens.
_LEAST_PROMPT, _LEAST_CACHE = 16, 64
# Most rows of tokens that one call of `prefill` runs, which bounds its memory.
_MAX_PREFILL_ROWS = 2048
# A chat grows with every answer. These sizes keep its programs the same.
_CHAT_PART, _CHAT_CACHE = 64, 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The shape of a batch: one of a small set, as each is compiled.

    Attributes:
        num_rows: Number of sequences.
        prompt_rows: Number of prompts that one call of `prefill` runs; None: all rows
            begin at once, and none later.
        part_tokens: Tokens of each prompt that one call of `prefill` runs.
        cache_tokens: Tokens of each sequence that the cache holds, and of its prompt
            with padding to a multiple of `part_tokens`.
    """

    num_rows: int
    prompt_rows: int | None = None
    part_tokens: int
    cache_tokens: int


def batch_shape(num_prompts: int, longest: int, max_new_tokens: int) -> BatchShape:
    """Returns the smallest shape for some prompts.

    The number of sequences is a power of two, at least 2. So is the length of the
    prompts, unless they are so long that they run in several parts.

    Args:
        num_prompts: Number of prompts.
        longest: Tokens of the longest prompt.
        max_new_tokens: Most tokens to generate for one of them.
    """
    num_rows = max(1 << (num_prompts - 1).bit_length(), _LEAST_ROWS)
    part = max(_MAX_PREFILL_ROWS // num_rows, _LEAST_PROMPT)
    part = min(part, max(1 << (longest - 1).bit_length(), _LEAST_PROMPT))
    return _shape(num_rows, part, longest, max_new_tokens)


def chat_shape(longest: int, max_new_tokens: int, max_positions: int) -> BatchShape:
    """Returns a shape for one prompt that the next prompts of a chat can share.

    Args:
        longest: Tokens of the prompt.
        max_new_tokens: Most tokens to generate.
        max_positions: Most tokens that the model has positions for.
    """
    least = min(_CHAT_CACHE, max_positions)
    return _shape(_LEAST_ROWS, _CHAT_PART, longest, max_new_tokens, least)


def _shape(
    num_rows: int, part: int, longest: int, max_new_tokens: int, least_cache: int = 0
) -> BatchShape:
    prompt_tokens = -(-longest // part) * part
    return BatchShape(
        num_rows=num_rows,
        part_tokens=part,
        cache_tokens=_cache_tokens(max(prompt_tokens + max_new_tokens, least_cache)),
    )


def _cache_tokens(num_tokens: int) -> int:
    """Returns the size of the cache: 64, 96, 128, 192, 256, 384 and so on."""
    size = _LEAST_CACHE
    while size < num_tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Request:
    """A prompt as tokens, and how tokens after it are chosen.

    Attributes:
        token_ids: The prompt, of at least one token.
        slot: Slot of its adapter.
        seed: Its random seed.
        max_new_tokens: Largest number of tokens to generate; 0: only the prompt runs.
        temperature, top_p, top_k: See `choose_tokens`.
        end_ids: Tokens that end the sequence.
        num_until_stop: Given the tokens so far, and how many of them were given before,
            returns the number of tokens that end the text because of a stop text; None:
            nothing ends it.
        num_top: How many of the most likely tokens to score in the place of each token
            of the prompt, beside that token; None: the prompt is not scored.
    """

    token_ids: Int32[np.ndarray, " T"]
    slot: int
    seed: int
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    end_ids: frozenset[int] | tuple[int, ...] = ()
    num_until_stop: Callable[[Sequence[int], int], int | None] | None = None
    num_top: int | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Answer:
    """The tokens that were generated for a request so far.

    Attributes:
        token_ids: The tokens, including one that ends the sequence.
        logprobs: Log probability of each token, in nats, as the model gives it.
        finish_reason: Why it has ended; None: it has not.
        scores: Scores of the parts of the prompt, if it is scored.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    scores: list[Scores] = dataclasses.field(default_factory=list)

    def extend(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Adds tokens, and ends the answer where it ends first."""
        before = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        ends: list[tuple[int, FinishReason]] = []
        if request.num_until_stop is not None:
            num = request.num_until_stop(self.token_ids, before)
            if num is not None:
                ends.append((num, "stop_sequence"))
        for num, token in enumerate(token_ids, before + 1):
            if token in request.end_ids:
                ends.append((num, "eos_token"))
                break
        if len(self.token_ids) >= request.max_new_tokens:
            ends.append((request.max_new_tokens, "length"))
        if ends:
            num, self.finish_reason = min(ends, key=lambda end: end[0])
            del self.token_ids[num:], self.logprobs[num:]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A sequence in a row of a batch."""

    request: Request
    answer: Answer


class Batch:
    """Rows for sequences whose tokens are generated together.

    Prompts are padded at their end, and generated tokens take the place of the padding.

    Attributes:
        decoder: The decoder. Another one may take its place whose slots have other
            adapters.
        shape: The shape.
    """

    def __init__(self, decoder: LoadedDecoder, shape: BatchShape):
        """Makes empty rows, and compiles what runs them.

        Args:
            decoder: The decoder.
            shape: The shape.
        """
        self.decoder, self.shape = decoder, shape
        self._programs = decoder.programs
        prepared = self.prepare(decoder, shape)
        announce(prepared)
        decoder.weights()  # they may be loaded beside
        with counting(prepared):
            finish(prepared)
        self._state = self._programs.empty(shape.num_rows, shape.cache_tokens)
        self._rows: list[_Row | None] = [None] * shape.num_rows
        self._parts: deque[Callable[[], None]] = deque()
        self._queued: tuple[list[_Row | None], list[jax.Array]] | None = None
        self._scored: list[tuple[list[_Row | None], np.ndarray, Scores]] = []

    @staticmethod
    def of(
        decoder: LoadedDecoder,
        requests: Sequence[Request],
        shape: BatchShape | None = None,
    ) -> "Batch":
        """Makes a batch of sequences that begin together, and runs their prompts.

        Args:
            decoder: The decoder.
            requests: The prompts.
            shape: Shape of the batch, at least as large as the requests need; None: the
                smallest one.
        """
        if shape is None:
            longest = max(len(request.token_ids) for request in requests)
            most = max(request.max_new_tokens for request in requests)
            shape = batch_shape(len(requests), longest, most)
        batch = Batch(decoder, shape)
        batch.join([[request] for request in requests])
        while batch.runs_prompts:
            batch.queue()
        return batch

    @staticmethod
    def prepare(
        decoder: LoadedDecoder, shape: BatchShape, num_top: int | None = None
    ) -> list[Prepared]:
        """Starts to compile what runs a batch, side by side; on a mesh, nothing.

        Args:
            decoder: The decoder.
            shape: The shape.
            num_top: See `Request`.
        """
        programs = decoder.programs
        if programs.is_on_mesh:
            return []
        empty = functools.partial(programs.empty, shape.num_rows, shape.cache_tokens)
        given = jax.eval_shape(empty), decoder.weights(wait=False)
        rows, num = _sequences([None] * shape.num_rows), np.int32(0)
        prompts, numbers, prepared = rows, None, []
        if shape.prompt_rows is not None:
            prompts = _sequences([None] * shape.prompt_rows)
            numbers = np.zeros(shape.prompt_rows, np.int32)
            prepared.append(programs.repeat.prepare(given[0], num, rows.slots))
        ids = np.zeros((len(prompts.slots), shape.part_tokens), np.int32)
        prompts = *given, prompts, ids, ids[:, 0], numbers
        prepared.append(programs.prefill.prepare(*prompts))
        prepared.append(programs.decode.prepare(*given, rows, num))
        if num_top is not None:
            prepared.append(programs.scorer(num_top).prepare(*prompts, ids))
        return prepared

    # ---- rows ------------------------------------------------------------------------

    @property
    def answers(self) -> list[Answer]:
        """The tokens so far of the sequences in the rows, in the order of these."""
        return [row.answer for row in self._rows if row is not None]

    @property
    def logits(self) -> Float32[np.ndarray, "B V"]:
        """The logits of each sequence's next token, in the order of the rows."""
        logits = jax.device_get(self._state.logits)
        return logits[[row is not None for row in self._rows]]

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason for answer in self.answers)

    @property
    def runs_prompts(self) -> bool:
        """Whether parts of prompts are left to run."""
        return bool(self._parts)

    @property
    def num_free(self) -> int:
        """Number of rows without a sequence that has not ended."""
        return self.shape.num_rows - sum(self._is_taken(row) for row in self._rows)

    @staticmethod
    def _is_taken(row: _Row | None) -> bool:
        return row is not None and row.answer.finish_reason is None

    def join(self, prompts: Sequence[Sequence[Request]]) -> list[list[Answer]]:
        """Gives rows that are free to further sequences, whose prompts run next.

        Args:
            prompts: For each prompt its requests, which may differ in how tokens are
                chosen. Of several, the first one alone runs the prompt, and may be
                scored. Either all prompts are scored, with equal `num_top`, or none.

        Returns:
            The answers, which fill up as the batch runs.
        """
        free = (i for i, row in enumerate(self._rows) if not self._is_taken(row))
        found = []
        for some in itertools.batched(prompts, self.shape.prompt_rows or len(prompts)):
            taken = [[next(free) for _ in requests] for requests in some]
            for requests, own in zip(some, taken, strict=True):
                found.append([Answer() for _ in own])
                for i, request, answer in zip(own, requests, found[-1], strict=True):
                    self._rows[i] = _Row(request=request, answer=answer)
            self._parts.extend(self._parts_of(taken))
        return found

    def cancel(self, answer: Answer) -> None:
        """Ends an answer at once, so that its row is free."""
        answer.finish_reason = answer.finish_reason or "length"

    # ---- work ------------------------------------------------------------------------

    def _parts_of(self, taken: Sequence[Sequence[int]]) -> Iterator[Callable[[], None]]:
        """Yields what runs prompts in parts; the last part copies them to other rows.

        Args:
            taken: The rows of each prompt, the first of which runs it.
        """
        first = [own[0] for own in taken]
        if self.shape.prompt_rows is None:
            numbers, some = None, self._rows[:]
        else:
            numbers = np.full(self.shape.prompt_rows, self.shape.num_rows, np.int32)
            numbers[: len(first)] = first
            some = [self._rows[i] for i in first]
            some += [None] * (len(numbers) - len(first))
        longest = max(len(row.request.token_ids) for row in some if row is not None)
        *starts, last = range(0, longest, self.shape.part_tokens)
        for start in starts:
            yield functools.partial(self._run_part, some, numbers, start)
        # By the last part, the rows of sequences that were cancelled may have others.
        others = [row for own in taken for i in own[1:] if (row := self._rows[i])]
        given = some, numbers, last, taken, others
        yield functools.partial(self._run_last_part, *given)

    def _run_part(
        self, rows: list[_Row | None], numbers: np.ndarray | None, start: int
    ) -> None:
        """Queues a part of prompts.

        Args:
            rows: The sequences.
            numbers: Their rows; None: they are all rows.
            start: Number of the part's first token.
        """
        size = self.shape.part_tokens
        ids = np.zeros((2, len(rows), size), np.int32)  # and those after each
        place, num_new, num_top = *np.zeros((2, len(rows)), np.int32), None
        for i, row in enumerate(rows):
            if row is None:
                continue
            for shift in (0, 1):
                part = row.request.token_ids[start + shift : start + shift + size]
                ids[shift, i, : len(part)] = part
            length = len(row.request.token_ids)
            place[i], num_new[i] = min(start, length), np.clip(length - start, 0, size)
            num_top = row.request.num_top
            if row.request.max_new_tokens == 0 and start + size >= length:
                row.answer.finish_reason = "length"
        sequences: Any = _sequences(rows)
        sequences = sequences._replace(place=place)
        given = self._state, self.decoder.weights(), sequences, ids[0], num_new, numbers
        if num_top is None:
            self._state = self._programs.prefill(*given)
            return
        score = self._programs.scorer(num_top)
        self._state, scores = score(*given, ids[1])
        self._scored.append((rows, num_new, scores))

    def _run_last_part(
        self,
        rows: list[_Row | None],
        numbers: np.ndarray | None,
        start: int,
        taken: Sequence[Sequence[int]],
        others: Sequence[_Row],
    ) -> None:
        """Queues the last part of prompts, and their copies.

        Args:
            rows, numbers, start: See `_run_part`.
            taken: See `_parts_of`.
            others: The sequences that get copies.
        """
        self._run_part(rows, numbers, start)
        for row, *copies in taken:
            if copies:
                self._repeat(row, copies)
        for other in others:
            if other.request.max_new_tokens == 0:
                self.cancel(other.answer)

    def _repeat(self, row: int, others: Sequence[int]) -> None:
        """Queues copies of a prompt."""
        padded = np.full(self.shape.num_rows, self.shape.num_rows, np.int32)
        padded[: len(others)] = others
        self._state = self._programs.repeat(self._state, np.int32(row), padded)

    def advance(self, num_steps: int = MAX_STEPS) -> None:
        """Runs the next part of prompts, or generates up to so many more tokens."""
        self.queue(num_steps)
        self.settle()

    def queue(self, num_steps: int = MAX_STEPS) -> int:
        """Queues the next part of prompts, or up to so many tokens of each sequence.

        Nothing may be queued that is not settled, except for parts of prompts.

        Returns:
            Number of tokens of each sequence that are queued.
        """
        if self._parts:
            self._parts.popleft()()
            return 0
        assert self._queued is None
        rows = [row if self._is_taken(row) else None for row in self._rows]
        left = max(
            row.request.max_new_tokens - len(row.answer.token_ids)
            for row in rows
            if row is not None
        )
        num_steps = min(num_steps, MAX_STEPS, left)
        self._state, *made = self._programs.decode(
            self._state,
            self.decoder.weights(),
            _sequences(rows),
            np.int32(num_steps),
        )
        self._queued = rows, made
        return num_steps

    def settle(self) -> None:
        """Waits for what is queued, and takes its tokens and scores."""
        for sequences, num_new, scores in self._scored:
            own = jax.device_get(scores)
            for i, row in enumerate(sequences):
                if row is not None:
                    part = Scores(*(x[i, : num_new[i]] for x in own))
                    row.answer.scores.append(part)
        self._scored.clear()
        if self._queued is None:
            jax.block_until_ready(self._state.logits)
            return
        rows, made = self._queued
        token_ids, logprobs = jax.device_get(made)
        self._queued = None
        for i, row in enumerate(rows):
            if row is not None and row.answer.finish_reason is None:
                num = int((token_ids[i] != NO_TOKEN).sum())
                row.answer.extend(
                    row.request, token_ids[i, :num].tolist(), logprobs[i, :num].tolist()
                )


def _sequences(rows: Sequence[_Row | None]) -> Sequences:
    """Returns the sequences in some rows as the programs take them."""
    num = len(rows)
    ints = np.zeros((5, num), np.int32)
    floats = np.ones((2, num), np.float32)
    is_done, end_ids = np.ones(num, bool), np.full((num, _END_IDS), NO_TOKEN)
    for i, row in enumerate(rows):
        if row is None:
            continue
        request, step = row.request, len(row.answer.token_ids)
        place = len(request.token_ids) + step
        ints[:, i] = request.slot, place, step, request.seed, request.top_k
        floats[:, i] = request.temperature, request.top_p
        is_done[i] = row.answer.finish_reason is not None
        known = [*itertools.islice(request.end_ids, _END_IDS)]
        end_ids[i, : len(known)] = known
    slots, place, step, seeds, top_k = ints
    temperature, top_p = floats
    sequences: Any = Sequences  # with arrays of the host
    return sequences(
        slots=slots,
        place=place,
        step=step,
        is_done=is_done,
        seeds=seeds,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        end_ids=end_ids.astype(np.int32),
    )
