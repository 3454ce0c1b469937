"""Sampling for many clients: calls of many published versions share decode steps."""

import collections
import dataclasses
import functools
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.common.job_name import BASE
from jaxlora.config.session_config import LEAST_PARTS, SamplingConfig
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.errors import ConfigError, DeviceError, StorageError
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.api import generation_settings
from jaxlora.generate.batch import Answer, Batch, BatchShape, Request
from jaxlora.generate.generator import end_ids
from jaxlora.generate.loaded import NO_ADAPTER
from jaxlora.generate.programs import MOST_TOP_TOKENS
from jaxlora.models.config import ModelConfig
from jaxlora.plan.memory.device_memory import format_bytes
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.programs.program import Prepared
from jaxlora.session.engine import Engine
from jaxlora.session.prompt_turns import Beginner, PromptTurns
from jaxlora.session.published import Published, Version
from jaxlora.session.sampler import (
    Completion,
    check_prompt_ids,
    completion_of,
    seed_of_sample,
)

logger = logging.getLogger(__name__)

_PROMPT_ROWS = 4  # prompts that run at once
_LEAST_ROWS = 2
_MOST_CACHE = 65536  # tokens that `auto` takes at most,
_CACHE_SHARE = 0.7  # of what there is memory for
_PIECE_SECONDS = 0.15  # of decoding, between two looks at other work
_LOOK_SECONDS = 0.02
_MOST_CREDIT, _MOST_AHEAD = 0.5, 0.1  # in seconds of sampling that training owes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampleCall:
    """A call for samples after one prompt.

    Attributes:
        version: Name of the published version, or `base`.
        prompt: Tokens of the prompt, of which there is at least one.
        num_samples: Number of samples. They differ by their seeds, which follow from
            `seed`.
        max_tokens: Largest number of tokens of a sample. With 0, only log-probabilities
            of the prompt are computed.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_p: Samples from the most likely tokens, whose probabilities add up to this.
        top_k: Samples from so many of the most likely tokens; 0: from all.
        seed: Random seed. Equal calls of a version give equal samples.
        stop_tokens: Tokens that end a sample and are part of it; None: those of the
            tokenizer and the model.
        stop_texts: Texts that end a sample, which ends with the token that completes
            one of them.
        prompt_logprobs: Whether to return log-probabilities of the prompt's tokens.
        topk_prompt_logprobs: Number of the most likely tokens to return for each
            position of the prompt; 0: none.
        tenant: Whose it is. Free rows go to the tenant that has the fewest, divided by
            its weight.
    """

    version: str
    prompt: tuple[int, ...]
    num_samples: int = 1
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int
    stop_tokens: tuple[int, ...] | None = None
    stop_texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    tenant: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of all samples at most."""
        return len(self.prompt) + self.num_samples * self.max_tokens


@runtime_checkable
class TokenRates(Protocol):
    """Tells whose tokens a second are used up."""

    def may_run(self, tenant: str) -> bool:
        """Whether the next sequence of a tenant may begin."""
        ...

    def spend(self, tenant: str, tokens: int) -> None:
        """Counts tokens of a tenant."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampleResult:
    """The samples of a call.

    Attributes:
        completions: The samples.
        prompt_logprobs: For each token of the prompt its log-probability in nats, given
            those before it; None for the first one; None: it was not asked for.
        topk_prompt_logprobs: For each token of the prompt the most likely tokens in its
            place with their log-probabilities, the most likely first; None for the
            first one; None: it was not asked for.
    """

    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[tuple[tuple[int, float], ...] | None, ...] | None = None


