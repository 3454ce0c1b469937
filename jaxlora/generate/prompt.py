"""Prompts of generation, and its results."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxlora.common.counted import counted
from jaxlora.config.generation_settings import SamplesConfig
from jaxlora.data.records.messages import read_messages
from jaxlora.data.records.values import check_text
from jaxlora.data.templates.chat import ModelChat
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import ConfigError, DataError, JaxloraError
from jaxlora.models.config import ModelConfig

FinishReason = Literal["eos_token", "stop_sequence", "length"]
Message = Mapping[str, Any]  # {role, content}, as chat templates take them

_SYSTEM_ROLES = ("system", "developer")


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and what answers it.

    Attributes:
        text: The text to continue, or the messages of a chat to answer, in any form
            that training data may have: {role, content} or {from, value}, with a text
            or a list of text parts. They are kept as {role, content} with a text.
        adapter: Name of the adapter that answers; `base`: the base model; None: every
            adapter in turn, or the base model if there are none.
        seed: Random seed of the samples; None: the seed of the settings.
        tools: Tools that the chat template shows to the model; None: there are none.

    Raises:
        ConfigError: A field is of a wrong type, or the seed is not from 0 to 2**31 - 1.
        DataError: The messages are none, or their last one is the assistant's own.
    """

    text: str | Sequence[Message]
    adapter: str | None = None
    seed: int | None = None
    tools: Sequence[Any] | None = None

    def __post_init__(self):
        if isinstance(self.text, str):
            check_text(self.text, "the prompt")
        else:
            object.__setattr__(self, "text", tuple(_read_question(self.text)))
        if not isinstance(self.adapter, str | None):
            raise ConfigError(
                f"a prompt has adapter={self.adapter!r:.80}; give the name of an "
                "adapter."
            )
        if not isinstance(self.tools, list | tuple | None):
            raise ConfigError(
                f"a prompt has tools={self.tools!r:.80}; give a list of tools."
            )
        is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (is_integer and 0 <= self.seed < 2**31):
            raise ConfigError(
                f"a prompt has seed={self.seed!r:.80}; give an integer from 0 to "
                "2147483647."
            )

    def as_chat(self, system: str | None = None) -> "Prompt":
        """Returns a plain text as the message of a user; a chat stays as it is.

        Args:
            system: System message before it; None: no other one than that of a chat.

        Raises:
            ConfigError: There is a second system message.
        """
        messages = self.text
        if isinstance(messages, str):
            messages = ({"role": "user", "content": messages},)
        if system is not None:
            if messages[0]["role"] in _SYSTEM_ROLES:
                raise ConfigError(
                    f"a chat has a system message ({messages[0]['content']!r:.80}), "
                    f"and another one is given: {system!r:.80}. Leave one of them out."
                )
            messages = ({"role": "system", "content": system}, *messages)
        return dataclasses.replace(self, text=messages)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The text that was generated for a prompt.

    Attributes:
        prompt: The prompt; its adapter is the one that answered, or `base`.
        text: The generated text, without the prompt, special tokens, and a text that
            ended it.
        token_ids: The generated tokens, including the one that ended the text.
        logprobs: The log probability of each token, in nats, as the model gives it
            before temperature and top-p.
        finish_reason: `eos_token`, `stop_sequence`, or `length`: the limit of new
            tokens or of the model's positions was reached.
    """

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


# The types of one prompt, and of several.
OnePrompt = str | Sequence[Message] | Prompt
Prompts = OnePrompt | Iterable[OnePrompt]


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns one prompt, or several, as a list.

    Args:
        prompts: A text, a chat or a `Prompt`, which is one prompt; or several of them.

    Raises:
        JaxloraError: One of them is no prompt; the error says which.
    """
    if isinstance(prompts, str | Prompt) or _is_chat(prompts):
        return [as_prompt(prompts)]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"the prompts are {prompts!r:.80}, of type {type(prompts).__name__}. Give "
            "a list of texts, of chats (lists of {role, content} messages) or of "
            "jaxlora.Prompt."
        )
    made = []
    for number, prompt in enumerate(prompts, 1):
        with errors_in(f"prompt {number}"):
            made.append(as_prompt(prompt))
    return made


def as_prompt(prompt: OnePrompt) -> Prompt:
    """Returns a text or a chat as a `Prompt`, and a `Prompt` as it is.

    Raises:
        JaxloraError: It is no prompt.
    """
    return prompt if isinstance(prompt, Prompt) else Prompt(prompt)


