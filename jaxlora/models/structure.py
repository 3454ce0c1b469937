"""The structure of a model, read from its modules without arrays.

The layers of a model are the source: the names and shapes of its weights in a
checkpoint, the linears that LoRA can adapt, and how devices divide them all follow from
what a layer makes with its `LayerBuilder`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlora.models.build import LayerBuilder, LayerLinear
from jaxlora.models.config import ModelConfig
from jaxlora.models.decoder import Decoder
from jaxlora.models.options import DecoderOptions
from jaxlora.modules.base_param import BaseParam, WeightLayout
from jaxlora.modules.slot_shape import SlotShape

_PREFIX = "model."  # of the names of layers in checkpoints of a text model alone
# They change no names.
_OPTIONS = DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One base weight.

    Attributes:
        hf_name: Name in a checkpoint of a text model alone; of the linears of experts,
            with `{}` in the place of the expert's number.
        path: Name in this library.
        shape: Shape of our array; linears are K N, and those of experts X K N.
        transpose: Whether the checkpoint holds the transpose; linears are N K there.
    """

    hf_name: str
    path: str
    shape: tuple[int, ...]
    transpose: bool = False

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint, with the experts one after the other."""
        *first, rows, columns = 1, *self.shape
        shape = (*first, columns, rows) if self.transpose else self.shape
        return shape[-len(self.shape) :]

    @property
    def parts(self) -> "tuple[TensorSpec, ...]":
        """The tensors of the checkpoint: itself, or the linear of each expert."""
        if "{}" not in self.hf_name:
            return (self,)
        number, *shape = self.shape
        start, experts, name = self.path.partition(".experts.")
        return tuple(
            TensorSpec(
                hf_name=self.hf_name.format(i),
                path=f"{start}{experts}{i}.{name}",
                shape=tuple(shape),
                transpose=self.transpose,
            )
            for i in range(number)
        )


def linears(config: ModelConfig, layer: int = 0) -> Mapping[str, LayerLinear]:
    """Returns the linears of a layer that LoRA can adapt, by their path inside it.

    Args:
        config: The model.
        layer: Number of the layer.
    """
    return _layer(config, _first_like(config, layer))[0]


def kinds_of_linears(config: ModelConfig) -> tuple[LayerLinear, ...]:
    """Returns the linears of all layers, one of each kind."""
    numbers = reversed(range(config.num_layers))
    firsts = dict.fromkeys(_first_like(config, i) for i in numbers)
    layers = (linears(config, i) for i in firsts)
    return tuple(dict.fromkeys(x for layer in layers for x in layer.values()))


@functools.lru_cache(maxsize=64)
def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Returns every base weight of a model, as if none was quantized."""
    layers = range(config.num_layers)
    embedding, *ends = _tensors(_ends(config, layers), "")
    specs = [embedding]
    for i in layers:
        _, weights = _layer(config, _first_like(config, i))
        specs += _tensors(weights, f"layers.{i}.")
    return *specs, *ends


def _tensors(weights: "Mapping[str, AbstractVariable]", layer: str) -> list[TensorSpec]:
    layouts = {path: weight.layout for path, weight in weights.items()}
    return [_tensor(path, layout, layer) for path, layout in layouts.items() if layout]


def _tensor(path: str, layout: WeightLayout, layer: str) -> TensorSpec:
    prefix = f"{_PREFIX}{layer}" if layer else ""
    return TensorSpec(
        hf_name=prefix + layout.hf_name,
        path=layer + path,
        shape=layout.shape,
        transpose=layout.transpose,
    )


