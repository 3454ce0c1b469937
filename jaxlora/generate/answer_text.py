"""Turns generated tokens into text, and finds where a stop text ends it."""

from collections.abc import Collection, Sequence

from jaxlora.data.tokenizer import Tokenizer

# Tokens of the prompt that are decoded in front of an answer. Some tokenizers drop the
# space before the first word of a text, which an answer that continues one must keep.
_NUM_CONTEXT_TOKENS = 8
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # stands for a character without its end


class AnswerText:
    """The text of the answer to one prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        end_ids: Collection[int],
    ):
        """Makes the object.

        Args:
            tokenizer: The model's tokenizer.
            prompt_ids: The prompt's tokens.
            stop: Texts that end the answer.
            end_ids: Tokens that end the answer, and are no part of its text.
        """
        self._tokenizer, self._stop, self._end_ids = tokenizer, tuple(stop), end_ids
        self._context = [int(i) for i in prompt_ids[-_NUM_CONTEXT_TOKENS:]]
        self._before = self._decode(self._context)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of an answer's tokens, up to a stop text."""
        text = self._whole(token_ids)
        return text[: min(self._places(text), default=len(text))]

    def _whole(self, token_ids: Sequence[int]) -> str:
        ids = [i for i in token_ids if i not in self._end_ids]
        text = self._decode([*self._context, *ids])
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._decode(ids)

    def _places(self, text: str) -> list[int]:
        return [place for stop in self._stop if (place := text.find(stop)) >= 0]

    def num_until_stop(self, token_ids: Sequence[int], num_before: int) -> int | None:
        """Returns the fewest tokens whose text holds a stop text; None if none does.

        Args:
            token_ids: The answer's tokens.
            num_before: The first of these tokens, whose text holds none.
        """
        if not self._stop or not self._places(self._whole(token_ids)):
            return None
        for num in range(num_before + 1, len(token_ids)):
            if self._places(self._whole(token_ids[:num])):
                return num
        return len(token_ids)

    def settled(self, token_ids: Sequence[int]) -> str:
        """Returns the part of the text that no further token can change.

        The end of a text may be the start of a stop text, or of a character.
        """
        text = self.of(token_ids).rstrip(_INCOMPLETE)
        held = (
            size
            for stop in self._stop
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        )
        return text[: len(text) - max(held, default=0)]
