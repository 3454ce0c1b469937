"""Divides a decoder into sections, whose programs alike sections share.

XLA's time to compile a program grows with its layers, and those of a deep decoder are
alike. So a decoder can run as a chain: its embedding, sections of some layers each, and
its head. The programs of a section take its position among the layers as an argument,
and have nothing else in them that tells it from another one of the same kind.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxlora.models.base_format import BaseFormat
from jaxlora.models.slot_settings import SlotSettings, settings_in
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import Stack, by_layer

_FIRST = 1  # number of the first layer of a section in its own spec
_FEW_LAYERS = 16  # are one program by default
# Layers of a section to choose from. With fewer, the ends of programs would cost time;
# with more, a program takes longer to compile.
_SIZES = range(4, 9)


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Position of a section in its decoder, as an argument of its programs.

    Attributes:
        layer: Number of layers before the section, less `_FIRST`: what is added to the
            numbers of its layers to get those of the model.
        linears: Row of each of its linears in `SlotSettings`.
        tables: Number of its first layer in each of its stacks, sorted by their names.
    """

    layer: Int[Array | np.ndarray, ""]
    linears: Int[Array | np.ndarray, " M"]
    tables: Int[Array | np.ndarray, " S"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """A section of a decoder: its embedding, some of its layers, or its head.

    Attributes:
        spec: The section as a stage. That of layers is in the middle of a decoder with
            one more layer at each end, so alike sections have equal specs.
        paths: Path of each of its frozen weights in the decoder, by path in `spec`.
        position: Its position, in arrays of NumPy.
    """

    spec: DecoderSpec
    paths: Mapping[str, str]
    position: Position

    def base(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the section's frozen weights among those of the decoder."""
        return {own: base[path] for own, path in self.paths.items()}


def sections(spec: DecoderSpec) -> tuple[Section, ...]:
    """Divides a whole decoder by `layers_per_program` of its options.

    The last section of layers has fewer of them if their number is no multiple.

    Args:
        spec: The decoder.

    Returns:
        The embedding, the sections of layers, and the head.
    """
    size = spec.options.layers_per_program
    assert size is not None and spec.layers is None
    options = dataclasses.replace(spec.options, layers_per_program=None)
    whole = dataclasses.replace(spec, options=options)
    middle = [
        _section(whole, _middle(whole, layers), layers.start - _FIRST)
        for layers in _cut(whole, size)
    ]
    embedding, head = (_end(whole, is_head=is_head) for is_head in (False, True))
    return _section(whole, embedding, 0), *middle, _section(whole, head, 0)


def chosen_layers(spec: DecoderSpec) -> int | None:
    """Chooses the layers of a section for a short time to compile.

    Args:
        spec: A whole decoder.

    Returns:
        Their number; None: one program is compiled as fast, or almost, because the
        decoder has few layers, or its layers are of many kinds.
    """
    num_layers = spec.config.num_layers
    if num_layers <= _FEW_LAYERS:
        return None
    compiled = {size: _num_compiled(spec, size) for size in _SIZES}
    best = min(compiled, key=lambda size: compiled[size])
    return best if 2 * compiled[best] <= num_layers else None


def _num_compiled(spec: DecoderSpec, size: int) -> int:
    """Layers in the different sections of so many layers."""
    kinds = {_middle(spec, layers) for layers in _cut(spec, size)}
    return sum(len(kind.layer_numbers) for kind in kinds)


def _cut(spec: DecoderSpec, size: int) -> list[range]:
    stop = spec.config.num_layers
    return [range(i, min(i + size, stop)) for i in range(0, stop, size)]


def _end(whole: DecoderSpec, *, is_head: bool) -> DecoderSpec:
    """Makes the embedding or the head, as a stage without layers.

    Python takes all empty ranges as equal, so the numbers of layers tell them apart.
    """
    layers = range(1, 1) if is_head else range(0)
    return dataclasses.replace(
        whole,
        config=whole.config.of_layers((0,) * (1 if is_head else 2)),
        adapted=(),
        layers=layers,
    )


def _middle(whole: DecoderSpec, layers: range) -> DecoderSpec:
    """Makes a section of layers, in the middle of a decoder with two more layers."""
    shift = layers.start - _FIRST
    options = whole.options
    config = whole.config.of_layers((0, *layers, 0))
    if (base_format := options.base_format) is not None:
        kept = _renumbered(base_format.kept, layers, shift)
        base_format = BaseFormat(options=base_format.options, kept=kept)
        options = dataclasses.replace(options, base_format=base_format)
    return DecoderSpec(
        config=config,
        options=options,
        slots=whole.slots,
        adapted=_renumbered(whole.adapted, layers, shift),
        layers=range(_FIRST, _FIRST + len(layers)),
    )


def _renumbered(paths: Iterable[str], layers: range, shift: int) -> tuple[str, ...]:
    """Returns the paths of some layers, with lower numbers."""
    here = [path for path in paths if int(path.split(".")[1]) in layers]
    return tuple(sorted(_shifted(path, -shift) for path in here))


def _shifted(path: str, shift: int) -> str:
    match path.split(".", 2):
        case "layers", number, rest:
            return f"layers.{int(number) + shift}.{rest}"
    return path


def _section(whole: DecoderSpec, own: DecoderSpec, shift: int) -> Section:
    rows = {path: row for row, path in enumerate(whole.adapted)}
    stacks = {stack.name: stack.modules for stack in whole.stacks}
    first = []
    for stack in _stacks(own):
        there = [_shifted(path, shift) for path in stack.modules]
        start = stacks[stack.name].index(there[0])
        assert list(stacks[stack.name][start : start + len(there)]) == there
        first.append(start)
    return Section(
        spec=own,
        paths={path: _shifted(path, shift) for path in own.base_shapes()},
        position=Position(
            layer=np.asarray(shift, np.int32),
            linears=np.asarray([rows[_shifted(p, shift)] for p in own.adapted], "i4"),
            tables=np.asarray(first, np.int32),
        ),
    )


def _stacks(spec: DecoderSpec) -> list[Stack]:
    """The stacks, sorted by their names."""
    return sorted(spec.stacks, key=lambda stack: stack.name)


# ---- inside programs -----------------------------------------------------------------


def own_tables(
    spec: DecoderSpec, arrays: Mapping[str, Array], at: Position, *, axis: int
) -> dict[str, Array]:
    """Returns a section's tables in the stacks of its decoder, by name.

    Args:
        spec: The section.
        arrays: The stacks of the decoder.
        at: Its position.
        axis: Axis of the layers.
    """
    found = {}
    for i, stack in enumerate(_stacks(spec)):
        every, size = by_layer(stack, arrays[stack.name], axis), len(stack.modules)
        own = jax.lax.dynamic_slice_in_dim(every, at.tables[i], size, axis + 1)
        found[stack.name] = _joined(own, axis)
    return found


def with_own_tables(
    spec: DecoderSpec,
    arrays: Mapping[str, Array],
    own: Mapping[str, Array],
    at: Position,
    *,
    axis: int,
) -> dict[str, Array]:
    """Returns the stacks of a decoder with other tables of a section.

    Args:
        spec: The section.
        arrays: The stacks of the decoder.
        own: The section's tables.
        at: Its position.
        axis: Axis of the layers.
    """
    replaced = {}
    for i, stack in enumerate(_stacks(spec)):
        every, new = (by_layer(stack, x[stack.name], axis) for x in (arrays, own))
        every = jax.lax.dynamic_update_slice_in_dim(every, new, at.tables[i], axis + 1)
        replaced[stack.name] = _joined(every, axis)
    return {**arrays, **replaced}


def _joined(array: Array, axis: int) -> Array:
    """Returns the array of a stack of which `by_layer` made this one."""
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def own_settings(
    spec: DecoderSpec, settings: SlotSettings, at: Position
) -> SlotSettings:
    """Returns the settings of the slots in a section's linears and other modules."""
    own = SlotSettings()
    for setting in settings_in(spec.settings_shapes()):
        values = settings[setting.key]
        own[setting.key] = values[at.linears] if setting.is_of_linears else values
    return own
