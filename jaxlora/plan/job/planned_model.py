"""The base model of a run without its weights, and how it is stored."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlora.common.counted import counted
from jaxlora.config import RunConfig
from jaxlora.config.base_settings import BaseSettings
from jaxlora.errors import ConfigError
from jaxlora.hf.base_format import change_settings, find_base_format, kept_linears
from jaxlora.hf.checkpoint import planned_checkpoint
from jaxlora.hf.load import FrozenModel, base_dtype
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.config import ModelConfig
from jaxlora.models.division import weight_specs
from jaxlora.models.forward import Base
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linears
from jaxlora.pallas_kernels import WeightOptions
from jaxlora.sharding.rules import EXPERT, FSDP, TENSOR

_KERNEL = ".kernel."  # in the path of an array of a quantized weight
_DIVIDING = FSDP, EXPERT, TENSOR  # the axes of a mesh that divide weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A base model without weights.

    Attributes:
        config: Architecture of the model.
        dtype: Dtype of the weights that are not quantized.
        base_format: How its linears are quantized; None: they are not.
    """

    config: ModelConfig
    dtype: jnp.dtype
    base_format: BaseFormat | None

    @staticmethod
    def of(settings: BaseSettings, model: FrozenModel) -> "PlannedModel":
        """Describes a model that is loaded.

        Raises:
            ConfigError: Settings of the base do not fit the model.
        """
        base_format = run_format(settings, model.config, model.base_format)
        return PlannedModel(
            config=model.config, dtype=model.dtype, base_format=base_format
        )


def planned_model(config: RunConfig, folder: pathlib.Path) -> PlannedModel:
    """Describes the base model of a run; its weights need not exist.

    Args:
        config: The run.
        folder: Folder with the model's config.json.

    Raises:
        JaxloraError: config.json is damaged or of an unsupported kind, settings of the
            base do not fit the model, or the headers of weights that are there are
            damaged.
    """
    # A folder of the hub's cache may hold a part of the weights.
    is_local = pathlib.Path(config.model).exists()
    has_weights = is_local and any(folder.glob("*.safetensors"))
    checkpoint = planned_checkpoint(folder, checks_weights=has_weights)
    return PlannedModel(
        config=checkpoint.config,
        dtype=jnp.dtype(base_dtype(config.dtype)),
        base_format=find_base_format(
            checkpoint,
            config.quantize_base,
            config.keep_bf16,
            quantize_args=config.quantize_base_args,
        ),
    )


def run_format(
    settings: BaseSettings, model: ModelConfig, stored: BaseFormat | None
) -> BaseFormat | None:
    """Returns the format of a run's base; None if it is not quantized.

    Args:
        settings: Settings of the base.
        model: The model.
        stored: Format of the weights that are loaded, or will be.

    Raises:
        ConfigError: The settings do not fit the weights.
    """
    name = None if stored is None else stored.name
    described = "not quantized" if name is None else f"in {name}"
    if settings.quantize_base not in (None, name):
        raise ConfigError(
            f"quantize_base is {settings.quantize_base}, and the base is {described}. "
            f"Load it with load_model(..., quantize={settings.quantize_base!r})."
        )
    if stored is None:
        if args := settings.quantize_base_args:
            raise ConfigError(
                f"quantize_base_args has {', '.join(args)}, and the base is not "
                "quantized. Leave it out, or set quantize_base."
            )
        return None
    if changed := set(kept_linears(model, settings.keep_bf16)) - set(stored.kept):
        raise ConfigError(
            f"keep_bf16 matches {min(changed)}, which is quantized in this base. Load "
            f"it with load_model(..., keep_bf16={list(settings.keep_bf16)})."
        )
    return change_settings(stored, settings.quantize_base_args)


