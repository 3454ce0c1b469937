"""Writes generated texts for people and for programs."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlora.common.atomic import write_text
from jaxlora.generate.prompt import Generation, prompt_text


def describe(generation: Generation) -> str:
    """Returns the adapter, the prompt and the text, over several lines."""
    asked = prompt_text(generation.prompt)
    return f"[{generation.prompt.adapter}] {asked}\n{generation.text}\n"


def write_generations(
    path: str | pathlib.Path, generations: Sequence[Generation]
) -> None:
    """Writes a JSON Lines file.

    Raises:
        StorageError: The file cannot be written.
    """
    text = "".join(json.dumps(_record(one), default=list) + "\n" for one in generations)
    write_text(pathlib.Path(path), text)


def _record(generation: Generation) -> dict[str, Any]:
    prompt = generation.prompt
    key = "prompt" if isinstance(prompt.text, str) else "messages"
    return {
        key: prompt.text,
        "adapter": prompt.adapter,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "token_ids": generation.token_ids,
        "logprobs": generation.logprobs,
    }
