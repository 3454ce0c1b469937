"""Samples from an immutable copy of an adapter, which later steps do not change."""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.settings_table import SettingsTable
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import ConfigError
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.api import generation_settings
from jaxlora.generate.batch import Answer, Batch, Request
from jaxlora.generate.generator import end_ids
from jaxlora.generate.loaded import NO_ADAPTER, LoadedDecoder, LoadedStage
from jaxlora.generate.prompt import FinishReason, Prompt, errors_in, prompt_ids
from jaxlora.hf.load import FrozenModel
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.session.datum import token_ids
from jaxlora.session.engine import Engine, OpenAdapter

# A text, or token ids.
TokenPrompt = str | Sequence[int] | np.ndarray

_COPY = NO_ADAPTER + 1  # the slot of the copy, beside the empty one of the base
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
                made[i] = _completion(requests[i], answer)
        every = [made[i] for i in range(len(requests))]
        return [list(some) for some in itertools.batched(every, num_samples)]

    def _ids(self, prompt: TokenPrompt) -> list[int]:
        config = self._model.config
        if isinstance(prompt, str):
            return prompt_ids(Prompt(prompt), self._tokenizer(), config.max_positions)
        found = token_ids(prompt)
        ids = [] if found is None else found.tolist()
        if not ids or max(ids) >= config.vocab_size:
            raise ConfigError(
                f"it must be a text, or a list of one token id or more, each from 0 to "
                f"{config.vocab_size - 1}, and is {prompt!r:.60}."
            )
        if len(ids) >= config.max_positions:
            raise ConfigError(
                f"it has {len(ids)} tokens, and the model has positions for "
                f"{config.max_positions} with the completion. Shorten it."
            )
        return ids

    def _request(
        self,
        ids: list[int],
        settings: GenerationSettings,
        number: int,
        end_tokens: Sequence[int],
    ) -> Request:
        seed = settings.seed
        if number:  # of the further samples; a sum would meet those of the next seed
            seed = zlib.crc32(f"{seed} {number}".encode()) >> 1
        until_stop = None
        if settings.stop:
            tokenizer = self._tokenizer()
            text = AnswerText(tokenizer, ids, settings.stop, tuple(end_tokens))
            until_stop = text.num_until_stop
        left = self._model.config.max_positions - len(ids)
        return Request(
            token_ids=np.array(ids, np.int32),
            slot=self._slot,
            seed=seed,
            max_new_tokens=min(settings.max_new_tokens, left),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            end_ids=tuple(end_tokens),
            num_until_stop=until_stop,
        )


def _completion(request: Request, answer: Answer) -> Completion:
    assert answer.finish_reason is not None
    return Completion(
        prompt=tuple(request.token_ids.tolist()),
        tokens=tuple(answer.token_ids),
        logprobs=tuple(answer.logprobs),
        finish_reason=answer.finish_reason,
    )


def publish(
    engine: Engine, one: OpenAdapter, tokenizer: Callable[[], Tokenizer]
) -> Sampler:
    """Copies an adapter's weights on the device, for a sampler.

    Matrices are rounded to the model's dtype, as training does for its products.

    Args:
        engine: The engine.
        one: The adapter, without calls that wait, or the base.
        tokenizer: See `Sampler`.
    """
    spec = _sampling_spec(engine.spec)
    settings = SettingsTable(spec)
    settings.set({_COPY: one.like})
    slot = NO_ADAPTER if one is engine.base else _COPY
    stage = LoadedStage(
        spec=spec,
        base=engine.model.params,
        adapters=_copier(engine.spec)(engine.table.weights, np.int32(one.slot)),
        settings=settings.settings,
    )
    decoder = LoadedDecoder(stages=(stage,))
    return Sampler(decoder, slot, engine.model, tokenizer)


@functools.lru_cache(maxsize=16)
def _copier(spec: DecoderSpec) -> Any:
    """Returns a program that copies a slot beside an empty one."""

    def copy(weights: Any, slot: jax.Array) -> Any:
        found = {}
        for name, table in weights.items():
            dtype = spec.options.dtype if tensor_of(name).is_matrix else table.dtype
            own = table[slot].astype(dtype)
            found[name] = jnp.stack([jnp.zeros_like(own), own])
        return found

    return jax.jit(copy)


def _sampling_spec(spec: DecoderSpec) -> DecoderSpec:
    """Returns the decoder that generates, for all adapters of a session."""
    assert spec.slots is not None
    options = DecoderOptions(
        dtype=spec.options.dtype,
        base_format=spec.options.base_format,
        max_segment_tokens=1,
    )
    slots = dataclasses.replace(spec.slots, num_slots=_COPY + 1)
    return dataclasses.replace(spec, options=options, slots=slots)
