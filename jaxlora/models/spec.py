"""The structure of a decoder, or of one pipeline stage of it, without its arrays."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxlora.models.build import LayerLinear
from jaxlora.models.config import ExpertShape, ModelConfig, shared_path
from jaxlora.models.decoder import Decoder
from jaxlora.models.options import DecoderOptions, Remat
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.slot_settings import SETTINGS, SlotSettings, settings_by_path
from jaxlora.models.stacks import OUTSIDE_LINEARS, Stack, stacked_shapes, stacks_of
from jaxlora.models.structure import AbstractVariable, linears, variables
from jaxlora.models.tensor_parallel import part_config
from jaxlora.modules.base_param import BaseParam, WeightLayout
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels import Projection, block_rows_for
from jaxlora.pallas_kernels.dropout import TILE_TOKENS

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The structure of a decoder, or of one of its stages: binds arrays to modules.

    Base weights and adapters are passed as flat dicts from dotted path to array, so a
    step is a plain function of them. Specs of equal structure compare equal.

    Attributes:
        config: The mathematics of the whole model.
        options: How it runs.
        slots: Shape of the slot tables; None: there are none.
        adapted: Paths of the linears that have slots, sorted; the linears of a layer's
            experts have one path, see `shared_path`. This is the order of the rows of
            `SlotSettings`.
        layers: Layers of this stage, by their numbers in the whole model; None: all.
            Made by `stage`.
    """

    config: ModelConfig
    options: DecoderOptions
    slots: SlotShape | None = None
    adapted: tuple[str, ...] = ()
    layers: range | None = None

    def __post_init__(self):
        unknown = set(self.adapted) - set(self._linear_paths())
        if unknown:
            raise ValueError(f"no linears of this decoder: {sorted(unknown)}.")
        if list(self.adapted) != sorted(set(self.adapted)):
            raise ValueError(
                f"adapted={self.adapted} must be sorted, each path once: give "
                "tuple(sorted(set(paths)))."
            )

    # ---- stages ----------------------------------------------------------------------

    @property
    def layer_numbers(self) -> range:
        """Numbers of the layers here, in the whole model."""
        return range(self.config.num_layers) if self.layers is None else self.layers

    @property
    def expert_slots(self) -> SlotShape | None:
        """The slots if they adapt experts, or None."""
        return self.slots if any(".experts." in x for x in self.adapted) else None

    @property
    def num_expert_slots(self) -> int:
        """Most slots of a microbatch that experts tell apart; 1 if none adapts any."""
        if self.expert_slots is None:
            return 1
        most, num_slots = self.options.most_adapters, self.expert_slots.num_slots
        if most is None:
            return num_slots
        return min(num_slots, most * self.config.expert_parts)

    def expert_block_rows(self, experts: ExpertShape, num_tokens: int) -> int:
        """Rows of a block of experts' rows in training; see `block_rows_for`.

        Args:
            experts: The mixture, or a device's part of it.
            num_tokens: Tokens of a microbatch.
        """
        if (slots := self.expert_slots) is None:
            return TILE_TOKENS
        shape = 1, 1, slots.rank_of(is_of_experts=True)
        like: Any = jax.ShapeDtypeStruct(shape, "int8")
        drops = like if slots.use_dropout else None
        one = Projection(w=like, a=like, b=like, scaling=like, dropout=drops)
        slot_rows = experts.chosen * num_tokens / experts.number / self.num_expert_slots
        backend = self.options.implementation
        return block_rows_for(backend, [one], slots.num_slots, slot_rows)

    @property
    def has_embedding(self) -> bool:
        """Whether the first layer is here, so that `embed` runs here."""
        return self.layer_numbers.start == 0

    @property
    def has_head(self) -> bool:
        """Whether the last layer is here, so that the loss is computed here."""
        return self.layer_numbers.stop == self.config.num_layers

    def with_remat(self, remat: Remat) -> "DecoderSpec":
        """Returns this decoder with another part of each layer recomputed."""
        options = dataclasses.replace(self.options, remat=remat)
        return dataclasses.replace(self, options=options)

    def stage(self, start: int, stop: int) -> "DecoderSpec":
        """The part of this decoder that runs on one pipeline stage.

        It has the layers from `start` to `stop - 1`. Their numbers stay those of the
        whole model, because these key dropout masks, checkpoints and exports. The first
        stage also has the embedding; the last one has the final norm and the head.

        With tied embeddings, the last stage holds its own copy of the embedding as its
        head. The embedding is frozen, so the copies never differ and no gradient has to
        be exchanged between the stages.

        Args:
            start: First layer.
            stop: Layer after the last.

        Raises:
            ValueError: There are no such layers here, or none between the two.
        """
        here = self.layer_numbers
        if not here.start <= start < stop <= here.stop:
            raise ValueError(
                f"stage({start}, {stop}) must have at least one of the layers "
                f"{here.start} to {here.stop - 1}."
            )
        layers = range(start, stop)
        if layers == range(self.config.num_layers):
            return self
        part = dataclasses.replace(self, adapted=(), layers=layers)
        paths = set(part._linear_paths())
        adapted = tuple(path for path in self.adapted if path in paths)
        return dataclasses.replace(part, adapted=adapted)

    def _linear_paths(self) -> list[str]:
        """Paths of all linears, layer by layer."""
        return [
            f"layers.{i}.{name}"
            for i in self.layer_numbers
            for name in linears(self.config, i)
        ]

    def linear(self, path: str) -> LayerLinear:
        """Returns the sizes of the linear of this path."""
        _, layer, name = path.split(".", 2)
        return linears(self.config, int(layer))[name]

    # ---- binding ---------------------------------------------------------------------

    @functools.cached_property
    def _split(self) -> tuple[Any, Any]:
        """Modules without arrays, and the shapes of their variables."""
        return _split(self.with_remat("none"))

    def bind(
        self, *arrays: Mapping[str, Array], settings: SlotSettings | None = None
    ) -> Decoder:
        """The decoder with these variables.

        Args:
            *arrays: Base weights and adapters; together they name each once. Where
                `weight_specs` divides a weight, this device's shard of it.
            settings: Settings of the slots, if there are any.

        Raises:
            ValueError: A variable has no array, or an array has no variable.
        """
        graph, state = self._split
        given: dict[str, Array] = {}
        of_slots = {} if settings is None else settings_by_path(settings, self.adapted)
        for group in (*arrays, of_slots):
            given |= group
        variables = _by_dotted_path(state)
        if given.keys() != variables.keys():
            raise ValueError(
                "the arrays are not those of this decoder: missing "
                f"{sorted(variables.keys() - given.keys())}, unknown "
                f"{sorted(given.keys() - variables.keys())}."
            )
        flat = {
            path: variable.replace(given[name])
            for name, (path, variable) in variables.items()
        }
        decoder = nnx.merge(graph, nnx.from_flat_state(flat))
        decoder.options = self.options  # what is recomputed changes no module
        return decoder

    def abstract(self) -> Decoder:
        """The decoder without arrays: its variables have shapes and dtypes alone."""
        return nnx.merge(*self._split)

    # ---- shapes ----------------------------------------------------------------------

    def shapes(self, kind: type[nnx.Variable]) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape and dtype of every variable of one kind."""
        variables = _variables(self.plain).items()
        return {path: x.shape for path, x in variables if issubclass(x.kind, kind)}

    @functools.cached_property
    def plain(self) -> "DecoderSpec":
        """This decoder without the options of how it runs, which change no shape."""
        own = self.options
        options = DecoderOptions(
            dtype=own.dtype, base_format=own.base_format, max_segment_tokens=1
        )
        return dataclasses.replace(self, options=options)

    def base_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape of the frozen weights, as a whole."""
        return self.shapes(BaseParam)

    def layouts(self) -> dict[str, WeightLayout]:
        """Path -> layout of the frozen weights."""
        variables = _variables(self.plain).items()
        return {path: x.layout for path, x in variables if x.layout is not None}

    def divided(
        self, *, fsdp: int = 1, expert: int = 1, tensor: int = 1
    ) -> "DecoderSpec":
        """Returns this decoder divided among the devices of these axes."""
        kv_parts = min(tensor, self.config.num_kv_heads)
        options = dataclasses.replace(
            self.options, fsdp=fsdp, expert=expert, tensor=tensor, kv_parts=kv_parts
        )
        return dataclasses.replace(self, options=options)

    def part(self, tensor: int = 1, expert: int = 1) -> "DecoderSpec":
        """Returns the decoder that each device along these axes runs."""
        config = part_config(self.config, tensor, expert)
        return dataclasses.replace(self, config=config)

    @property
    def own_part(self) -> "DecoderSpec":
        """The decoder that each device runs, if this one is divided."""
        return self.part(self.options.tensor, self.options.expert)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The adapter tables that share an array: those of one kind in all layers."""
        layers = {i: self._stack_names(i) for i in self.layer_numbers}
        return stacks_of(layers, self.shapes(nnx.LoRAParam))

    def _stack_names(self, layer: int) -> dict[LayerLinear, str]:
        """Returns the linears of a layer, and the names of their stacks.

        Those of another size than in the first layer have stacks of their own.
        """
        first, names = linears(self.config), {}
        for name, own in linears(self.config, layer).items():
            other, sizes = first.get(name, own), (own.in_features, own.out_features)
            is_alike = sizes == (other.in_features, other.out_features)
            kind = self.config.layer_kind(layer)  # sizes of a device's part are others
            names[own] = name if is_alike else f"{name}[{kind}]"
        return names

    @functools.cached_property
    def linears_of_stacks(self) -> dict[str, tuple[int, ...]]:
        """Number in `adapted` of each linear of the stacks, by name of the stack."""
        numbers = {path: number for number, path in enumerate(self.adapted)}
        return {
            stack.name: tuple(
                numbers[shared_path(p.rpartition(".")[0])] for p in stack.paths
            )
            for stack in self.stacks
            if stack.name not in OUTSIDE_LINEARS
        }

    @property
    def trained_modules(self) -> frozenset[str]:
        """Paths of the modules with slot tables: linears, and those outside them."""
        tables = self.shapes(nnx.LoRAParam)
        return frozenset(path.rpartition(".")[0] for path in tables)

    def settings_shapes(self) -> SlotSettings:
        """Shapes of the settings of the slots that are read here, by key."""
        found, slots = SlotSettings(), self.slots
        if slots is None:
            return found
        for setting in SETTINGS:
            if (sizes := setting.sizes(self)) is not None:
                first = len(self.adapted) if setting.is_of_linears else 1
                shape = first, slots.num_slots, *sizes
                found[setting.key] = jax.ShapeDtypeStruct(shape, setting.dtype)
        return found

    @property
    def whole_copies(self) -> frozenset[str]:
        """Paths of the tables of whole copies, of modules that are here."""
        tables = self.shapes(nnx.LoRAParam)
        whole = (module for module in SLOT_MODULES.values() if module.is_whole)
        return frozenset(module.path for module in whole if module.path in tables)

    def adapter_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape of the stacks of slot tables A and B."""
        return stacked_shapes(self.stacks, self.shapes(nnx.LoRAParam))


@functools.lru_cache(maxsize=32)  # tracing a model of 80 layers takes seconds
def _split(spec: DecoderSpec) -> tuple[Any, Any]:
    layers = spec.layer_numbers
    arguments = spec.config, spec.options, spec.slots, frozenset(spec.adapted)
    return nnx.split(nnx.eval_shape(lambda: Decoder(*arguments, layers=layers)))


@functools.lru_cache(maxsize=64)
def _variables(spec: DecoderSpec) -> dict[str, AbstractVariable]:
    adapted = frozenset(spec.adapted)
    return variables(spec.config, spec.options, spec.slots, adapted, spec.layer_numbers)


def _by_dotted_path(state: Any) -> dict[str, tuple[tuple, Any]]:
    """Path and variable of every variable, by dotted path."""
    return {
        ".".join(str(part) for part in path): (path, variable)
        for path, variable in nnx.to_flat_state(state)
    }
