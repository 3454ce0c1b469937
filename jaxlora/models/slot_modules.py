"""The table of what slots train outside the linears of the layers.

An entry is a module of the decoder that has one trained array of each slot: the score
head, rows of tokens, whole copies of the embedding and of the head. The decoder, slots,
settings, planning, memory, checkpoints, PEFT export and merge loop over this table. So
a new one is one more entry, its Flax module, and its use in the decoder's mathematics.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlora.config import LoraJob
from jaxlora.models.config import ModelConfig
from jaxlora.models.score import ScoreHead
from jaxlora.models.token_rows import TokenRows
from jaxlora.models.whole_tables import WholeTables
from jaxlora.modules.trained_tensors import (
    SCORE_WEIGHT,
    TOKEN_ROW_WEIGHTS,
    WHOLE_TABLE,
    TrainedTensor,
)
from jaxlora.sharding.global_arrays import everywhere

# Paths of the large frozen weights outside the layers.
EMBEDDING, HEAD = "embed_tokens.embedding", "lm_head.kernel"

# Trained rows of tokens, size of the vocabulary, and size of the hidden states. A table
# of experts would have one more letter, for their number.
Axis = Literal["T", "V", "D"]
Tokens = tuple[int, ...]

_SCORE_DEVIATION = 0.02  # transformers' default initializer_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotModule:
    """A module outside the linears, with a trained array of each slot, float32.

    Attributes:
        name: Its path in the decoder, `Adapter.outside` and `SlotShape.outside`.
        tensor: Its trained array; how it is named in the module and in PEFT.
        axes: The axes of one slot's array. With `T`, it has rows of single tokens.
        frozen: The frozen module whose rows it replaces; None: it is one more module.
        is_first: Whether it is on the first pipeline stage, and not on the last.
        make: Makes the Flax module for a number of slots, by the sizes of `axes` and
            the number of devices of the axis `tensor`.
        setting: The setting of `LoraJob` that asks for it.
        asked: Returns the tokens whose rows a job asks for, by the job and its
            `Objective`; None: the job does not have the module.
        start: Makes its initial value from the job, the frozen weights by path, the
            tokens, and the shape.
    """

    name: str
    tensor: TrainedTensor
    axes: tuple[Axis, ...]
    frozen: str | None = None
    is_first: bool = False
    make: Callable[..., nnx.Module]
    setting: str
    asked: Callable[[LoraJob, Any], Tokens | None]
    start: Callable[[LoraJob, Mapping[str, Any], Tokens, tuple[int, ...]], np.ndarray]

    @property
    def path(self) -> str:
        """Dotted path of the array of all slots."""
        return f"{self.name}.{self.tensor.name}"

    @property
    def peft_name(self) -> str:
        """Name of the array in a PEFT folder, after the prefix of all names."""
        return f"{_PEFT_MODULES[self.frozen or self.name]}.{self.tensor.peft_name}"

    @property
    def has_tokens(self) -> bool:
        """Whether it has rows of single tokens."""
        return "T" in self.axes

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole copy of a frozen module."""
        return self.frozen is not None and not self.has_tokens

    def shape(self, model: ModelConfig, num_rows: int) -> tuple[int, ...]:
        """Returns the shape of a slot's array.

        Args:
            model: The model.
            num_rows: Number of tokens whose rows the slot trains.
        """
        sizes = {"T": num_rows, "V": model.vocab_size, "D": model.hidden_size}
        return tuple(sizes[axis] for axis in self.axes)

    def merged(
        self, frozen: np.ndarray, array: np.ndarray, tokens: Tokens
    ) -> np.ndarray:
        """Returns the weight V D of the frozen module with an adapter's own rows."""
        if self.is_whole:
            return array
        out = frozen.astype(np.float32)
        out[list(tokens)] = array
        return out

    def describe(self, num_rows: int) -> str:
        """Returns what a job with so many rows has, in the words of its settings."""
        if self.has_tokens:
            return f"{num_rows} {self.setting} of {self.frozen}"
        return f"{self.setting} {self.frozen or self.name}"


