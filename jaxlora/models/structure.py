"""The structure of a model, read from its modules without arrays.

The layers of a model are the source: the names and shapes of its weights in a
checkpoint, the linears that LoRA can adapt, and how devices divide them all follow from
what a layer makes with its `LayerBuilder`.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping

import jax.numpy as jnp
from flax import nnx

from jaxlora.models.build import LayerBuilder, LayerLinear
from jaxlora.models.config import ModelConfig
from jaxlora.models.decoder import Decoder
from jaxlora.models.options import DecoderOptions
from jaxlora.modules.base_param import BaseParam, WeightLayout

_PREFIX = "model."  # of the names of layers in checkpoints
# They change no names.
_OPTIONS = DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One base weight.

    Attributes:
        hf_name: Name in the checkpoint.
        path: Name in this library.
        shape: Shape of our array; linears are K N.
        transpose: Whether the checkpoint holds the transpose; linears are N K there.
    """

    hf_name: str
    path: str
    shape: tuple[int, ...]
    transpose: bool = False

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        return self.shape[::-1] if self.transpose else self.shape


def linears(config: ModelConfig, layer: int = 0) -> Mapping[str, LayerLinear]:
    """Returns the linears of a layer that LoRA can adapt, by their path inside it.

    Args:
        config: The model.
        layer: Number of the layer.
    """
    return _layer(config, config.layer_kind(layer))[0]


def kinds_of_linears(config: ModelConfig) -> tuple[LayerLinear, ...]:
    """Returns the linears of all layers, one of each kind."""
    kinds = {config.layer_kind(i): i for i in reversed(range(config.num_layers))}
    layers = (linears(config, i) for i in kinds.values())
    return tuple(dict.fromkeys(x for layer in layers for x in layer.values()))


@functools.lru_cache(maxsize=64)
def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Returns every base weight of a model, as if none was quantized."""
    embedding, *ends = _ends(config).items()
    specs = [_tensor(*embedding)]
    for i in range(config.num_layers):
        name = f"layers.{i}."
        _, layouts = _layer(config, config.layer_kind(i))
        specs += [_tensor(*item, name) for item in layouts.items()]
    return *specs, *(_tensor(*item) for item in ends)


def _tensor(path: str, layout: WeightLayout, layer: str = "") -> TensorSpec:
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
        f"{_PREFIX}layers.{layer}.{name}": (linear.in_features, linear.out_features)
        for layer in range(config.num_layers)
        for name, linear in linears(config, layer).items()
    }


def linear_path(module_name: str) -> str:
    """Returns our path of a linear, `layers.0.mlp.up_proj`, from its module name."""
    return module_name.removeprefix(_PREFIX)


@functools.lru_cache(maxsize=64)
def _layer(
    config: ModelConfig, kind: Hashable
) -> tuple[Mapping[str, LayerLinear], Mapping[str, WeightLayout]]:
    """Linears and weights of the layers of a kind, by path, in the order of making."""
    number = next(i for i in range(config.num_layers) if config.layer_kind(i) == kind)
    make = LayerBuilder(config, number, _OPTIONS)
    found = _layouts(nnx.eval_shape(lambda: config.family.layer(config, make)))
    order = {made.hf_name: i for i, made in enumerate(make.layouts)}
    by_order = lambda item: order[item[1].hf_name]
    layouts = dict(sorted(found.items(), key=by_order))
    return {linear.name: linear for linear in make.linears}, layouts


@functools.lru_cache(maxsize=64)
def _ends(config: ModelConfig) -> Mapping[str, WeightLayout]:
    """Weights outside the layers, by path: the embedding, the norm and the head."""
    found = {}
    for layers in (range(0), range(config.num_layers, config.num_layers)):
        make = lambda here=layers: Decoder(
            config, _OPTIONS, None, frozenset(), layers=here
        )
        found |= _layouts(nnx.eval_shape(make))
    return found


def _layouts(module: nnx.Module) -> dict[str, WeightLayout]:
    flat = nnx.to_flat_state(nnx.state(module, BaseParam))
    return {".".join(map(str, path)): variable.layout for path, variable in flat}
