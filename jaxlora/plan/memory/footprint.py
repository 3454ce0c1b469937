"""Memory of a run on a device: its parts, and what the compiler reports."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxlora.adapters.optimizers.state import is_stepped, state_shapes
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.models.division import part_shapes
from jaxlora.models.sharded import layer_bytes
from jaxlora.models.slot_modules import WHOLE_HEAD
from jaxlora.models.slot_settings import shared_settings
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.memory.inputs import batch_shapes
from jaxlora.programs.kept import HasMemory
from jaxlora.scheduler import Limits

# Copies of a slot's weights in float32, by each optimizer that mixes elements: 5 to 10
# on an H100.
_MIXED_COPIES = 10
_EXCHANGED_COPIES = 2  # of a slot's gradients: those sent, and those received
_HEAD_ROWS = 1024  # rows of logits that the loss computes at a time
_LOGIT_BYTES = 6  # a logit is held in float32 and in bfloat16
_HEAD_BYTES = 768 * 2**20  # at most
_BATCHES = 2  # on the device: one runs, the next waits
_GATHERED_LAYERS = 2  # one runs, the weights of the next one arrive
# The allocator wastes this share of activations kept between two programs. They are
# hundreds of arrays, and it hands out up to 128 MiB more than asked for, where that is
# less than twice as much. A replay of two stages of Llama-3.1-8B wasted 0.4 to 0.9 GiB
# of 36; the peak of an H200 was 2.6 % above what was compiled.
GAPS = 0.025


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageUse:
    """The use of a device of one pipeline stage.

    Attributes:
        num_shards: Devices among which the frozen weights of the stage are divided.
        num_parts: Microbatches with gradients of the same slot that run at the same
            time, and whose gradients a step adds.
        num_kept: Microbatches of the device whose activations wait for the backward
            pass, at most.
        num_waiting: Further microbatches of which the device holds hidden states that
            come from another stage or go there.
        num_tensor: Devices that share each microbatch.
        num_expert: Devices that share the experts of each layer.
    """

    num_shards: int
    num_parts: int
    num_kept: int
    num_waiting: int
    num_tensor: int = 1
    num_expert: int = 1

    def part_of(self, spec: DecoderSpec) -> DecoderSpec:
        """Returns the part of a stage that the device runs."""
        return spec.part(self.num_tensor, self.num_expert)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagePrograms[P]:
    """The passes of a stage, as programs that are compiled or that will be.

    Attributes:
        last: Its backward pass; of the stage with the head, both passes at once.
        forward: Its forward pass; None: `last` has it.
        sections: Those of the sections of the decoder before its head, if it runs as a
            chain of them; see `jaxlora.models.sections`. The embedding alone may have
            no backward pass: its `last` is the forward pass.
    """

    last: P
    forward: P | None = None
    sections: tuple["StagePrograms[P]", ...] = ()

    @property
    def each(self) -> list[P]:
        """The programs, each once, as alike sections share theirs."""
        before = [program for one in self.sections for program in one.each]
        own = (self.last,) if self.forward is None else (self.forward, self.last)
        return [*dict.fromkeys((*before, *own))]

    def map[Q](self, change: Callable[[P], Q]) -> "StagePrograms[Q]":
        """Returns what a function makes of each program."""
        return StagePrograms(
            last=change(self.last),
            forward=None if self.forward is None else change(self.forward),
            sections=tuple(one.map(change) for one in self.sections),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a run on a device, as a function of the tokens of a microbatch.

    The fixed and the transient bytes are never needed at the same time.

    Attributes:
        base_bytes: Bytes of the frozen weights, or of the device's shards of them.
        gathered_bytes: Bytes of the weights that are gathered from all shards while
            their layers run.
        adapter_bytes: Bytes of the slots: adapters, optimizer state, gradients, the
            matrices of VeRA, and references that are adapters.
        fixed_bytes: Bytes of the training step that do not depend on the tokens.
        bytes_per_token: Bytes per token of a microbatch.
        transient_bytes_per_token: Bytes per token that are needed only while the fixed
            bytes are free.
        scratch_bytes: Further bytes that are needed only while the fixed bytes are
            free, and do not depend on the tokens.
        gradient_bytes: The part of `adapter_bytes` that a checkpoint does not copy:
            gradients, the matrices of VeRA, and references.
    """

    base_bytes: int
    gathered_bytes: int = 0
    adapter_bytes: int
    fixed_bytes: int
    bytes_per_token: float
    transient_bytes_per_token: float = 0.0
    scratch_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the run needs from its start to its end."""
        return self.base_bytes + self.adapter_bytes

    def step_bytes(self, num_tokens: int) -> float:
        """Bytes of a training step with microbatches of `num_tokens` tokens."""
        transient = num_tokens * self.transient_bytes_per_token + self.scratch_bytes
        return num_tokens * self.bytes_per_token + max(self.fixed_bytes, transient)

    def total_bytes(self, num_tokens: int) -> int:
        """Bytes of the whole run with microbatches of `num_tokens` tokens."""
        step = self.gathered_bytes + self.step_bytes(num_tokens)
        peak = max(step, self._checkpoint_bytes())
        return self.resident_bytes + math.ceil(peak)

    def fitting_tokens(self, num_bytes: int) -> int:
        """Tokens of the largest microbatches that fit; below 1 if none fit."""
        free = num_bytes - self.resident_bytes
        if free < self._checkpoint_bytes():
            return 0
        free -= self.gathered_bytes
        both = self.bytes_per_token + self.transient_bytes_per_token
        return int(
            min(
                (free - self.fixed_bytes) // self.bytes_per_token,
                (free - self.scratch_bytes) // both,
            )
        )

    def _checkpoint_bytes(self) -> int:
        """Bytes of the copies while a checkpoint is taken: of all but gradients."""
        return self.adapter_bytes - self.gradient_bytes


@functools.lru_cache(maxsize=64)  # the same for all capacities that a choice tries
def stage_resident(spec: DecoderSpec, use: StageUse) -> Footprint:
    """The footprint of a stage's weights and slots alone, without a training step.

    Args:
        spec: The decoder, or one stage of it.
        use: How the device is used.
    """
    base, tables = part_shapes(spec, use.num_tensor, use.num_expert)
    gradients, state = num_bytes(tables), _state_bytes(spec, tables)
    frozen = num_bytes(shared_settings(spec.settings_shapes()))
    if spec.slots is not None and spec.slots.has_references:
        frozen = 2 * frozen + gradients  # those of the references, and their weights
    return Footprint(
        base_bytes=shard_bytes(base, use.num_shards),
        adapter_bytes=2 * gradients + state + frozen,
        gradient_bytes=gradients + frozen,
        fixed_bytes=0,
        bytes_per_token=0.0,
    )


def _state_bytes(spec: DecoderSpec, tables: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of the state of the run's optimizers for these tables, in all slots."""
    if spec.slots is None:
        return 0
    return num_bytes(state_shapes(spec.slots.optimizers, tables))


