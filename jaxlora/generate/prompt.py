"""Prompts of generation, and its results."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.generate.batch import FinishReason

Message = Mapping[str, Any]  # {role, content}, as chat templates take them

BASE = "base"  # names the base model where a prompt names its adapter


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and what answers it.

    Attributes:
        text: The text to continue, or the messages of a chat to answer.
        adapter: Name of the adapter that answers; `base`: the base model; None: every
            adapter in turn, or the base model if there are none.
        seed: Random seed of the samples; None: the seed of the settings.

    Raises:
        ConfigError: The seed is not from 0 to 2**31 - 1.
    """

    text: str | Sequence[Message]
    adapter: str | None = None
    seed: int | None = None

    def __post_init__(self):
        if self.seed is not None and not 0 <= self.seed < 2**31:
            raise ConfigError(
                f"a prompt has seed={self.seed}; give an integer from 0 to 2147483647."
            )

    def as_chat(self, system: str | None = None) -> "Prompt":
        """Returns a plain text as the message of a user; a chat stays as it is.

        Args:
            system: System message before it; None: there is none.
        """
        if not isinstance(self.text, str):
            return self
        first = () if system is None else ({"role": "system", "content": system},)
        messages = *first, {"role": "user", "content": self.text}
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
