"""Datums: the tokens that a caller trains on, and what each position counts."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.errors import ConfigError, DataError
from jaxlora.objectives.datum import CLIP, LOSSES, datum_inputs
from jaxlora.objectives.sample import TokenizedSample

Numbers = Sequence[float] | np.ndarray
_FLOATS = "weights", "logprobs", "advantages"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """A sequence of tokens with a target for each position.

    Lists and arrays of numbers are taken, and kept as NumPy arrays. What a loss makes
    of them is in `jaxlora.objectives.datum`.

    Attributes:
        tokens: The tokens that the model reads.
        target_tokens: The token of which each position gives the log-probability. It
            need not be the next one.
        weights: Weight of each position, of any sign; 0: its loss does not count. None:
            all are 1.
        logprobs: Log-probabilities of the targets when they were sampled; None: the
            loss reads none.
        advantages: Advantages of the targets; None: the loss reads none.

    Raises:
        DataError: An array is empty, has another length than the tokens, or holds what
            is no finite number.
    """

    tokens: Any
    target_tokens: Any
    weights: Any = None
    logprobs: Any = None
    advantages: Any = None

    def __post_init__(self):
        for name in ("tokens", "target_tokens"):
            given = getattr(self, name)
            if (ids := token_ids(given)) is None:
                raise DataError(f"{name} is {given!r:.60}. Give a list of token ids.")
            object.__setattr__(self, name, ids)
        if not self.tokens.size:
            raise DataError("tokens is empty. A datum has one position or more.")
        for name in _FLOATS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _numbers(name, given))
        for name in ("target_tokens", *_FLOATS):
            own = getattr(self, name)
            if own is not None and len(own) != len(self.tokens):
                raise DataError(
                    f"{name} has {len(own)} numbers, and there are {len(self.tokens)} "
                    "tokens. Give one for each position."
                )

    @staticmethod
    def of(
        prompt: Numbers,
        completion: Numbers,
        *,
        logprobs: Numbers | None = None,
        advantages: float | Numbers | None = None,
    ) -> "Datum":
        """Returns a datum that predicts each token of a completion from those before.

        Args:
            prompt: Tokens before it, one at least; they have weight 0.
            completion: Its tokens, which have weight 1.
            logprobs: Log-probability of each of its tokens when it was sampled.
            advantages: Advantage of each of its tokens, or one for all of them.

        Raises:
            DataError: As for the class, or the prompt or the completion is empty.
        """
        if not len(prompt) or not len(completion):
            raise DataError(
                f"there are {len(prompt)} tokens of a prompt and {len(completion)} of "
                "a completion. Give one of each at least: the first token has none "
                "before it to predict it."
            )
        ids, before = [*prompt, *completion], [0.0] * (len(prompt) - 1)
        own: Any = advantages
        if own is not None and np.ndim(own) == 0:
            own = [own] * len(completion)
        return Datum(
            tokens=ids[:-1],
            target_tokens=ids[1:],
            weights=[*before, *[1.0] * len(completion)],
            logprobs=None if logprobs is None else [*before, *logprobs],
            advantages=None if own is None else [*before, *own],
        )

    def with_weights(self, weights: Any) -> "Datum":
        """Returns the datum with other weights."""
        return dataclasses.replace(self, weights=weights)


def _numbers(name: str, given: Any) -> np.ndarray:
    try:
        array = np.array(given, np.float32)
    except (TypeError, ValueError):
        raise DataError(f"{name} is {given!r:.60}. Give a list of numbers.") from None
    if array.ndim != 1 or not np.isfinite(array).all():
        raise DataError(f"{name} is {given!r:.60}. Give a list of finite numbers.")
    return array


def token_ids(given: Any) -> np.ndarray | None:
    """Returns token ids as an array of its own, int32; None: they are none."""
    try:
        array = np.asarray(given)
    except ValueError:  # lists of unlike lengths
        return None
    is_whole = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    if not is_whole or (array.size and not 0 <= array.min() <= array.max() < 2**31):
        return None
    return array.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenLoss:
    """A loss with the values of its settings.

    Attributes:
        name: Its name.
        settings: The values of all its settings.
    """

    name: str
    settings: Mapping[str, float]

    @staticmethod
    def of(name: str, given: Mapping[str, Any] | None) -> "ChosenLoss":
        """Checks the settings that a caller gives, and adds the defaults.

        Raises:
            ConfigError: There is no such loss or setting, or a value is missing, is no
                number, or contradicts another.
        """
        if name not in LOSSES:
            raise ConfigError(f"loss={name!r} must be one of {', '.join(LOSSES)}.")
        known, given = LOSSES[name].settings, dict(given or {})
        if unknown := [key for key in given if key not in known]:
            has = f"which has {', '.join(known)}" if known else "which has none"
            raise ConfigError(f"{unknown[0]!r} is no setting of {name}, {has}.")
        settings = {}
        for key, value in {**known, **given}.items():
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ConfigError(
                    f"{key}={value!r} of the loss {name} must be a finite number. Set "
                    f"loss_config={{{key!r}: ...}}."
                )
            settings[key] = float(value)
        low, high = (settings.get(key, 0.0) for key in CLIP)
        if low > high:
            raise ConfigError(
                f"{CLIP[0]}={low:g} of the loss {name} is larger than {CLIP[1]}="
                f"{high:g}. They are the least and the largest ratio, such as 0.8 and "
                "1.2."
            )
        return ChosenLoss(name=name, settings=settings)

    def check(self, datum: Datum) -> None:
        """Checks that a datum has what this loss reads.

        Raises:
            DataError: It lacks something.
        """
        old, advantages = datum.logprobs, datum.advantages
        if LOSSES[self.name].has_advantages and (old is None or advantages is None):
            lacking = "advantages" if advantages is None else "logprobs"
            raise DataError(
                f"it has no {lacking}, which the loss {self.name} reads. Give one "
                "for each position."
            )

    def sample(self, datum: Datum) -> TokenizedSample:
        """Returns a datum as microbatches take it, with what this loss reads.

        Raises:
            DataError: The datum lacks what the loss reads.
        """
        self.check(datum)
        old = advantages = None
        if LOSSES[self.name].has_advantages:
            old, advantages = datum.logprobs, datum.advantages
        weights = datum.weights
        if weights is None:
            weights = np.ones(len(datum.tokens), np.float32)
        inputs = datum_inputs(self.name, self.settings, weights, old, advantages)
        return TokenizedSample(
            token_ids=datum.tokens,
            is_target=inputs["weight"] != 0,
            labels=datum.target_tokens,
            inputs=inputs,
        )