def linear_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns Hugging Face's module names of the linears that LoRA may adapt."""
    return tuple(linear_shapes(config))


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the shape (K, N) of each linear that LoRA may adapt, by module name."""
    return {
        f"{config.family.prefix}layers.{layer}.{name}": (
            linear.in_features,
            linear.out_features,
        )
        for layer in range(config.num_layers)
        for linear in linears(config, layer).values()
        for name in linear.names
    }


def linear_path(module_name: str) -> str:
    """Returns our path of a linear, `layers.0.mlp.up_proj`, from its module name."""
    return module_name[module_name.index("layers.") :]


def chosen_experts(config: ModelConfig) -> int:
    """Returns how many experts a token chooses in a layer; 1 if there are none."""
    shapes = (config.expert_shape(i) for i in range(config.num_layers))
    return max((shape.chosen for shape in shapes if shape is not None), default=1)


def module_prefix(module_names: Iterable[str]) -> str:
    """Returns what comes before `layers.` in the names of a model's linears."""
    return next(iter(module_names)).partition("layers.")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class AbstractVariable:
    """A variable without its array.

    Attributes:
        kind: Its type.
        shape: Shape and dtype of its array.
        layout: How a checkpoint holds it and devices divide it; None: it is not frozen.
    """

    kind: type[nnx.Variable]
    shape: jax.ShapeDtypeStruct
    layout: WeightLayout | None


def variables(
    config: ModelConfig,
    options: DecoderOptions,
    slots: SlotShape | None,
    adapted: frozenset[str],
    layers: range,
) -> dict[str, AbstractVariable]:
    """Returns the variables of these layers of a decoder, by dotted path.

    Layers that are alike are traced once. See `Decoder` for the arguments.
    """
    found = dict(_ends(config, layers, options, slots))
    firsts: dict[tuple, int] = {}
    for i in layers:
        names = linears(config, i)
        paths = {name: f"layers.{i}.{name}" for name in names}
        here = frozenset(name for name, path in paths.items() if path in adapted)
        formats = tuple(map(options.weight_format, paths.values()))
        first = firsts.setdefault((config.layer_kind(i), here, formats), i)
        _, of_layer = _layer(config, first, options, slots, here)
        found |= {f"layers.{i}.{path}": one for path, one in of_layer.items()}
    return {path: found[path] for path in sorted(found, key=lambda p: p.split("."))}


def _first_like(config: ModelConfig, layer: int) -> int:
    """Returns the number of the first layer of the same kind."""
    kind = config.layer_kind(layer)
    return next(i for i in range(layer + 1) if config.layer_kind(i) == kind)


@functools.lru_cache(maxsize=64)
def _layer(
    config: ModelConfig,
    number: int,
    options: DecoderOptions = _OPTIONS,
    slots: SlotShape | None = None,
    adapted: frozenset[str] = frozenset(),
) -> tuple[Mapping[str, LayerLinear], Mapping[str, AbstractVariable]]:
    """Linears and variables of a layer, by path inside it.

    Frozen weights are in the order in which they were made, and before the others.
    """
    paths = [f"layers.{number}.{name}" for name in adapted]
    make = LayerBuilder(config, number, options, slots, paths)
    found = _abstract(lambda: config.family.layer(config, make))
    order = {made.hf_name: i for i, made in enumerate(make.layouts)}

    def place(path: str) -> int:
        layout = found[path].layout
        return len(order) if layout is None else order[layout.hf_name]

    ordered = {path: found[path] for path in sorted(found, key=place)}
    return {linear.name: linear for linear in make.linears}, ordered


@functools.lru_cache(maxsize=64)
def _ends(
    config: ModelConfig,
    layers: range,
    options: DecoderOptions = _OPTIONS,
    slots: SlotShape | None = None,
) -> Mapping[str, AbstractVariable]:
    """Variables before and after the layers: the embedding, the norm and the head."""
    found, last = {}, config.num_layers
    for end in (0, last):
        if end in (layers.start, layers.stop):
            arguments = config, options, slots, frozenset()
            make = functools.partial(Decoder, *arguments, layers=range(end, end))
            found |= _abstract(make)
    return found


def _abstract(make: Callable[[], nnx.Module]) -> dict[str, AbstractVariable]:
    flat = nnx.to_flat_state(nnx.state(nnx.eval_shape(make)))
    return {
        ".".join(map(str, path)): AbstractVariable(
            type(variable),
            jax.ShapeDtypeStruct(variable.shape, variable.dtype),
            variable.layout if isinstance(variable, BaseParam) else None,
        )
        for path, variable in flat
    }