def stage_measured(
    spec: DecoderSpec,
    programs: StagePrograms[HasMemory],
    limits: Limits,
    use: StageUse,
) -> Footprint | None:
    """Returns a stage's footprint as the compiler reports it; None: it reports none.

    Args:
        spec: The decoder, or one stage of it.
        programs: The compiled passes, with the weights that they gather.
        limits: Limits of the microbatches that they were compiled for.
        use: How each device is used.
    """
    last = _own_bytes(programs.last)
    if last is None:
        return None
    itemsize = spec.options.dtype.itemsize
    hidden = limits.capacity * spec.config.hidden_size * itemsize // use.num_tensor
    step_bytes = last
    if programs.forward is not None:
        forward, kept = _forward_bytes(programs.forward, hidden)
        both = last + kept, forward  # of the backward and of the forward pass
        step_bytes = max(both) + (use.num_kept - 1) * kept
        step_bytes += math.ceil(GAPS * use.num_kept * kept)
    if programs.sections:
        step_bytes = _chain_bytes(last, programs.sections, hidden)
    step_bytes += use.num_waiting * hidden
    batch = num_bytes(batch_shapes(limits, objectives=spec.options.objectives))
    step_bytes += (_BATCHES + use.num_kept - 1) * batch
    step_bytes = max(step_bytes, optimizer_bytes(spec, use))
    part = use.part_of(spec)
    fixed_bytes = min(head_bytes(part), step_bytes // 2) if spec.has_head else 0
    return dataclasses.replace(
        stage_resident(spec, use),
        fixed_bytes=fixed_bytes,
        bytes_per_token=(step_bytes - fixed_bytes) / limits.capacity,
    )


def _chain_bytes(last: int, sections: Sequence[StagePrograms], hidden: int) -> int:
    """Bytes of the passes of a microbatch through a chain, beside the arguments.

    Args:
        last: Bytes of both passes of the head.
        sections: The programs of the other sections.
        hidden: Bytes of the hidden states between two sections.
    """
    kept, most = 0, 0  # of all sections so far, and of any of their passes
    for section in sections:
        own = _own_bytes(section.last)
        assert own is not None
        if section.forward is not None:
            forward, more = _forward_bytes(section.forward, hidden)
            most = max(most, kept + forward)
            kept += more
        most = max(most, kept + own)
    # A pass has the hidden states, or their gradient, of the section beside it.
    return max(most, kept + last) + hidden + math.ceil(GAPS * kept)


def _forward_bytes(program: HasMemory, hidden: int) -> tuple[int, int]:
    """Bytes of a forward pass, and those that it keeps for the backward pass."""
    own, found = _own_bytes(program), program.memory_analysis()
    assert own is not None and found is not None
    return own, found.output_size_in_bytes - hidden


def _own_bytes(program: HasMemory) -> int | None:
    """Bytes of a program beside its arguments; None: the compiler reports none."""
    found = program.memory_analysis()
    if found is None:
        return None
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return new + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def whole_table_bytes(spec: DecoderSpec) -> int:
    """Bytes of a backward pass with whole embeddings and heads that slots train.

    There are their gradients, of all slots, before these are added to the pending ones,
    and of one slot at a time the head in the dtype of the hidden states, and the sum of
    its gradient.
    """
    tables = spec.adapter_shapes()
    whole = {name: tables[name] for name in spec.whole_copies}
    if not whole:
        return 0
    assert spec.slots is not None
    one = spec.config.vocab_size * spec.config.hidden_size
    head = WHOLE_HEAD.path in whole
    return num_bytes(whole) + head * one * (4 + spec.options.dtype.itemsize)


def fixed_bytes(spec: DecoderSpec, use: StageUse) -> int:
    """Bytes of a step that do not depend on T, at the loss or at the optimizer.

    Args:
        spec: The decoder, or one stage of it.
        use: How the device is used.
    """
    at_loss, part = 0, use.part_of(spec)
    if spec.has_head:
        at_loss = head_bytes(part)
        if use.num_shards > 1:  # the head is gathered for the loss
            config, itemsize = part.config, spec.options.dtype.itemsize
            at_loss += config.vocab_size * config.hidden_size * itemsize
            # Beside one layer: `gathered_bytes` counts two.
            at_loss -= gathered_bytes(spec, use) - layer_bytes(part.base_shapes())
    # The head's gradient stays while the layers run, and the embedding's comes last.
    at_loss += whole_table_bytes(spec)
    return max(at_loss, optimizer_bytes(spec, use))


def optimizer_bytes(spec: DecoderSpec, use: StageUse) -> int:
    """Bytes of an optimizer step, and of the sum of its gradients over the devices.

    Args:
        spec: The decoder, or one stage of it.
        use: How the device is used.
    """
    _, shapes = part_shapes(spec, use.num_tensor, use.num_expert)
    at_sum = at_step = 0
    if use.num_parts * use.num_tensor > 1 and spec.slots:
        # A slot's chunks for all devices, and those from them.
        at_sum = _EXCHANGED_COPIES * num_bytes(shapes) // spec.slots.num_slots
    if jax.default_backend() == "cpu" and shapes:
        # XLA copies the state before it replaces it, but for the last array.
        largest = max(num_bytes(shape) for shape in shapes.values())
        at_step = max(0, _state_bytes(spec, shapes) - largest)
    elif spec.slots is not None and spec.slots.optimizers:
        at_step = _stepped_bytes(spec, spec.slots, use)
    return max(at_sum, at_step)


def _stepped_bytes(spec: DecoderSpec, slots: SlotShape, use: StageUse) -> int:
    """Bytes of weights and state after a step, where they do not replace those before.

    They do if there is one optimizer, and each of its elements steps by itself. One
    that mixes elements takes some copies of a slot's weights on the way. Parts of
    tables are joined for it before the step.
    """
    mixing = [name for name in slots.optimizers if OPTIMIZERS[name].mixes_elements]
    num_mixed = len(mixing)
    if len(slots.optimizers) == 1 and not num_mixed:
        return 0
    num_tensor = 1 if num_mixed else use.num_tensor
    _, shapes = part_shapes(spec, num_tensor, use.num_expert)
    joined = 0
    if num_mixed and use.num_tensor > 1:
        joined = 2 * num_bytes(shapes) + _state_bytes(spec, shapes)
    weights = num_bytes(shapes)
    states = (num_bytes(state_shapes([name], shapes)) for name in slots.optimizers)
    mixed = {n: s for n, s in shapes.items() if all(is_stepped(m, n) for m in mixing)}
    on_the_way = num_mixed * _MIXED_COPIES * num_bytes(mixed) // slots.num_slots
    return joined + weights + max(states) + on_the_way


def gathered_bytes(spec: DecoderSpec, use: StageUse) -> int:
    """Bytes of the layers' weights that are gathered at the same time.

    Args:
        spec: The decoder, or one stage of it.
        use: How the device is used.
    """
    if use.num_shards == 1:
        return 0
    num_layers = min(_GATHERED_LAYERS, len(spec.layer_numbers))
    return num_layers * layer_bytes(use.part_of(spec).base_shapes())


def head_bytes(spec: DecoderSpec) -> int:
    """Bytes of the logits that the loss computes at a time, independent of T."""
    return min(_HEAD_BYTES, _HEAD_ROWS * spec.config.vocab_size * _LOGIT_BYTES)


def num_bytes(shapes: Any) -> int:
    """Bytes of all arrays of these shapes."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def shard_bytes(shapes: Mapping[str, jax.ShapeDtypeStruct], num_shards: int) -> int:
    """Bytes that a device holds of frozen weights; only vectors are not divided."""
    whole = {path: shape for path, shape in shapes.items() if len(shape.shape) < 2}
    matrices = num_bytes(shapes) - num_bytes(whole)
    return num_bytes(whole) + math.ceil(matrices / num_shards)