# Called in the engine's thread.
OnResult = Callable[[SampleResult], None]
OnError = Callable[[Exception], None]
# With the number of a sample, its new tokens and their log-probabilities.
OnTokens = Callable[[int, Sequence[int], Sequence[float]], None]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Asked:
    """A call that has no result yet.

    Attributes:
        call: The call.
        on_result, on_error: What is called when it is done, or has failed.
        on_tokens: What is called with new tokens of a sample; None: nothing is.
        version: Its version; None: the base.
        end_tokens: Tokens that end its samples.
        max_tokens: Largest number of tokens of a sample.
        cache_tokens: Places in the cache of the rows that its samples take.
        num_sequences: Sequences to generate; samples without tokens are all the same.
        num_begun: Sequences that have begun, or join the rows now.
        answers: The sequences that have begun.
        num_left: Sequences that have not ended.
        scored: The sequence whose prompt is scored for the call.
        num_told: Tokens of each sequence that were told.
    """

    call: SampleCall
    on_result: OnResult
    on_error: OnError
    on_tokens: OnTokens | None
    version: Version | None
    end_tokens: frozenset[int]
    max_tokens: int
    cache_tokens: int
    num_sequences: int
    num_begun: int = 0
    answers: list[Answer] = dataclasses.field(default_factory=list)
    num_left: int = 0
    scored: Answer | None = None
    num_told: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.num_left = self.num_sequences
        self.num_told = [0] * self.num_sequences

    def tell(self) -> None:
        """Tells of the tokens of all its sequences that are new."""
        if self.on_tokens is None:
            return
        for number, answer in enumerate(self.answers):
            before, now = self.num_told[number], len(answer.token_ids)
            if now > before:
                self.num_told[number] = now
                new = answer.token_ids[before:], answer.logprobs[before:]
                self.on_tokens(number, *new)

    @property
    def num_top(self) -> int | None:
        """See `Request.num_top`."""
        call = self.call
        is_scored = call.prompt_logprobs or call.topk_prompt_logprobs
        return call.topk_prompt_logprobs if is_scored else None

    @property
    def prompt(self) -> Beginner:
        """Its prompt, when it begins."""
        return Beginner(self.call.tenant, is_scored_only=not self.call.max_tokens)

    @property
    def line(self) -> "_Line":
        """The line in which it waits."""
        num_top = self.num_top
        has_top = None if num_top is None else bool(num_top)
        return _Line(self.prompt, self.cache_tokens, has_top)

    def result(self) -> SampleResult:
        """Returns the result, when all sequences have ended."""
        call, answers = self.call, self.answers
        if not call.max_tokens:
            answers = answers * call.num_samples
        scores: dict[str, Any] = {}
        if self.scored is not None:
            logprobs, ids, top = (
                np.concatenate(x)[: len(call.prompt) - 1]
                for x in zip(*self.scored.scores, strict=True)
            )
            num = call.topk_prompt_logprobs
            if call.prompt_logprobs:
                scores["prompt_logprobs"] = (None, *logprobs.tolist())
            if num:
                found = zip(ids[:, :num].tolist(), top[:, :num].tolist(), strict=True)
                every = (tuple(zip(*one, strict=True)) for one in found)
                scores["topk_prompt_logprobs"] = (None, *every)
        return SampleResult(
            completions=tuple(completion_of(call.prompt, one) for one in answers),
            **scores,
        )


class _Line(NamedTuple):
    """What calls have in common of which the first one begins first.

    Attributes:
        prompt: Their tenant, and whether they are only scored.
        cache_tokens: Places of their rows.
        has_top: Whether their prompts are scored with likely tokens; None: they are
            not scored.
    """

    prompt: Beginner
    cache_tokens: int
    has_top: bool | None


@dataclasses.dataclass(kw_only=True, eq=False)
class _Lane:
    """Rows of one size of the cache.

    Attributes:
        batch: The rows.
        running: The sequences in them that have not ended, with their calls.
        prompts: Prompts whose parts run.
        step_seconds: Time of a step, as it was measured last.
        part_seconds: Time of a part of prompts, or more, if the host came late to look.
        last_turn: Number of its last piece of work, among those of all lanes.
    """

    batch: Batch
    running: list[tuple[_Asked, Answer]] = dataclasses.field(default_factory=list)
    prompts: set[Beginner] = dataclasses.field(default_factory=set)
    step_seconds: float = _PIECE_SECONDS / 8
    part_seconds: float = math.inf
    last_turn: int = 0

    @property
    def tokens(self) -> int:
        """Places in its cache."""
        return self.batch.shape.num_rows * self.batch.shape.cache_tokens

    @property
    def generating(self) -> set[str]:
        """The tenants whose sequences generate here."""
        calls = [asked.call for asked, _ in self.running]
        return {call.tenant for call in calls if call.max_tokens}