# The name in Hugging Face's models of each module.
_PEFT_MODULES = {
    "embed_tokens": "model.embed_tokens",
    "lm_head": "lm_head",
    "score": "score",
}


def _drawn_score(job: LoraJob, params: Any, tokens: Any, shape: Any) -> np.ndarray:
    """Draws a score head as transformers does: normal, with its usual deviation."""
    stream = np.random.Philox(key=[job.seed, zlib.crc32(b"score")])
    draws = np.random.Generator(stream).normal(0.0, _SCORE_DEVIATION, shape)
    return draws.astype(np.float32)


def _replacing(frozen: Literal["embed_tokens", "lm_head"]) -> dict[str, Any]:
    """Returns what rows and copies of a frozen module share."""

    def start(job: Any, params: Mapping[str, Any], tokens: Tokens, shape: Any) -> Any:
        is_head = frozen == "lm_head" and HEAD in params  # it may be tied
        path, axis = (HEAD, 1) if is_head else (EMBEDDING, 0)
        ids = np.array(tokens or range(shape[0]), np.int32)
        return np.asarray(everywhere(_taken(params[path], ids, axis)))

    return {"frozen": frozen, "is_first": frozen == "embed_tokens", "start": start}


@functools.partial(jax.jit, static_argnums=2)
def _taken(table: Any, ids: Any, axis: int) -> jax.Array:
    taken = jnp.take(table, ids, axis)
    return (taken if axis == 0 else taken.T).astype(np.float32)


def _rows(name: str, frozen: Literal["embed_tokens", "lm_head"]) -> SlotModule:
    return SlotModule(
        name=name,
        tensor=TOKEN_ROW_WEIGHTS,
        axes=("T", "D"),
        make=lambda num_slots, sizes, tensor: TokenRows(num_slots, *sizes),
        setting="trainable_token_indices",
        asked=lambda job, objective: job.token_ids[frozen] or None,
        **_replacing(frozen),
    )


def _whole(name: str, frozen: Literal["embed_tokens", "lm_head"]) -> SlotModule:
    return SlotModule(
        name=name,
        tensor=WHOLE_TABLE,
        axes=("V", "D"),
        make=lambda num_slots, sizes, tensor: WholeTables(num_slots, *sizes),
        setting="modules_to_save",
        asked=lambda job, objective: () if frozen in job.modules_to_save else None,
        **_replacing(frozen),
    )


SCORE = SlotModule(
    name="score",
    tensor=SCORE_WEIGHT,
    axes=("D",),
    make=lambda num_slots, sizes, tensor: ScoreHead(num_slots, *sizes, tensor=tensor),
    setting="objective",
    asked=lambda job, objective: () if objective.has_score else None,
    start=_drawn_score,
)
TOKEN_ROWS = _rows("token_rows", "embed_tokens")
HEAD_ROWS = _rows("head_rows", "lm_head")
WHOLE_EMBEDDING = _whole("whole_embedding", "embed_tokens")
WHOLE_HEAD = _whole("whole_head", "lm_head")

SLOT_MODULES: dict[str, SlotModule] = {
    module.name: module
    for module in (SCORE, TOKEN_ROWS, HEAD_ROWS, WHOLE_EMBEDDING, WHOLE_HEAD)
}


def replacement(frozen: str, *, is_whole: bool) -> SlotModule:
    """Returns the module that replaces rows, or all, of a frozen module."""
    return next(
        module
        for module in SLOT_MODULES.values()
        if module.frozen == frozen and module.is_whole == is_whole
    )


def asked_modules(job: LoraJob, objective: Any) -> dict[str, Tokens]:
    """Returns the names of the modules that a job asks for, and tokens of their rows.

    Args:
        job: The job.
        objective: Its `Objective`.
    """
    asked = {n: module.asked(job, objective) for n, module in SLOT_MODULES.items()}
    return {name: tokens for name, tokens in asked.items() if tokens is not None}