def with_derived(model: FrozenModel, spec: DecoderSpec) -> FrozenModel:
    """Returns the model with all arrays of its format and no others.

    Those that follow from others, such as transposed copies, are made where they will
    lie.

    Args:
        model: The base model.
        spec: Decoder of the run.
    """
    base = spec.options.base_format
    if base is None:
        return model
    params = {k: v for k, v in model.params.items() if _KERNEL not in k}
    division = functools.cache(
        lambda *sizes: weight_specs(
            spec.divided(**dict(zip(_DIVIDING, sizes, strict=True)))
        )
    )
    for path, arrays in _quantized_kernels(model.params).items():
        found = _completed(base.options_of(path), path, arrays, division)
        params |= {f"{path}.{field}": array for field, array in found.items()}
    return dataclasses.replace(model, params=params)


def _quantized_kernels(params: Base) -> dict[str, Base]:
    """Returns the arrays of each quantized weight by field, by the kernel's path."""
    kernels: dict[str, Base] = {}
    for path, array in params.items():
        if _KERNEL in path:
            kernel, field = path.rsplit(".", 1)
            kernels.setdefault(kernel, {})[field] = array
    return kernels


def _completed(
    options: WeightOptions,
    kernel: str,
    arrays: Base,
    division: Callable[..., Mapping[str, PartitionSpec]],
) -> Base:
    wanted = jax.eval_shape(options.complete, arrays)
    kept = {field: arrays[field] for field in wanted if field in arrays}
    missing = tuple(field for field in wanted if field not in arrays)
    if not missing:
        return kept
    sharding = next(iter(arrays.values())).sharding
    # Without a mesh, an array is as little bound to a device as those it follows from.
    places: tuple[NamedSharding | None, ...] = (None,) * len(missing)
    if isinstance(sharding, NamedSharding):
        device_mesh = sharding.mesh
        sizes = dict(device_mesh.shape)
        specs = division(*(sizes.get(axis, 1) for axis in _DIVIDING))
        places = tuple(
            NamedSharding(device_mesh, specs[f"{kernel}.{f}"]) for f in missing
        )
    made = _maker(options, missing, places)(arrays)
    return kept | dict(zip(missing, made, strict=True))


@functools.lru_cache(maxsize=32)
def _maker(
    options: WeightOptions,
    fields: tuple[str, ...],
    places: tuple[NamedSharding | None, ...],
) -> Callable[[Base], tuple[jax.Array, ...]]:
    """Returns a program that makes fields of a weight from the others."""

    def make(arrays: Base) -> tuple[jax.Array, ...]:
        complete = options.complete(arrays)
        return tuple(complete[field] for field in fields)

    return jax.jit(make, out_shardings=places)


def describe_base(spec: DecoderSpec) -> str:
    """Describes how a quantized base is stored and multiplied."""
    base, name = spec.options.base_format, spec.options.implementation
    assert base is not None
    dtype = spec.options.dtype.name
    if not base.options.multiplies_forward:
        text = f"dequantized to {dtype} layer by layer for the products of {name}"
    elif base.options.multiplies_backward:
        text = f"{base.name} products of {name} forward and backward, " + (
            "with a second, transposed copy of the weights"
            if base.options.stores_transpose
            else "with one copy of the weights"
        )
    else:
        text = (
            f"{base.name} products of {name} forward, dequantized to {dtype} layer by "
            "layer backward"
        )
    layers = (linears(spec.config, i) for i in range(spec.config.num_layers))
    paths = (
        f"layers.{i}.{name}"
        for i, layer in enumerate(layers)
        for name, linear in layer.items()
        if linear.experts is not None
    )
    if base.options.multiplies_forward and any(map(base.quantizes, paths)):
        text += f"; experts are dequantized to {dtype} layer by layer"
    kept = [path.removeprefix("layers.") for path in base.kept]
    if kept:
        shown = ", ".join(kept[:4]) + (", ..." if len(kept) > 4 else "")
        text += f"; {counted(len(kept), 'linear')} kept in {dtype}: {shown}"
    return f"{base.name}, {text}"
