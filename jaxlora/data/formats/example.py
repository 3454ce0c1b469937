"""The values between a record and its tokens: an example, and its texts."""

import dataclasses
from typing import Any

from jaxlora.objectives.sample import TokenizedSample

Span = tuple[int, int]
NO_PROMPT = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A record in the one form that every format gives.

    Texts and messages are as the record has them; they are checked afterwards, for all
    formats alike. Messages are a list in any form that `data.messages` may have.

    Attributes:
        prompt: What is before each completion, a text or a list of messages. Without
            a prompt, a text is trained on as a whole, and so are the assistant's
            answers in a list of messages.
        completions: What is trained on, a text or a list of messages; two for a
            preference, the chosen one first.
        system: System message of a chat, "" for none. The setting `data.system`
            replaces it.
        tools: Tools that the assistant may call, as a list or as JSON text.
        label: Whether the completion is a good one, if the record says so.
        margin: By how much the reward of the chosen completion should be higher.
        weight: Factor of the losses of its tokens.
        tokens: The tokens of a record that is no text; there are no completions then.
    """

    prompt: Any = NO_PROMPT
    completions: tuple[Any, ...] = ()
    system: str = ""
    tools: Any = None
    label: bool | None = None
    margin: float | None = None
    weight: float = 1.0
    tokens: TokenizedSample | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a sample, and what of it is trained on.

    Attributes:
        text: The text. It is complete if it is a chat; otherwise special tokens of the
            tokenizer may go around it.
        target_spans: Of a chat, first character and end of each span that is trained
            on; None: all of the text is.
        prompt: Text before it that is not trained on; None: there is none.
        weights: Weight of each span; empty: all are 1.
        num_cut: Answers that are not trained on and whose thoughts are left out.
        num_thoughtless: Answers that are trained on after an empty thought, which the
            template prints and the generation prompt does not have.
        value: See `TokenizedSample`.
        weight: Factor of the weights of its tokens.
        tokens: The tokens of a record that is no text.
    """

    text: str
    target_spans: tuple[Span, ...] | None = None
    prompt: str | None = None
    weights: tuple[float, ...] = ()
    num_cut: int = 0
    num_thoughtless: int = 0
    value: float = 0.0
    weight: float = 1.0
    tokens: TokenizedSample | None = None
