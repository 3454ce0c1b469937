"""The function `jaxlora.generate`."""

import pathlib
from collections.abc import Mapping
from typing import Any

import pydantic

from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.errors import ConfigError
from jaxlora.generate.adapters import Adapters
from jaxlora.generate.generator import Generator
from jaxlora.generate.prompt import Generation, Prompts, as_prompts
from jaxlora.hf.load import FrozenModel
from jaxlora.problems import format_errors


def generate(
    model: FrozenModel | str | pathlib.Path,
    prompts: Prompts,
    *,
    adapters: Adapters | None = None,
    chat: bool = False,
    batch_size: int = 16,
    **settings: Any,
) -> list[Generation]:
    """Generates text with a base model, or with adapters, all in the same batches.

        out = jaxlora.generate(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            ["Why is the sky blue?"],
            adapters={"a": "runs/one/adapters/a", "b": "runs/one/adapters/b"},
            chat=True,
            max_new_tokens=64,
        )
        print(out[0].prompt.adapter, out[0].text)

    `model.generate(prompts, ...)` does the same with a model from `load_model`. For
    several calls, make a `Generator` once: it keeps the adapters loaded.

    Args:
        model: A model that `load_model` returned, a folder, or a hub id.
        prompts: One prompt or several: texts, chats (lists of {role, content} messages)
            or `Prompt`s. One that names no adapter is answered by every adapter in
            turn, or by the base model if there are none.
        adapters: PEFT folders or adapters, by name; or folders, which are named like
            the last part of their path.
        chat: Whether plain texts are messages of a user, for the chat template.
        batch_size: Most prompts that are generated together.
        **settings: Fields of `GenerationSettings`, such as `temperature`.

    Returns:
        The generated texts, in the order of the prompts, and for each prompt in the
        order of the adapters.

    Raises:
        JaxloraError: A setting, a prompt, an adapter or the model cannot be used.
    """
    # A model takes long to load, so wrong prompts are refused before.
    chosen, asked = generation_settings(settings), as_prompts(prompts)
    generator = Generator(model, adapters, batch_size=batch_size)
    return generator.generate(asked, chosen, chat=chat)


def generation_settings(values: Mapping[str, Any]) -> GenerationSettings:
    """Makes settings of these values.

    Raises:
        ConfigError: A setting is unknown, or has a wrong value.
    """
    try:
        return GenerationSettings.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise ConfigError(format_errors(error, "generate")) from None
