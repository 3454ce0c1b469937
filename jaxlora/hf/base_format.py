"""Decides in which format the linears of a base model are held."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxlora.common.patterns import Patterns
from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.checkpoint import Checkpoint
from jaxlora.hf.quantized.stored import StorageLayout
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.config import ModelConfig, is_of_expert, shared_path
from jaxlora.models.structure import (
    linear_names,
    linear_path,
    linear_shapes,
    linears,
)
from jaxlora.pallas_kernels import OPTIONS


def find_base_format(
    checkpoint: Checkpoint,
    quantize: str | None,
    keep_bf16: Sequence[str] = (),
    *,
    quantize_args: Mapping[str, Any] | None = None,
) -> BaseFormat | None:
    """Returns the format of a base model's linears; None: they are not quantized.

    A quantized checkpoint is taken as it is. If its weights are not there, all linears
    that its layout is for are assumed to be quantized, with the default options of the
    format.

    Args:
        checkpoint: The checkpoint; only the headers of its files are read.
        quantize: Name in `FORMATS`; None: the format of the checkpoint.
        keep_bf16: Expressions for linears that are not quantized; see `kept_linears`.
        quantize_args: Settings of the format, by name.

    Raises:
        ConfigError: A setting is unknown, or does not fit the model or the others.
        ModelError: The checkpoint is quantized in another format, or the format cannot
            hold a weight of its shape.
    """
    config, linears, settings = (
        checkpoint.config,
        checkpoint.quantized,
        quantize_args or {},
    )
    if not checkpoint.files and (layout := checkpoint.layout) is not None:
        kept = kept_linears(config, keep_bf16)
        if layout.is_of_experts:
            dense = (p for p in checkpoint.linear_paths if not is_of_expert(p))
            kept = tuple(dict.fromkeys((*kept, *dense)))
        stored = BaseFormat(options=OPTIONS[layout.format](), kept=kept)
        return _of_layout(config, layout, quantize, stored, settings)
    if not linears:
        return _of_dense(config, quantize, keep_bf16, settings)
    layout = next(iter(linears.values())).layout
    paths = checkpoint.linear_paths
    kept = tuple(
        dict.fromkeys(shared_path(p) for p in paths if f"{p}.kernel" not in linears)
    )
    dense = set(kept)
    for path in paths:
        if f"{path}.kernel" in linears and shared_path(path) in dense:
            raise ModelError(
                f"{checkpoint.folder}: {path} is quantized as {layout.kind}, and the "
                "same linear of other experts is not, but their weights are one array. "
                "Make a dense checkpoint of it with `jaxlora convert`."
            )
    if keep_bf16:
        _check_kept(kept_linears(config, keep_bf16), kept, layout)
    options = {x.options for x in linears.values()}
    if len(options) > 1:
        found = " and others by ".join(sorted(map(str, options)))
        raise ModelError(
            f"{checkpoint.folder}: some linears are quantized by {found}. Save the "
            "model again with one setting for all."
        )
    stored = BaseFormat(options=options.pop(), kept=kept)
    return _of_layout(config, layout, quantize, stored, settings)


def kept_linears(config: ModelConfig, keep_bf16: Sequence[str]) -> tuple[str, ...]:
    """Returns our paths of the linears that are not quantized, in the model's order.

    Args:
        config: The model.
        keep_bf16: Regular expressions for the end of a linear's name, after a dot, such
            as `down_proj` or `layers.0.*`.

    Raises:
        ConfigError: An expression is invalid, takes too long to match, or matches no
            linear; or all linears are kept.
    """
    patterns, names = Patterns("the run"), linear_names(config)
    kept = set()
    for expression in keep_bf16:
        patterns.check("keep_bf16", expression, is_end=True)
        found = {name for name in names if patterns.match_suffix(expression, name)}
        if not found:
            raise ConfigError(
                f"keep_bf16 {expression!r} matches no linear of the model. The linears "
                f"of a layer are: {', '.join(linears(config))}; a whole name is "
                f"{names[0]!r}. The embedding, the head and norms are never quantized."
            )
        kept |= found
    _check_experts(keep_bf16, kept, names)
    if len(kept) == len(names):
        raise ConfigError(
            f"keep_bf16={list(keep_bf16)} matches every linear of the model, so that "
            "nothing would be quantized. Leave out quantize_base and keep_bf16."
        )
    paths = (shared_path(linear_path(name)) for name in names if name in kept)
    return tuple(dict.fromkeys(paths))


def _check_experts(
    keep_bf16: Sequence[str], kept: Collection[str], names: Sequence[str]
) -> None:
    """Checks that a linear is kept in all experts of a layer, or in none."""
    shared = {shared_path(name) for name in kept if is_of_expert(name)}
    for name in names:
        if name not in kept and shared_path(name) in shared:
            raise ConfigError(
                f"keep_bf16={list(keep_bf16)} matches the same linear of other experts "
                f"as {name}, and not this one, but their weights are one array. Match "
                "all experts, such as by 'experts.*' or 'experts.*.down_proj'."
            )


def change_settings(base: BaseFormat, settings: Mapping[str, Any]) -> BaseFormat:
    """Returns the format of quantized weights with the settings of a user.

    Args:
        base: The format that the weights have.
        settings: Settings of the format, by name.

    Raises:
        ConfigError: The format has no such setting or value, or other weights would be
            needed.
    """
    try:
        options = base.options.of_same_weights(settings)
    except ValueError as error:
        raise _refused(error) from None
    return dataclasses.replace(base, options=options)


def _of_dense(
    config: ModelConfig,
    quantize: str | None,
    keep_bf16: Sequence[str],
    settings: Mapping[str, Any],
) -> BaseFormat | None:
    if quantize is None:
        if keep_bf16 or settings:
            raise ConfigError(
                f"keep_bf16={list(keep_bf16)} and settings of a format, "
                f"{dict(settings)}, have a meaning only for a quantized base, and the "
                "base is not quantized. Give a format, or leave them out."
            )
        return None
    kept = kept_linears(config, keep_bf16)
    if quantize not in OPTIONS:
        names = ", ".join(OPTIONS)
        raise ConfigError(f"quantize={quantize!r}; wanted one of {names}.")
    try:
        options = OPTIONS[quantize]().with_settings(settings)
    except ValueError as error:
        raise _refused(error) from None
    return _checked(config, BaseFormat(options=options, kept=kept))


def _of_layout(
    config: ModelConfig,
    layout: StorageLayout,
    quantize: str | None,
    stored: BaseFormat,
    settings: Mapping[str, Any],
) -> BaseFormat:
    if quantize not in (None, layout.format):
        raise ModelError(
            f"the checkpoint is quantized already, as {layout.kind}, and is used as it "
            f"is: quantizing it again as {quantize} would add a second error. Leave "
            f"{quantize} out, take a dense checkpoint, or make one of this checkpoint "
            "with `jaxlora convert`."
        )
    return _checked(config, change_settings(stored, settings))


def _refused(error: ValueError) -> ConfigError:
    return ConfigError(
        f"settings of the quantized base: {error}. Change it, or leave it out."
    )


def _checked(config: ModelConfig, base: BaseFormat) -> BaseFormat:
    paths = ((linear_path(n), shape) for n, shape in linear_shapes(config).items())
    quantized = dict.fromkeys(
        (shared_path(path).split(".", 2)[2], shape)
        for path, shape in paths
        if base.quantizes(path)
    )
    for name, (k, n) in quantized:
        _check_shape(base, name, n, k)
    return base


def _check_shape(base: BaseFormat, name: str, n: int, k: int) -> None:
    try:
        base.shapes(n, k)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from None


def _check_kept(
    wanted: Iterable[str], kept: Sequence[str], layout: StorageLayout
) -> None:
    for path in wanted:
        if path not in kept:
            raise ConfigError(
                f"keep_bf16 matches {path}, which the checkpoint stores quantized, as "
                f"{layout.kind}. Leave out keep_bf16, or take a dense checkpoint."
            )
