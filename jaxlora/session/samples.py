"""Sampling for many clients: calls of many published versions share decode steps."""

import dataclasses
from collections.abc import Callable

from jaxlora.session.sampler import Completion


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
        tenant: Whose it is. Free places go to the tenant that has the fewest.
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