class Samples:
    """Draws samples for calls of published versions, beside training.

    The sequences of all calls share a few batches, and join as rows get free. All that
    decides how a sequence is rounded, which is the shape of its batch and of the parts
    of its prompt, follows from its own call. So a call gives the same samples to the
    bit, whatever runs beside it.

    Attributes:
        published: The published versions.
    """

    def __init__(
        self,
        engine: Engine,
        config: SamplingConfig,
        folder: pathlib.Path | None = None,
        rates: TokenRates | None = None,
    ):
        """Makes the object; programs are compiled, or loaded, when they are needed.

        Args:
            engine: The engine, whose thread alone uses the object.
            config: Settings.
            folder: See `Published`.
            rates: Hold sequences of tenants that have used their tokens a second; None:
                nothing does.
        """
        self.published = Published(
            engine, config.versions, config.file_versions, folder
        )
        self._engine, self._model, self._config = engine, engine.model, config
        self._cache_size = _cache_size(engine, config, self.published)
        self.published.prepare()
        self._rates = rates
        self._asked: dict[SampleCall, _Asked] = {}
        # Those with sequences that have not begun, in their order, with their numbers.
        self._waiting: dict[_Line, collections.OrderedDict[_Asked, int]] = {}
        self._numbers = itertools.count()
        self._lanes: dict[int, _Lane] = {}  # by places of a row
        self._prompt_turns = PromptTurns(_PIECE_SECONDS)
        # By places of a row, and whether prompts are scored, with likely tokens.
        self._prepared: dict[tuple[int, bool | None], list[Prepared]] = {}
        # With the number of tokens, and the seconds when queueing began and ended.
        self._in_flight: tuple[_Lane, int, float, float] | None = None
        self._mark = jax.jit(lambda: jnp.zeros(()))
        self._turns = itertools.count(1)
        self._credit, self._since, self._is_idle = 0.0, 0.0, True

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self._model.folder)
        tokenizer.check_fits(self._model.config.vocab_size)
        return tokenizer

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        return end_ids(self._model, self._tokenizer)

    def prepare(self) -> None:
        """Begins to compile, or load, what short samples need, and returns at once.

        Longer ones, and those with log-probabilities of their prompts, have programs of
        their own.
        """
        self._programs(self._cache_tokens(1, 1), None)

    # ---- calls -----------------------------------------------------------------------

    def submit(
        self,
        call: SampleCall,
        on_result: OnResult,
        on_error: OnError,
        on_tokens: OnTokens | None = None,
    ) -> None:
        """Adds a call.

        Args:
            call: The call.
            on_result: Called with the result.
            on_error: Called with an error of the device or of the disk, in place of a
                result.
            on_tokens: Called with new tokens, all of them before the result.

        Raises:
            ConfigError: There is no such version, or a setting or the prompt cannot be
                used.
        """
        assert call not in self._asked
        _check(call, self._model.config)
        if call.stop_texts:
            assert self._tokenizer  # it is read here, where an error is the call's own
        version = None
        if call.version != BASE:
            version = self.published.version(call.version)
        left = self._model.config.max_positions - len(call.prompt)
        max_tokens = min(call.max_tokens, left)
        ends = self._ends if call.stop_tokens is None else call.stop_tokens
        asked = _Asked(
            call=call,
            on_result=on_result,
            on_error=on_error,
            on_tokens=on_tokens,
            version=version,
            end_tokens=frozenset(ends),
            max_tokens=max_tokens,
            cache_tokens=self._cache_tokens(len(call.prompt), max_tokens),
            num_sequences=call.num_samples if call.max_tokens else 1,
        )
        if version is not None:
            self.published.hold(version)
        self._asked[call] = asked
        line = self._waiting.setdefault(asked.line, collections.OrderedDict())
        line[asked] = next(self._numbers)

    def cancel(self, call: SampleCall) -> None:
        """Ends a call, which gets no result any more; one that is done stays so."""
        if (asked := self._asked.get(call)) is None:
            return
        for lane in self._lanes.values():
            for _, answer in [one for one in lane.running if one[0] is asked]:
                lane.batch.cancel(answer)
                self._end_sequence(lane, asked, answer)
        self._end(asked)

    def _cache_tokens(self, prompt: int, max_tokens: int) -> int:
        """Returns the size of the rows for a sequence, which its own lengths decide.

        Raises:
            ConfigError: The cache cannot hold two rows of this size.
        """
        part = self._config.part_tokens
        rounded = lambda num: -(-num // part) * part
        needed, size = max(rounded(prompt), prompt + max_tokens), 2 * part
        while size < needed:
            size *= 4
        size = min(size, rounded(self._model.config.max_positions))
        if _LEAST_ROWS * size > self._cache_size:
            raise ConfigError(
                f"the prompt and max_tokens={max_tokens} take {needed} places of the "
                f"cache, which are {_LEAST_ROWS} rows of {size}, and it has "
                f"cache_tokens={self._cache_size}. Shorten the prompt, lower "
                "max_tokens, or set cache_tokens when the server starts."
            )
        return size

    def _end_sequence(self, lane: _Lane, asked: _Asked, answer: Answer) -> None:
        lane.running = [one for one in lane.running if one[1] is not answer]
        asked.num_left -= 1
        if self._rates is not None:
            self._rates.spend(asked.call.tenant, len(answer.token_ids))
        if asked.version is not None:
            self.published.unpin(asked.version)

    def _end(self, asked: _Asked) -> None:
        del self._asked[asked.call]
        self._leave_line(asked)
        if asked.version is not None:
            self.published.let_go(asked.version)

    def _leave_line(self, asked: _Asked) -> None:
        """Lets a call wait no more, all of whose sequences have begun or ended."""
        if (line := self._waiting.get(asked.line)) is not None:
            line.pop(asked, None)
            if not line:
                del self._waiting[asked.line]

    # ---- rows ------------------------------------------------------------------------

    def _lane(self, cache_tokens: int, joining: Collection[int] = ()) -> _Lane | None:
        """Returns the lane with rows of this size; None: there is no memory for it yet.

        Lanes without sequences make room for it.

        Args:
            cache_tokens: Places of a row.
            joining: Lanes that sequences are about to join.
        """
        if cache_tokens in self._lanes:
            return self._lanes[cache_tokens]
        shape, most = self._shape(cache_tokens), self._cache_size
        needed = shape.num_rows * cache_tokens
        for size, lane in list(self._lanes.items()):
            is_idle = not lane.running and size not in joining
            if is_idle and self._used_tokens + needed > most:
                del self._lanes[size]
        if self._used_tokens + needed > most:
            return None
        lane = _Lane(batch=Batch(self.published.decoder, shape))
        return self._lanes.setdefault(cache_tokens, lane)

    def _shape(self, cache_tokens: int) -> BatchShape:
        rows = max(self._cache_size // 2 // cache_tokens, _LEAST_ROWS)
        return BatchShape(
            num_rows=min(rows, self._config.rows),
            prompt_rows=_PROMPT_ROWS,
            part_tokens=self._config.part_tokens,
            cache_tokens=cache_tokens,
        )

    def _is_ready(self, asked: _Asked) -> bool:
        """Whether the programs of a call are compiled, which begins if it has not."""
        prepared = self._programs(asked.cache_tokens, asked.num_top)
        return all(one.is_done for one in prepared)

    def _programs(self, cache_tokens: int, num_top: int | None) -> list[Prepared]:
        """Returns the programs of rows of a size; see `Request.num_top`."""
        key = cache_tokens, None if num_top is None else bool(num_top)
        if key not in self._prepared:
            shape = self._shape(cache_tokens)
            prepared = Batch.prepare(self.published.decoder, shape, num_top)
            self._prepared[key] = prepared
        return self._prepared[key]

    @property
    def _used_tokens(self) -> int:
        return sum(lane.tokens for lane in self._lanes.values())

    def _admit(self) -> None:
        """Gives free rows to sequences that wait, those of the least tenant first."""
        weight = self._engine.queue.weight
        running = [one for lane in self._lanes.values() for one in lane.running]
        taken = collections.Counter(asked.call.tenant for asked, _ in running)
        generating = [lane.generating for lane in self._lanes.values()]
        self._prompt_turns.follow(set().union(*generating))
        joining: dict[int, list[_Asked]] = {}
        firsts = {line: next(iter(own.items())) for line, own in self._waiting.items()}

        def order(line: _Line) -> tuple[float, int]:
            tenant = line.prompt.tenant
            return (taken[tenant] + 1) / weight(tenant), firsts[line][1]

        while firsts:
            line = min(firsts, key=order)
            asked, size = firsts[line][0], line.cache_tokens
            if not self._may_begin(asked, joining):
                del firsts[line]
                continue
            if (lane := self._lane(size, joining)) is None:
                break  # nobody overtakes it, so that there is room at some time
            if len(joining.get(size, ())) >= lane.batch.num_free:
                del firsts[line]
                continue
            try:
                is_there = (
                    asked.version is None
                    or self.published.pin(asked.version) is not None
                )
            except StorageError as error:
                # None of its sequences run, as its version is not on the device.
                self._end(asked)
                asked.on_error(error)
            else:
                if not is_there:
                    break
                joining.setdefault(size, []).append(asked)
                taken[asked.call.tenant] += 1
                asked.num_begun += 1
                if asked.num_begun == asked.num_sequences:
                    self._leave_line(asked)
            if (own := self._waiting.get(line)) is None:
                del firsts[line]
            else:
                firsts[line] = next(iter(own.items()))
        for size, every in joining.items():
            self._join(self._lanes[size], every)

    def _may_begin(
        self, asked: _Asked, joining: Mapping[int, Sequence[_Asked]]
    ) -> bool:
        """Whether a sequence may begin now, if there is a row for it.

        Args:
            asked: Its call.
            joining: The calls whose sequences begin now, by the places of their rows.
        """
        if not self._is_ready(asked):
            return False
        if self._rates is not None and not self._rates.may_run(asked.call.tenant):
            return False
        if asked in joining.get(asked.cache_tokens, ()):
            return True  # its prompt runs once for all
        delayed = self._prompt_turns.delayed(asked.prompt)
        if not delayed:
            return True
        # While they delay others, few prompts of a tenant begin at a time.
        every = itertools.chain.from_iterable(joining.values())
        beginning = {one for one in every if one.prompt == asked.prompt}
        lanes = [lane for lane in self._lanes.values() if lane.running]
        if len(beginning) == _PROMPT_ROWS or any(
            asked.prompt in lane.prompts for lane in lanes
        ):
            return False
        return not self._prompt_turns.is_behind(delayed)

    def _join(self, lane: _Lane, every: Sequence[_Asked]) -> None:
        """Begins sequences; those with the same prompt run it once."""
        prompts: dict[Any, list[_Asked]] = {}
        lane.prompts |= {asked.prompt for asked in every}
        for asked in every:
            call = asked.call
            key = asked.num_top, len(call.prompt), call.version, call.prompt
            prompts.setdefault(key, []).append(asked)
        # Prompts of similar length share parts, which so have little padding.
        order = sorted(prompts, key=lambda key: (-1 if key[0] is None else key[0], key))
        for _, some in itertools.groupby(order, key=lambda key: key[0]):
            groups = [prompts[key] for key in some]
            self._spend_prompts(groups)
            requests = [self._requests(group) for group in groups]
            for group, answers in zip(groups, lane.batch.join(requests), strict=True):
                for asked, answer in zip(group, answers, strict=True):
                    asked.answers.append(answer)
                    lane.running.append((asked, answer))
                    if asked.num_top is not None:
                        asked.scored = asked.scored or answers[0]

    def _spend_prompts(self, groups: Sequence[Sequence[_Asked]]) -> None:
        """Counts the tokens of prompts, each for the tenant of its first sequence."""
        if self._rates is not None:
            for first, *_ in groups:
                self._rates.spend(first.call.tenant, len(first.call.prompt))

    def _requests(self, group: Sequence[_Asked]) -> list[Request]:
        """Returns the next requests of calls with the same prompt."""
        numbers: collections.Counter[_Asked] = collections.Counter()
        found = []
        for asked in group:
            number = len(asked.answers) + numbers[asked]
            numbers[asked] += 1
            found.append(self._request(asked, number))
        return found

    def _request(self, asked: _Asked, number: int) -> Request:
        call, until_stop, version = asked.call, None, asked.version
        if call.stop_texts:
            ends = tuple(asked.end_tokens)
            text = AnswerText(self._tokenizer, call.prompt, call.stop_texts, ends)
            until_stop = text.num_until_stop
        slot = NO_ADAPTER if version is None else version.slot
        assert slot is not None
        return Request(
            token_ids=np.array(call.prompt, np.int32),
            slot=slot,
            seed=seed_of_sample(call.seed, number),
            max_new_tokens=asked.max_tokens,
            temperature=call.temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            end_ids=asked.end_tokens,
            num_until_stop=until_stop,
            num_top=asked.num_top,
        )

    # ---- work ------------------------------------------------------------------------

    def turn(self, train: Callable[[], bool]) -> bool:
        """Does a piece of sampling, of training, or of both, by their shares.

        The tokens of a piece that is queued here are taken in the next turn, while the
        device has training to do.

        Args:
            train: Does the next piece of training; returns whether there was any.

        Returns:
            False: nothing was left to do.

        Raises:
            JaxloraError: As `train` does.
        """
        began = time.perf_counter() if self._is_idle else self._since
        try:
            sampled = self._settle()
            if self._credit >= 0:
                sampled += self._queue()
            has_trained = (
                self._in_flight is None or self._credit <= _MOST_AHEAD
            ) and train()
            if not has_trained:
                sampled += self._queue()
        except jax.errors.JaxRuntimeError as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            self._fail(
                f"a device failed while samples were drawn: {reason.rstrip('.')}. If "
                "its memory is full, lower cache_tokens or versions."
            )
            return True
        self._since, share = time.perf_counter(), self._config.share
        trained = max(self._since - began - sampled, 0.0) if has_trained else 0.0
        credit = self._credit + trained * share - sampled * (1 - share)
        self._credit = min(max(credit, -_MOST_CREDIT), _MOST_CREDIT)
        self._is_idle = not has_trained and self._in_flight is None
        if self._is_idle and self._asked:
            time.sleep(_LOOK_SECONDS)  # until a program is compiled
        return not self._is_idle or bool(self._asked)

    def _queue(self) -> float:
        """Queues a part of prompts or a few tokens, unless one is queued already.

        Returns:
            Its seconds so far. A GPU has ended a loop over tokens when it is queued,
            because the host looks at each of them whether all sequences have ended.
        """
        if self._in_flight is not None:
            return 0.0
        self._admit()
        lanes = [lane for lane in self._lanes.values() if lane.running]
        if not lanes:
            return 0.0
        lane = min(lanes, key=self._order)
        lane.last_turn = next(self._turns)
        lane.batch.decoder = self.published.decoder  # versions may have come since
        # It is ready when all is done that was queued before.
        self._mark().block_until_ready()
        began = time.perf_counter()
        steps = lane.batch.queue(max(int(_PIECE_SECONDS / lane.step_seconds), 1))
        seconds = time.perf_counter() - began
        self._in_flight = lane, steps, began, seconds
        return seconds

    def _order(self, lane: _Lane) -> tuple[bool, bool, int]:
        """Orders lanes: late tokens first, then prompts, then lanes by turns."""
        runs_prompts = lane.batch.runs_prompts
        is_late = not runs_prompts and self._prompt_turns.is_behind(lane.generating)
        return not is_late, not runs_prompts, lane.last_turn

    def _settle(self) -> float:
        """Takes the results of the piece that is queued; returns its other seconds."""
        if self._in_flight is None:
            return 0.0
        (lane, steps, queued, before), self._in_flight = self._in_flight, None
        began = time.perf_counter()
        lane.batch.settle()
        now = time.perf_counter()
        seconds = now - began
        if steps:
            lane.step_seconds = max((before + seconds) / steps, 1e-6)
            self._prompt_turns.add_tokens(lane.generating, before + seconds)
        else:
            # The device had nothing else to do when the part was queued, so it took no
            # longer than this, and often less than when training was queued behind it.
            lane.part_seconds = min(lane.part_seconds, now - queued)
            self._prompt_turns.add_prompts(lane.prompts, lane.part_seconds)
            if not lane.batch.runs_prompts:
                lane.prompts.clear()
        for asked in {id(asked): asked for asked, _ in lane.running}.values():
            asked.tell()
        for asked, answer in [one for one in lane.running if one[1].finish_reason]:
            self._end_sequence(lane, asked, answer)
            if not asked.num_left:
                self._end(asked)
                asked.on_result(asked.result())
        return seconds

    def renew(self, engine: Engine) -> None:
        """Goes on with another engine, after an error; calls that wait have failed."""
        self._fail(
            "an error has broken off the work on this call. Send it again.", engine
        )

    def _fail(self, message: str, engine: Engine | None = None) -> None:
        """Ends all calls with an error of the device, and goes on with an engine."""
        self._engine = engine or self._engine
        for lane in self._lanes.values():
            for asked, answer in list(lane.running):
                self._end_sequence(lane, asked, answer)
        self._lanes.clear()
        self._waiting.clear()
        self._in_flight = None
        self.published.renew(self._engine)
        for asked in list(self._asked.values()):
            self._end(asked)
            asked.on_error(DeviceError(message))

    def advance(self) -> bool:
        """Does a piece of sampling; returns False if nothing was left to do."""
        return self.turn(lambda: False)


def _check(call: SampleCall, config: ModelConfig) -> None:
    """Checks a call.

    Raises:
        ConfigError: A setting or the prompt cannot be used.
    """
    generation_settings(
        {
            "temperature": call.temperature,
            "top_p": call.top_p,
            "top_k": call.top_k,
            "stop": call.stop_texts,
        }
    )
    check_prompt_ids(call.prompt, config, is_continued=bool(call.max_tokens))
    for name, value, least, most in (
        ("num_samples", call.num_samples, 1, None),
        ("max_tokens", call.max_tokens, 0, None),
        ("topk_prompt_logprobs", call.topk_prompt_logprobs, 0, MOST_TOP_TOKENS),
    ):
        if value < least or (most is not None and value > most):
            to = "or more" if most is None else f"to {most}"
            raise ConfigError(f"{name}={value} must be {least} {to}.")


def _cache_size(engine: Engine, config: SamplingConfig, published: Published) -> int:
    """Returns how many tokens the caches hold, and logs the memory of sampling.

    Raises:
        ConfigError: There is no memory for them beside the session.
    """
    least = LEAST_PARTS * config.part_tokens
    empty = functools.partial(
        published.programs.empty, _LEAST_ROWS, 2 * config.part_tokens
    )
    of_token = num_bytes(jax.eval_shape(empty).cache) / least
    need = engine.memory_estimate
    versions, most = published.num_bytes, math.inf
    if need.available is not None:
        most = (need.available.num_bytes - need.total_bytes - versions) / of_token
    wanted = config.cache_tokens
    if wanted == "auto":
        # Programs need some of the memory, too.
        wanted = int(min(max(_MOST_CACHE, least), _CACHE_SHARE * most) // least * least)
    said = (
        f"{config.versions} versions {format_bytes(versions)}, and caches of {wanted} "
        f"tokens {format_bytes(wanted * of_token)}"
    )
    if not least <= wanted <= most:
        assert need.available is not None
        raise ConfigError(
            f"sampling needs {said}, at least {least} tokens of them, beside the "
            f"session's {format_bytes(need.total_bytes)}, and there are "
            f"{format_bytes(need.available.num_bytes)}. Lower cache_tokens, "
            "part_tokens or versions of sampling, or slots, rank or microbatch_tokens "
            "of the session."
        )
    logger.info("memory of sampling: %s", said)
    return wanted
