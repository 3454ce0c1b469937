"""Generates the tokens of one batch of prompts, a few steps at a time."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.generate.choose_token import method_of
from jaxlora.generate.loaded import LoadedDecoder
from jaxlora.generate.programs import MAX_STEPS, NO_TOKEN, Sampling, Sequences
from jaxlora.generate.prompt import FinishReason
from jaxlora.programs.program import announce, counting, finish

_END_IDS_MULTIPLE = 8
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
        part_tokens: Tokens of each prompt that one call of `prefill` runs.
        prompt_tokens: Tokens of each prompt with its padding; a multiple of
            `part_tokens`.
        cache_tokens: Tokens of each sequence that the cache holds.
    """

    num_rows: int
    part_tokens: int
    prompt_tokens: int
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
        prompt_tokens=prompt_tokens,
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
    """A prompt as tokens.

    Attributes:
        token_ids: The prompt, of at least one token.
        slot: Slot of its adapter.
        seed: Its random seed.
        max_new_tokens: Largest number of tokens to generate.
        num_until_stop: Given the tokens so far, and how many of them were given before,
            returns the number of tokens that end the text because of a stop text; None:
            nothing ends it.
    """

    token_ids: Int32[np.ndarray, " T"]
    slot: int
    seed: int
    max_new_tokens: int
    num_until_stop: Callable[[Sequence[int], int], int | None] | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Answer:
    """The tokens that were generated for a request so far.

    Attributes:
        token_ids: The tokens, including one that ends the sequence.
        logprobs: Log probability of each token, in nats, as the model gives it.
        finish_reason: Why it has ended; None: it has not.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        end_ids: Collection[int],
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
        if self.token_ids and self.token_ids[-1] in end_ids:
            ends.append((len(self.token_ids), "eos_token"))
        if len(self.token_ids) >= request.max_new_tokens:
            ends.append((request.max_new_tokens, "length"))
        if ends:
            num, self.finish_reason = min(ends, key=lambda end: end[0])
            del self.token_ids[num:], self.logprobs[num:]


class Batch:
    """A batch of prompts whose tokens are generated together.

    Prompts are padded in front, so that all of them end at the same place.

    Attributes:
        answers: The tokens so far, in the order of the requests.
    """

    def __init__(
        self,
        decoder: LoadedDecoder,
        requests: Sequence[Request],
        settings: GenerationSettings,
        end_ids: Sequence[int],
        shape: BatchShape | None = None,
    ):
        """Runs the prompts; no token is generated yet.

        Args:
            decoder: The decoder.
            requests: The prompts.
            settings: How tokens are chosen. Length, stop texts and seed are those of
                the requests.
            end_ids: Tokens that end a sequence.
            shape: Shape of the batch, at least as large as the requests need; None: the
                smallest one.
        """
        self.answers = [Answer() for _ in requests]
        self._requests, self._end_ids = requests, frozenset(end_ids)
        self._programs = decoder.programs
        self._method = method_of(settings.temperature, settings.top_p)
        self._sampling = Sampling(
            temperature=jnp.float32(settings.temperature),
            top_p=jnp.float32(settings.top_p),
            end_ids=_padded(end_ids),
            num_steps=jnp.int32(MAX_STEPS),
        )
        self._run_prompts(decoder, shape or _smallest_shape(requests))

    def _run_prompts(self, decoder: LoadedDecoder, shape: BatchShape) -> None:
        token_ids = np.zeros((shape.num_rows, shape.prompt_tokens), np.int32)
        starts = np.full(shape.num_rows, shape.prompt_tokens, np.int32)
        slots, seeds = np.zeros((2, shape.num_rows), np.int32)
        for i, request in enumerate(self._requests):
            starts[i] -= len(request.token_ids)
            token_ids[i, starts[i] :] = request.token_ids
            slots[i], seeds[i] = request.slot, request.seed
        self._sequences = Sequences(*map(jnp.asarray, (starts, slots, seeds)))
        programs = self._programs
        state = programs.empty(shape.num_rows, shape.cache_tokens)
        parts = range(0, shape.prompt_tokens, shape.part_tokens)
        ids = [jnp.asarray(token_ids[:, i : i + shape.part_tokens]) for i in parts]
        args = state, decoder.weights(wait=False), self._sequences
        is_done = jnp.zeros(shape.num_rows, bool)
        # They are compiled side by side, and while the base is loaded.
        own = ids[0], self._sampling, is_done, self._method
        prepared = programs.prepare(*args, *own)
        announce(prepared)
        self._weights = decoder.weights()
        with counting(prepared):
            finish(prepared)
        for part in ids:
            state = programs.prefill(state, self._weights, self._sequences, part)
        self._state = state

    @property
    def logits(self) -> Float32[np.ndarray, "B V"]:
        """The logits of each sequence's next token."""
        return jax.device_get(self._state.logits)[: len(self.answers)]

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason for answer in self.answers)

    def advance(self, num_steps: int = MAX_STEPS) -> None:
        """Generates up to so many more tokens of each sequence that has not ended."""
        left = max(
            request.max_new_tokens - len(answer.token_ids)
            for request, answer in zip(self._requests, self.answers, strict=True)
            if answer.finish_reason is None
        )
        num_steps = min(num_steps, MAX_STEPS, left)
        is_done = np.ones(len(self._sequences.slots), bool)
        for i, answer in enumerate(self.answers):
            is_done[i] = answer.finish_reason is not None
        self._state, *made = self._programs.decode[self._method](
            self._state,
            self._weights,
            self._sequences,
            self._sampling._replace(num_steps=jnp.int32(num_steps)),
            jnp.asarray(is_done),
        )
        token_ids, logprobs = jax.device_get(made)
        for i, (request, answer) in enumerate(
            zip(self._requests, self.answers, strict=True)
        ):
            if answer.finish_reason is None:
                num = int((token_ids[i] != NO_TOKEN).sum())
                answer.extend(
                    request,
                    token_ids[i, :num].tolist(),
                    logprobs[i, :num].tolist(),
                    self._end_ids,
                )


def _smallest_shape(requests: Sequence[Request]) -> BatchShape:
    longest = max(len(request.token_ids) for request in requests)
    return batch_shape(len(requests), longest, max(r.max_new_tokens for r in requests))


def _padded(end_ids: Sequence[int]) -> Int32[Array, " N"]:
    size = -(-max(len(end_ids), 1) // _END_IDS_MULTIPLE) * _END_IDS_MULTIPLE
    padded = np.full(size, NO_TOKEN, np.int32)
    padded[: len(end_ids)] = end_ids
    return jnp.asarray(padded)
