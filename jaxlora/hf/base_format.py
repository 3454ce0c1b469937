"""Decides in which format the linears of a base model are held."""

from collections.abc import Iterable, Sequence

from jaxlora.common.patterns import Patterns
from jaxlora.errors import ConfigError, ModelError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.checkpoint import Checkpoint
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.hf.quantized.stored import StorageLayout
from jaxlora.models.base_format import BaseFormat
from jaxlora.pallas_kernels import OPTIONS, WeightOptions


def find_base_format(
    checkpoint: Checkpoint,
    quantize: str | None,
    keep_bf16: Sequence[str] = (),
    *,
    fp8_weight_copies: int = 1,
) -> BaseFormat | None:
    """Returns the format of a base model's linears; None: they are not quantized.

    A quantized checkpoint is taken as it is. If its weights are not there, all its
    linears are assumed to be quantized, with double quantization in the case of nf4.

    Args:
        checkpoint: The checkpoint; only the headers of its files are read.
        quantize: Name in `FORMATS`; None: the format of the checkpoint.
        keep_bf16: Expressions for linears that are not quantized; see `kept_linears`.
        fp8_weight_copies: 2 adds the transpose of each fp8 weight.

    Raises:
        ConfigError: A setting is unknown, or does not fit the model or the others.
        ModelError: The checkpoint is quantized in another format, or the format cannot
            hold a weight of its shape.
    """
    config, linears = checkpoint.config, checkpoint.quantized
    if not checkpoint.files and (layout := checkpoint.layout) is not None:
        kept = kept_linears(config, keep_bf16)
        options = OPTIONS[layout.format]()
        return _of_layout(config, layout, quantize, kept, options, fp8_weight_copies)
    if not linears:
        return _of_dense(config, quantize, keep_bf16, fp8_weight_copies)
    layout = next(iter(linears.values())).layout
    paths = checkpoint.linear_paths
    kept = tuple(path for path in paths if f"{path}.kernel" not in linears)
    if keep_bf16:
        _check_kept(kept_linears(config, keep_bf16), kept, layout)
    stored = {x.options for x in linears.values()}
    if len(stored) > 1:
        raise ModelError(
            f"{checkpoint.folder}: some linears have double quantization and others "
            "have not. Save the model again with one setting for all."
        )
    options = stored.pop()
    return _of_layout(config, layout, quantize, kept, options, fp8_weight_copies)


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
                f"of a layer are: {', '.join(config.linears())}; a whole name is "
                f"{names[0]!r}. The embedding, the head and norms are never quantized."
            )
        kept |= found
    if len(kept) == len(names):
        raise ConfigError(
            f"keep_bf16={list(keep_bf16)} matches every linear of the model, so that "
            "nothing would be quantized. Leave out quantize_base and keep_bf16."
        )
    return tuple(linear_path(name) for name in names if name in kept)


def _of_dense(
    config: ModelConfig, quantize: str | None, keep_bf16: Sequence[str], copies: int
) -> BaseFormat | None:
    if quantize is None:
        if keep_bf16 or copies != 1:
            raise ConfigError(
                f"keep_bf16={list(keep_bf16)} and fp8_weight_copies={copies} have a "
                "meaning only for a quantized base. Give a format, or leave them out."
            )
        return None
    kept = kept_linears(config, keep_bf16)
    if quantize not in OPTIONS:
        names = ", ".join(OPTIONS)
        raise ConfigError(f"quantize={quantize!r}; wanted one of {names}.")
    return _checked(config, OPTIONS[quantize](), kept, copies)


def _of_layout(
    config: ModelConfig,
    layout: StorageLayout,
    quantize: str | None,
    kept: tuple[str, ...],
    options: WeightOptions,
    copies: int,
) -> BaseFormat:
    if quantize not in (None, layout.format):
        raise ModelError(
            f"the checkpoint is quantized already, as {layout.kind}, and is used as it "
            f"is: quantizing it again as {quantize} would add a second error. Leave "
            f"{quantize} out, take a dense checkpoint, or make one of this checkpoint "
            "with `jaxlora convert`."
        )
    return _checked(config, options, kept, copies)


def _checked(
    config: ModelConfig, options: WeightOptions, kept: tuple[str, ...], copies: int
) -> BaseFormat:
    base = BaseFormat(options=options.replace(transposed=copies == 2), kept=kept)
    if copies not in (1, 2) or base.options.stores_transpose != (copies == 2):
        raise ConfigError(
            f"fp8_weight_copies={copies} with weights in {base.name}; wanted 1, or 2 "
            "for fp8."
        )
    for linear in config.linears().values():
        # The linears of all layers have the same shapes.
        paths = (f"layers.{i}.{linear.name}" for i in range(config.num_layers))
        if any(map(base.quantizes, paths)):
            _check_shape(base, linear.name, linear.out_features, linear.in_features)
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
