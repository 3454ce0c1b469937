"""Generates text with a base model and adapters that are loaded once."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.files.peft_tables import BaseTables
from jaxlora.adapters.files.tokenizer_copy import ChatTemplate
from jaxlora.common.background import in_background
from jaxlora.common.job_name import BASE
from jaxlora.config.data_config import check_template_kwargs
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.data.templates.chat import ModelChat
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.data.tokenizer_files import model_eos_ids
from jaxlora.device_check import check_device
from jaxlora.errors import ConfigError, DataError
from jaxlora.generate.adapters import Adapters, named_adapters, own_tokenizers
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.batch import Answer, Batch, Request, chat_shape
from jaxlora.generate.loaded import NO_ADAPTER, LoadedDecoder, load_decoder
from jaxlora.generate.prompt import (
    Generation,
    OnePrompt,
    Prompt,
    Prompts,
    as_prompt,
    as_prompts,
    prompt_ids,
)
from jaxlora.hf.load import FrozenModel, OpenedModel, open_model
from jaxlora.models.structure import linear_shapes

_STREAM_STEPS = 4  # tokens between two pieces of text that are streamed


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextDecoder:
    """A decoder with its tokenizer and the names of its slots.

    Attributes:
        decoder: The decoder.
        tokenizer: The model's tokenizer.
        slots: Slot of each adapter, by name, and of `base`.
        end_ids: Tokens that end a text.
        own: Tokenizers of adapters that have their own, by name, and the tokens that
            end their texts.
    """

    decoder: LoadedDecoder
    tokenizer: Tokenizer
    slots: Mapping[str, int]
    end_ids: tuple[int, ...]
    own: Mapping[str, tuple[Tokenizer, tuple[int, ...]]] = MappingProxyType({})

    def generate(
        self, prompts: Sequence[Prompt], settings: GenerationSettings, batch_size: int
    ) -> list[Generation]:
        """Generates a text for each prompt; see `Generator.generate`."""
        encoded = [self._encode(prompt, settings) for prompt in prompts]
        made: dict[int, Generation] = {}
        # Prompts of similar length share a batch, which so has little padding.
        order = sorted(range(len(prompts)), key=lambda i: len(encoded[i][0].token_ids))
        for numbers in itertools.batched(order, batch_size):
            batch = Batch.of(self.decoder, [encoded[i][0] for i in numbers])
            while not batch.is_done:
                batch.advance()
            for i, answer in zip(numbers, batch.answers, strict=True):
                made[i] = _generation(prompts[i], encoded[i][1], answer)
        return [made[i] for i in range(len(prompts))]

    def stream(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[str]:
        """Generates a text, and yields it in pieces; see `Generator.stream`."""
        request, text = self._encode(prompt, settings)
        positions = self.decoder.spec.config.max_positions
        shape = chat_shape(len(request.token_ids), request.max_new_tokens, positions)
        batch = Batch.of(self.decoder, [request], shape)
        done = ""
        (answer,) = batch.answers
        while not batch.is_done:
            batch.advance(_STREAM_STEPS)
            is_last = answer.finish_reason is not None
            now = (text.of if is_last else text.settled)(answer.token_ids)
            if len(now) > len(done):
                yield now[len(done) :]
                done = now

    def _own(self, prompt: Prompt) -> tuple[Tokenizer, tuple[int, ...]]:
        """Returns the tokenizer of a prompt, and the tokens that end its text."""
        return self.own.get(str(prompt.adapter), (self.tokenizer, self.end_ids))

    def _encode(
        self, prompt: Prompt, settings: GenerationSettings
    ) -> tuple[Request, AnswerText]:
        if prompt.adapter not in self.slots:
            raise ConfigError(
                f"a prompt names the adapter {prompt.adapter!r}; there are: "
                f"{', '.join(self.slots)}."
            )
        positions = self.decoder.spec.config.max_positions
        tokenizer, ends = self._own(prompt)
        token_ids = prompt_ids(prompt, tokenizer, positions)
        text = AnswerText(tokenizer, token_ids, settings.stop, ends)
        request = Request(
            token_ids=np.array(token_ids, np.int32),
            slot=self.slots[prompt.adapter],
            seed=settings.seed if prompt.seed is None else prompt.seed,
            max_new_tokens=min(settings.max_new_tokens, positions - len(token_ids)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            end_ids=ends,
            num_until_stop=text.num_until_stop,
        )
        return request, text


def _generation(prompt: Prompt, text: AnswerText, answer: Answer) -> Generation:
    assert answer.finish_reason is not None
    return Generation(
        prompt=prompt,
        text=text.of(answer.token_ids),
        token_ids=tuple(answer.token_ids),
        logprobs=tuple(answer.logprobs),
        finish_reason=answer.finish_reason,
    )


class Generator:
    """Generates text with a base model and adapters, all in the same batches.

    A sample depends on its prompt, adapter, seed and settings, and not on the other
    prompts of its batch, except that a batch of another shape rounds differently.

    Attributes:
        adapters: Names of the adapters.
    """

    def __init__(
        self,
        model: FrozenModel | OpenedModel | str | pathlib.Path,
        adapters: Adapters | None = None,
        *,
        batch_size: int = 16,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        templates: Mapping[str, ChatTemplate] = MappingProxyType({}),
    ):
        """Loads the adapters and the tokenizer; nothing is compiled yet.

        Args:
            model: The base model, on one device; or a folder or hub id. Then it is
                loaded meanwhile, and while the first programs are compiled.
            adapters: PEFT folders or adapters, by name; or folders, which are named
                like the last part of their path.
            batch_size: Most prompts that are generated together.
            chat_template: Template of chats in place of those of the tokenizers, as in
                `DataConfig`. Without it, chats with an adapter have the template in
                its folder, or else that of the base.
            chat_template_kwargs: Values of variables of the template, as in
                `DataConfig`; None: those that each adapter was trained with, and none
                for the base.
            templates: Templates of adapters that are no folders, by name.

        Raises:
            AdapterError: A folder cannot be read, or does not fit the model.
            ConfigError: The model is divided among devices, `batch_size` is below 1,
                an adapter is named `base`, two have the same name, or
                `chat_template_kwargs` cannot be values of a template.
            DataError: There is no such chat template.
            DeviceError: A GPU is visible, and JAX does not use it.
            ModelError: The model or the tokenizer cannot be read.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r} must be at least 1.")
        kwargs = _checked_kwargs(chat_template_kwargs)
        check_device()
        named = {} if adapters is None else named_adapters(adapters)
        self._loading: Future[FrozenModel] = Future()
        if isinstance(model, FrozenModel):
            check_one_device(model, "generation")
            self._loading.set_result(model)
        else:
            model = _opened(model)
            self._loading = in_background(model.load)
        self.adapters = tuple(named)
        self._batch_size = batch_size
        tokenizer = load_tokenizer(model.folder)
        tokenizer.check_fits(model.config.vocab_size)
        loaded = [_read(model, adapter) for adapter in named.values()]
        own = own_tokenizers(model, tokenizer, named, templates)
        for name, adapter in zip(named, loaded, strict=True):
            given = adapter.chat_template_kwargs if kwargs is None else kwargs
            if name in own or given:
                one = own.get(name, tokenizer)
                own[name] = one.with_setting(chat_template, given)
            if kwargs is None and chat_template is not None and given:
                _check_recorded(own[name].chat, name)
        tokenizer = tokenizer.with_setting(chat_template, kwargs or {})
        numbered = enumerate(self.adapters, NO_ADAPTER + 1)
        self._text_decoder = TextDecoder(
            decoder=load_decoder(model, loaded, self._loading),
            tokenizer=tokenizer,
            slots={BASE: NO_ADAPTER, **{name: slot for slot, name in numbered}},
            end_ids=end_ids(model, tokenizer),
            own={name: (one, end_ids(model, one)) for name, one in own.items()},
        )

    @property
    def model(self) -> FrozenModel:
        """The base model; waits until it is loaded."""
        return self._loading.result()

    def generate(
        self,
        prompts: Prompts,
        settings: GenerationSettings | None = None,
        *,
        chat: bool = False,
    ) -> list[Generation]:
        """Generates a text for each prompt.

        Args:
            prompts: One prompt or several: texts, chats or `Prompt`s. One that names no
                adapter is answered by every adapter in turn, or by the base model if
                there are no adapters.
            settings: How tokens are chosen; None: the defaults, which are greedy.
            chat: Whether plain texts are messages of a user, for the chat template.

        Returns:
            The texts, in the order of the prompts, and for each prompt in the order of
            the adapters.

        Raises:
            ConfigError: A prompt is too long or empty, or names an unknown adapter.
            DataError: A chat cannot be answered, or the chat template refuses it.
            ModelError: A prompt is a chat, and the tokenizer has no chat template.
        """
        given = as_prompts(prompts)
        named = [p for prompt in given for p in self._for_adapters(prompt, chat)]
        return self._text_decoder.generate(named, _chosen(settings), self._batch_size)

    def stream(
        self,
        prompt: OnePrompt,
        settings: GenerationSettings | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[str]:
        """Generates a text, and yields it in pieces as it comes.

        The pieces together are the text that `generate` returns. The generation ends
        when the iterator is closed.

        Args:
            prompt: The prompt. It must name an adapter if there are several.
            settings: How tokens are chosen; None: the defaults, which are greedy.
            chat: Whether a plain text is a message of a user, for the chat template.

        Raises:
            JaxloraError: As for `generate`, when the first piece is asked for.
        """
        named, *others = self._for_adapters(as_prompt(prompt), chat)
        if others:
            raise ConfigError(
                "the prompt names no adapter; there are: "
                f"{', '.join(self.adapters)}. Name one of them, or base."
            )
        return self._text_decoder.stream(named, _chosen(settings))

    def _for_adapters(self, prompt: Prompt, chat: bool) -> list[Prompt]:
        """Returns a prompt once for each adapter that answers it."""
        prompt = prompt.as_chat() if chat else prompt
        if prompt.adapter is not None:
            return [prompt]
        names = self.adapters or (BASE,)
        return [dataclasses.replace(prompt, adapter=name) for name in names]


def end_ids(model: FrozenModel | OpenedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a text: the tokenizer's and the model's."""
    own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return tuple(dict.fromkeys([*own, *model_eos_ids(model.folder)]))


def _check_recorded(chat: ModelChat, name: str) -> None:
    """Checks that another template than an adapter's uses its recorded variables."""
    try:
        chat.check_kwargs()
    except DataError as error:
        raise DataError(
            f"{error} The values are those of the training of {name!r}, and "
            "chat_template_kwargs={} (--chat-template-kwargs '{}') leaves them out."
        ) from None


def _checked_kwargs(kwargs: Any) -> dict[str, Any] | None:
    try:
        return None if kwargs is None else check_template_kwargs(kwargs)
    except ValueError as error:
        raise ConfigError(f"chat_template_kwargs: {error}") from None


def check_one_device(model: FrozenModel, what: str) -> None:
    """Refuses a model that is divided among devices.

    Args:
        model: The model.
        what: What runs on one device, for the error.

    Raises:
        ConfigError: It is.
    """
    for array in model.params.values():
        where: Any = array.sharding
        if isinstance(where, NamedSharding) and where.mesh.size > 1:
            raise ConfigError(
                f"the model lies on {where.mesh.size} devices, and {what} runs on "
                "one. Load it with load_model(...) without `place`."
            )


def _opened(model: Any) -> OpenedModel:
    if isinstance(model, OpenedModel):
        return model
    if not isinstance(model, str | pathlib.Path):
        raise ConfigError(
            f"the model is of type {type(model).__name__}. Give what load_model "
            "returned, a folder, or a hub id."
        )
    return open_model(model)


def _chosen(settings: GenerationSettings | None) -> GenerationSettings:
    if not isinstance(settings, GenerationSettings | None):
        raise ConfigError(
            f"the settings are {settings!r:.80}. Give GenerationSettings(...)."
        )
    return settings or GenerationSettings()


def _read(
    model: FrozenModel | OpenedModel, adapter: str | pathlib.Path | Adapter
) -> Adapter:
    if isinstance(adapter, Adapter):
        return adapter
    base = BaseTables(model.folder, model.config.tie_embeddings)
    return import_peft(adapter, linear_shapes(model.config), base=base)
