"""Memory of a run on its device: its parts, and what the compiler reports."""

import dataclasses
import math
from typing import Any

import jax

from jaxlora.memory.inputs import batch_shapes
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Limits

_COPIES = 4  # of an adapter: weights, two moments and gradients
_CHECKPOINT_COPIES = 3  # more copies while a checkpoint is taken
_HEAD_ROWS = 1024  # rows of logits that the loss computes at a time
_LOGIT_BYTES = 6  # a logit is held in float32 and in bfloat16
_HEAD_BYTES = 768 * 2**20  # at most
_BATCHES = 2  # on the device: one runs, the next waits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a run on its device, as a function of the tokens of a microbatch.

    The fixed and the transient bytes are never needed at the same time.

    Attributes:
        base_bytes: Bytes of the frozen weights.
        adapter_bytes: Bytes of the slots: adapters, moments and gradients.
        fixed_bytes: Bytes of the training step that do not depend on the tokens.
        bytes_per_token: Bytes per token of a microbatch.
        transient_bytes_per_token: Bytes per token that are needed only while the fixed
            bytes are free.
    """

    base_bytes: int
    adapter_bytes: int
    fixed_bytes: int
    bytes_per_token: float
    transient_bytes_per_token: float = 0.0

    def step_bytes(self, num_tokens: int) -> float:
        """Bytes of a training step with microbatches of `num_tokens` tokens."""
        transient = num_tokens * self.transient_bytes_per_token
        return num_tokens * self.bytes_per_token + max(self.fixed_bytes, transient)

    def total_bytes(self, num_tokens: int) -> int:
        """Bytes of the whole run with microbatches of `num_tokens` tokens."""
        peak = max(self.step_bytes(num_tokens), self._checkpoint_bytes())
        return self.base_bytes + self.adapter_bytes + math.ceil(peak)

    def fitting_tokens(self, num_bytes: int) -> int:
        """Tokens of the largest microbatches that fit; below 1 if none fit."""
        free = num_bytes - self.base_bytes - self.adapter_bytes
        if free < self._checkpoint_bytes():
            return 0
        both = self.bytes_per_token + self.transient_bytes_per_token
        return int(min((free - self.fixed_bytes) // self.bytes_per_token, free // both))

    def _checkpoint_bytes(self) -> int:
        return self.adapter_bytes // _COPIES * _CHECKPOINT_COPIES


def resident_footprint(spec: DecoderSpec) -> Footprint:
    """The footprint of weights and slots alone, without a training step."""
    return Footprint(
        base_bytes=num_bytes(spec.base_shapes()),
        adapter_bytes=_COPIES * num_bytes(spec.adapter_shapes()),
        fixed_bytes=0,
        bytes_per_token=0.0,
    )


def measured_footprint(
    spec: DecoderSpec, program: jax.stages.Compiled, limits: Limits
) -> Footprint | None:
    """Returns the footprint that the compiler reports; None if it reports none.

    Args:
        spec: The decoder.
        program: The compiled training step.
        limits: Limits of the microbatches that it was compiled for.
    """
    found = program.memory_analysis()
    if found is None:
        return None
    step_bytes = found.output_size_in_bytes - found.alias_size_in_bytes
    step_bytes += found.temp_size_in_bytes + found.generated_code_size_in_bytes
    step_bytes += _BATCHES * num_bytes(batch_shapes(limits))
    fixed_bytes = min(head_bytes(spec), step_bytes // 2)
    return dataclasses.replace(
        resident_footprint(spec),
        fixed_bytes=fixed_bytes,
        bytes_per_token=(step_bytes - fixed_bytes) / limits.capacity,
    )


def head_bytes(spec: DecoderSpec) -> int:
    """Bytes of the logits that the loss computes at a time, independent of T."""
    return min(_HEAD_BYTES, _HEAD_ROWS * spec.config.vocab_size * _LOGIT_BYTES)


def num_bytes(shapes: Any) -> int:
    """Bytes of all arrays of these shapes."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))
