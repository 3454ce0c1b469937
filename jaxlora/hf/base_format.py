"""Decides in which format the linears of a base model are held."""

import logging
import pathlib
from collections.abc import Iterable, Sequence

from jaxlora.errors import ConfigError, ModelError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint
from jaxlora.hf.files import read_json
from jaxlora.hf.kept_linears import kept_linears
from jaxlora.hf.quantized.config import read_quantization
from jaxlora.hf.quantized.stored import StorageLayout
from jaxlora.models.base_format import BaseFormat
from jaxlora.pallas_kernels import OPTIONS, WeightOptions

logger = logging.getLogger(__name__)


def find_base_format(
    checkpoint: Checkpoint,
    quantize: str | None,
    keep_bf16: Sequence[str] = (),
    *,
    fp8_weight_copies: int = 1,
) -> BaseFormat | None:
    """Returns the format of a base model's linears; None: they are not quantized.

    A quantized checkpoint is taken as it is.

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


def planned_base_format(
    folder: pathlib.Path,
    config: ModelConfig,
    quantize: str | None,
    keep_bf16: Sequence[str] = (),
    *,
    fp8_weight_copies: int = 1,
) -> BaseFormat | None:
    """Returns what `find_base_format` would; the weights need not exist.

    If they do not exist, and config.json says that they are quantized, all linears are
    assumed to be, with double quantization in the case of nf4.

    Args:
        folder: Folder with config.json.
        config: The model.
        quantize: See `find_base_format`.
        keep_bf16: See `find_base_format`.
        fp8_weight_copies: See `find_base_format`.

    Raises:
        ConfigError: For the same reasons as in `find_base_format`.
        ModelError: For the same reasons as in `find_base_format`.
    """
    try:
        checkpoint = open_checkpoint(folder)
    except ModelError as error:
        logger.info("the weights were not looked at: %s", error)
    else:
        return find_base_format(
            checkpoint, quantize, keep_bf16, fp8_weight_copies=fp8_weight_copies
        )
    layout = read_quantization(read_json(folder / "config.json"))
    if layout is None:
        return _of_dense(config, quantize, keep_bf16, fp8_weight_copies)
    kept = kept_linears(config, keep_bf16)
    options = OPTIONS[layout.format]()
    return _of_layout(config, layout, quantize, kept, options, fp8_weight_copies)


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
