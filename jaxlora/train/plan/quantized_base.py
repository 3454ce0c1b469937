"""The quantized base of a run: its format, its copies, and what is logged."""

import dataclasses

import jax
from jax.sharding import NamedSharding

from jaxlora.common.counted import counted
from jaxlora.config.base_settings import BaseSettings
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.base_format import kept_linears
from jaxlora.hf.load import FrozenModel
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.forward import Base
from jaxlora.models.sharded import base_spec
from jaxlora.models.spec import DecoderSpec
from jaxlora.sharding.rules import FSDP

_VALUES, _TRANSPOSED = ".kernel.values", ".kernel.transposed"


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
    multiplies = stored is not None and stored.options.multiplies_forward
    if settings.fp8_settings and not multiplies:
        raise ConfigError(
            f"{settings.fp8_settings[0]} has a meaning for an fp8 base only, and the "
            f"base is {described}. Leave it out, or set quantize_base: fp8."
        )
    if stored is None:
        return None
    if changed := set(kept_linears(model, settings.keep_bf16)) - set(stored.kept):
        raise ConfigError(
            f"keep_bf16 matches {min(changed)}, which is quantized in this base. Load "
            f"it with load_model(..., keep_bf16={list(settings.keep_bf16)})."
        )
    return stored.replace(fp8_backward=settings.fp8_backward, transposed=False)


def with_copies(model: FrozenModel, base_format: BaseFormat | None) -> FrozenModel:
    """Returns the model with transposed copies of its fp8 weights, or without them.

    Args:
        model: The base model.
        base_format: Format of the run's base.
    """
    if base_format is None:
        return model
    params = {k: v for k, v in model.params.items() if not k.endswith(_TRANSPOSED)}
    if base_format.options.stores_transpose:
        params |= _transposed(params)
    return dataclasses.replace(model, params=params)


def _transposed(params: Base) -> Base:
    """Returns the transposed copy of each fp8 weight, by path."""
    copies: Base = {}
    for path, values in params.items():
        if not path.endswith(_VALUES):
            continue
        path, where = path.removesuffix(_VALUES) + _TRANSPOSED, None
        if isinstance(values.sharding, NamedSharding):
            device_mesh = values.sharding.mesh
            fsdp = dict(device_mesh.shape).get(FSDP, 1)
            spec = base_spec(path, values.shape[::-1], fsdp)
            where = NamedSharding(device_mesh, spec)
        copies[path] = _transpose(where)(values)
    return copies


def _transpose(where: NamedSharding | None):
    # Without a mesh, the copy is as little bound to a device as the weight itself.
    return jax.jit(lambda values: values.T, out_shardings=where)


def describe_base(spec: DecoderSpec) -> str:
    """Describes how a quantized base is stored and multiplied."""
    base, name = spec.options.base_format, spec.options.implementation
    assert base is not None
    dtype = spec.options.dtype.name
    if not base.options.multiplies_forward:
        text = f"dequantized to {dtype} layer by layer for the products of {name}"
    elif base.options.multiplies_backward:
        text = f"fp8 products of {name} forward and backward, " + (
            "with a second, transposed copy of the weights"
            if base.options.stores_transpose
            else "with one copy of the weights"
        )
    else:
        text = (
            f"fp8 products of {name} forward, dequantized to {dtype} layer by layer "
            "backward"
        )
    kept = [path.removeprefix("layers.") for path in base.kept]
    if kept:
        shown = ", ".join(kept[:4]) + (", ..." if len(kept) > 4 else "")
        text += f"; {counted(len(kept), 'linear')} kept in {dtype}: {shown}"
    return f"{base.name}, {text}"
