"""Settings of text generation."""

from typing import Annotated, Any

from pydantic import Field

from jaxlora.config.strict import (
    AtLeastOne,
    Bool,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    OneOrMore,
    PositiveInt,
    StrictModel,
    Wrong,
)

TopP = Annotated[float, Field(gt=0.0, le=1.0), Number]
_Text = Annotated[str, AtLeastOne]
Seed = Annotated[NonNegativeInt, Field(lt=2**31)]


class GenerationSettings(StrictModel):
    """Settings of how tokens are chosen and when a text ends.

    Attributes:
        max_new_tokens: Largest number of tokens to generate.
        temperature: Divisor of the logits; 0 takes the most likely token (greedy).
        top_p: Samples from the fewest tokens whose probabilities add up to this
            (nucleus sampling, arXiv 1904.09751); 1 samples from all tokens.
        top_k: Samples from so many of the most likely tokens, of which `top_p` then
            leaves some; 0 samples from all tokens.
        stop: Texts that end the generated text, which does not contain them.
        seed: Random seed of every prompt without a seed of its own. A sample depends
            on its prompt and its seed, and not on the other prompts of the batch.
    """

    max_new_tokens: PositiveInt = 128
    temperature: NonNegativeFloat = 0.0
    top_p: TopP = 1.0
    top_k: NonNegativeInt = 0
    stop: Annotated[tuple[_Text, ...], OneOrMore] = ()
    seed: Seed = 0


def _samples(samples: Any, wrong: Wrong) -> None:
    if samples.system is not None and not samples.chat:
        wrong["system"] = "system is a message of a chat: set `chat: true`."


class SamplesConfig(GenerationSettings):
    """Texts that every job of a run generates at each of its evaluations.

    Attributes:
        prompts: The prompts.
        chat: Whether each prompt is a message of a user, for the chat template.
        system: System message before it (with `chat`).
        max_new_tokens: Largest number of tokens to generate.
    """

    rules = (_samples,)

    prompts: Annotated[tuple[str, ...], AtLeastOne]
    chat: Bool = False
    system: str | None = None
    max_new_tokens: PositiveInt = 64