def read_chat(messages: Sequence[Any], *, is_columnar: bool = False) -> list[Message]:
    """Reads messages in the forms of training data, but with no rule about answers.

    Args:
        messages: The messages.
        is_columnar: Whether null stands for an absent key, at any depth.

    Raises:
        DataError: They are not messages, or there are none.
    """
    # Nothing is trained on, so it does not matter whether an answer is empty.
    unweighted = [{**m, "weight": 0} if isinstance(m, Mapping) else m for m in messages]
    read = read_messages(unweighted, "messages", is_columnar=is_columnar)
    return [*read.messages]


def prompt_text(prompt: Prompt) -> str:
    """Returns the text of a prompt, or the last message of a chat."""
    return prompt.text if isinstance(prompt.text, str) else prompt.text[-1]["content"]


def prompt_ids(
    prompt: Prompt,
    tokenizer: Tokenizer,
    max_positions: int,
) -> list[int]:
    """Returns the tokens of a prompt.

    Args:
        prompt: The prompt.
        tokenizer: The model's tokenizer.
        max_positions: Longest sequence that the model was made for, in tokens.

    Raises:
        ConfigError: The prompt is empty or too long, or has tools and is no chat.
        DataError: The chat template refuses the messages, or prints no tools.
        ModelError: The prompt is a chat, and the tokenizer has no chat template.
    """
    shown = f"the prompt {prompt_text(prompt)[:40]!r}"
    if isinstance(prompt.text, str):
        if prompt.tools:
            raise ConfigError(f"{shown} has tools and is no chat: set chat.")
        # The ids that the tokenizer puts after a text would end it.
        ids = tokenizer.encode(prompt.text, add_special_tokens=False)
        ids = [*tokenizer.prefix_ids, *ids[tokenizer.num_given(ids) :]]
    else:
        messages = [dict(message) for message in prompt.text]
        text = _render(messages, prompt.tools, tokenizer.chat, shown)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ConfigError(
            "a prompt is empty, and the tokenizer puts no token before a text. Give a "
            "text of at least one token."
        )
    if len(ids) >= max_positions:
        raise ConfigError(
            f"{shown} has {counted(len(ids), 'token')}, and the model has positions "
            f"for {max_positions} (max_position_embeddings) with the answer. Shorten "
            "the prompt."
        )
    return ids


def _render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Any] | None,
    chat: ModelChat,
    shown: str,
) -> str:
    """Returns the text of a chat up to the answer."""
    chat.check_kwargs()
    if tools and "tools" not in chat.variables:
        raise DataError(
            f"{shown} has tools, which the chat template does not print. Leave them "
            "out, or use a template that prints them."
        )
    extras = {"tools": list(tools)} if tools else {}
    try:
        return chat.render(messages, add_generation_prompt=True, **extras)
    except DataError as error:
        raise DataError(f"{shown}: {error}") from error


def sample_prompts(
    config: SamplesConfig, model: ModelConfig, tokenizer: Tokenizer
) -> list[Prompt]:
    """Returns the prompts of a run's samples.

    Raises:
        ConfigError: A prompt is empty or too long.
        JaxloraError: The prompts are chats, and the chat template is missing or refuses
            them.
    """
    prompts = [Prompt(text) for text in config.prompts]
    if config.chat:
        prompts = [prompt.as_chat(config.system) for prompt in prompts]
    for prompt in prompts:
        prompt_ids(prompt, tokenizer, model.max_positions)
    return prompts


@contextlib.contextmanager
def errors_in(what: str) -> Iterator[None]:
    """Puts the name of a prompt before the text of the errors that it raises."""
    try:
        yield
    except JaxloraError as error:
        raise type(error)(f"{what}: {error}") from error


def _read_question(messages: Any) -> list[Message]:
    """Reads the messages of a chat that the model is to answer."""
    if not isinstance(messages, list | tuple):
        raise ConfigError(
            f"a prompt is {messages!r:.80}, of type {type(messages).__name__}. Give a "
            "text, or a list of {role, content} messages."
        )
    read = read_chat(messages)
    if read[-1]["role"] == "assistant":
        raise DataError(
            "the chat ends with a message of the assistant, so there is nothing to "
            "answer. Leave that message out, or give the whole text to continue as a "
            "text."
        )
    return read


def _is_chat(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(item, Mapping) for item in value
    )
