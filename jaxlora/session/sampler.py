"""Samples from an immutable copy of an adapter, which later steps do not change."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import ConfigError
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.api import generation_settings
from jaxlora.generate.batch import Answer, Batch, Request
from jaxlora.generate.generator import end_ids
from jaxlora.generate.loaded import NO_ADAPTER, LoadedDecoder
from jaxlora.generate.prompt import FinishReason, Prompt, errors_in, prompt_ids
from jaxlora.hf.load import FrozenModel
from jaxlora.models.config import ModelConfig
from jaxlora.session.datum import token_ids
from jaxlora.session.engine import Engine, OpenAdapter
from jaxlora.session.published import Published

# A text, or token ids.
TokenPrompt = str | Sequence[int] | np.ndarray

_MOST_ROWS = 32  # sequences that are generated together


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Tokens that were sampled after a prompt.

    Attributes:
        prompt: The tokens of the prompt.
        tokens: The sampled tokens, including one that ended the completion.
        logprobs: Log-probability of each of them in nats, as the model gives it before
            temperature and top-p.
        finish_reason: `eos_token`, `stop_sequence`, or `length`.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Sampler:
    """Generates with a copy of an adapter."""

    def __init__(
        self,
        decoder: LoadedDecoder,
        slot: int,
        model: FrozenModel,
        tokenizer: Callable[[], Tokenizer],
    ):
        """Makes a sampler; see `Session.publish`.

        Args:
            decoder: A decoder with the copy.
            slot: The slot of the copy.
            model: The base model.
            tokenizer: Returns the model's tokenizer, which is read when texts are
                given or the tokens that end a completion are not.
        """
        self._decoder, self._slot = decoder, slot
        self._model, self._tokenizer = model, tokenizer

    def sample(
        self,
        prompts: Sequence[TokenPrompt],
        *,
        num_samples: int = 1,
        end_tokens: Sequence[int] | None = None,
        **settings: Any,
    ) -> list[list[Completion]]:
        """Samples completions of prompts.

        Args:
            prompts: Texts, or lists of token ids.
            num_samples: Completions of each prompt. They differ by their seed, which
                follows from that of the settings.
            end_tokens: Tokens that end a completion; None: those of the tokenizer and
                the model.
            **settings: Fields of `GenerationSettings`, such as `temperature`, which is
                0 (greedy) if it is left out.

        Returns:
            For each prompt, its completions.

        Raises:
            JaxloraError: A setting or a prompt cannot be used.
        """
        chosen = generation_settings(settings)
        if isinstance(prompts, str):
            raise ConfigError(f"prompts={prompts!r:.60} is one text. Give a list.")
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ConfigError(
                f"num_samples={num_samples!r} must be a whole number, 1 or more."
            )
        if end_tokens is None:
            end_tokens = end_ids(self._model, self._tokenizer())
        elif (ids := token_ids(end_tokens)) is None:
            raise ConfigError(
                f"end_tokens={end_tokens!r:.60} must be a list of token ids, which may "
                "be empty."
            )
        else:
            end_tokens = ids.tolist()
        requests = []
        for number, prompt in enumerate(prompts):
            with errors_in(f"prompt {number + 1}"):
                ids = self._ids(prompt)
            for i in range(num_samples):
                requests.append(self._request(ids, chosen, i, end_tokens))
        # Prompts of similar length share a batch, which so has little padding.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
        made: dict[int, Completion] = {}
        for numbers in itertools.batched(order, _MOST_ROWS):
            some = [requests[i] for i in numbers]
            batch = Batch.of(self._decoder, some)
            while not batch.is_done:
                batch.advance()
            for i, answer in zip(numbers, batch.answers, strict=True):
                made[i] = completion_of(requests[i].token_ids.tolist(), answer)
        every = [made[i] for i in range(len(requests))]
        return [list(some) for some in itertools.batched(every, num_samples)]

    def _ids(self, prompt: TokenPrompt) -> list[int]:
        config = self._model.config
        if isinstance(prompt, str):
            return prompt_ids(Prompt(prompt), self._tokenizer(), config.max_positions)
        return check_prompt_ids(prompt, config)

    def _request(
        self,
        ids: list[int],
        settings: GenerationSettings,
        number: int,
        end_tokens: Sequence[int],
    ) -> Request:
        until_stop = None
        if settings.stop:
            tokenizer = self._tokenizer()
            text = AnswerText(tokenizer, ids, settings.stop, tuple(end_tokens))
            until_stop = text.num_until_stop
        left = self._model.config.max_positions - len(ids)
        return Request(
            token_ids=np.array(ids, np.int32),
            slot=self._slot,
            seed=seed_of_sample(settings.seed, number),
            max_new_tokens=min(settings.max_new_tokens, left),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            end_ids=tuple(end_tokens),
            num_until_stop=until_stop,
        )


def seed_of_sample(seed: int, number: int) -> int:
    """Returns the seed of one of the samples of a prompt, from 0 to 2^31 - 1."""
    if number:  # a sum would meet the samples of the next seed
        return zlib.crc32(f"{seed} {number}".encode()) >> 1
    return seed & (2**31 - 1)


def check_prompt_ids(
    prompt: Any, config: ModelConfig, *, is_continued: bool = True
) -> list[int]:
    """Returns the tokens of a prompt.

    Args:
        prompt: The tokens.
        config: The model.
        is_continued: Whether tokens are generated after it.

    Raises:
        ConfigError: They are no tokens of the model, or too many.
    """
    found = token_ids(prompt)
    ids = [] if found is None else found.tolist()
    if not ids or max(ids) >= config.vocab_size:
        raise ConfigError(
            f"it must be a text, or a list of one token id or more, each from 0 to "
            f"{config.vocab_size - 1}, and is {prompt!r:.60}."
        )
    if len(ids) + is_continued > config.max_positions:
        raise ConfigError(
            f"it has {len(ids)} tokens, and the model has positions for "
            f"{config.max_positions} with the completion. Shorten it."
        )
    return ids


def completion_of(prompt: Sequence[int], answer: Answer) -> Completion:
    """Returns an answer that has ended as a completion of its prompt."""
    assert answer.finish_reason is not None
    return Completion(
        prompt=tuple(prompt),
        tokens=tuple(answer.token_ids),
        logprobs=tuple(answer.logprobs),
        finish_reason=answer.finish_reason,
    )


def publish(
    engine: Engine, one: OpenAdapter, tokenizer: Callable[[], Tokenizer]
) -> Sampler:
    """Copies an adapter's weights on the device, for a sampler.

    Args:
        engine: The engine.
        one: The adapter, without calls that wait, or the base.
        tokenizer: See `Sampler`.
    """
    published, slot = Published(engine, 1), NO_ADAPTER
    if one is not engine.base:
        published.publish(one.name, one)
        slot = published.pin(published.version(one.name))
        assert slot is not None
    return Sampler(published.decoder, slot, engine.model, tokenizer)
