"""Reads the `quantization_config` of a config.json."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.hf.quantized.bitsandbytes import BitsandbytesInt8, BitsandbytesNf4
from jaxlora.hf.quantized.stored import (
    BlockLayout,
    Mxfp4Layout,
    RowLayout,
    StorageLayout,
)
from jaxlora.pallas_kernels import Fp8Weight, Int8Weight

KEY = "quantization_config"
_SUPPORTED = (
    "compressed-tensors (format float-quantized or int-quantized: 8 bits, symmetric, "
    "one scale per channel or tensor, or fp8 per block), fbgemm_fp8, fp8 (per "
    "block or tensor), bitsandbytes (nf4 or int8) and mxfp4 (the experts of gpt-oss)"
)
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


def read_quantization(config: Mapping[str, Any]) -> StorageLayout | None:
    """Returns how the linears of a checkpoint are stored; None: as dense weights.

    Args:
        config: Contents of config.json.

    Raises:
        ModelError: The weights are quantized in a way that is not supported.
    """
    quantization = config.get(KEY)
    if quantization is None or quantization == {}:
        return None
    if not isinstance(quantization, dict):
        raise ModelError(
            f"config.json has {KEY}={shown(quantization)}; wanted an object."
        )
    method = quantization.get("quant_method")
    # Old versions of transformers write no method for bitsandbytes.
    if method is None and {"load_in_4bit", "load_in_8bit"} & quantization.keys():
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _READERS:
        _refuse("quant_method", method)
    return _READERS[method](quantization)


def _compressed_tensors(quantization: Mapping[str, Any]) -> StorageLayout:
    if (name := quantization.get("format")) not in _FORMATS:
        _refuse("format", name)
    sparsity = quantization.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        _refuse("sparsity_config", sparsity)
    if transform := quantization.get("transform_config"):
        _refuse("transform_config", transform)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        _refuse("config_groups", groups)
    layouts = {_group_layout(group) for group in groups.values()}
    if len(layouts) > 1:
        _refuse("config_groups of several kinds", groups)
    return layouts.pop()


def _group_layout(group: Any) -> StorageLayout:
    """Returns the layout of one group of linears of compressed-tensors."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        _refuse("config_groups with weights", weights)
    number, strategy = weights.get("type"), weights.get("strategy")
    is_symmetric = weights.get("symmetric", True) is True
    if weights.get("num_bits") != 8 or not is_symmetric or weights.get("actorder"):
        _refuse("weights", weights)
    if number == "float" and strategy == "block":
        return BlockLayout(
            kind="compressed-tensors fp8 per block",
            block=_block(weights, "block_structure"),
            scale_name="weight_scale",
        )
    formats = {"float": Fp8Weight.format, "int": Int8Weight.format}
    if number not in formats or strategy not in ("channel", "tensor"):
        _refuse("weights", weights)
    return _row_layout("compressed-tensors", formats[number], strategy)


def _row_layout(method: str, name: str, strategy: str) -> RowLayout:
    return RowLayout(kind=f"{method} {name} per {strategy}", format=name)


def _fp8(quantization: Mapping[str, Any]) -> StorageLayout:
    if quantization.get("fmt", "e4m3") != "e4m3":
        _refuse("fmt", quantization["fmt"])
    # transformers has blocks of 128 by 128 where the key is missing.
    if quantization.get("weight_block_size", "") is None:
        kind, scale_name = "fp8 per tensor", "weight_scale_inv"
        return RowLayout(kind=kind, format=Fp8Weight.format, scale_name=scale_name)
    return BlockLayout(
        kind="fp8 per block",
        block=_block(quantization, "weight_block_size"),
        scale_name="weight_scale_inv",
    )


def _block(settings: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Returns the rows and columns of a block."""
    block = settings.get(key)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        _refuse(key, block)
    return block[0], block[1]


def _bitsandbytes(quantization: Mapping[str, Any]) -> StorageLayout:
    if quantization.get("load_in_8bit"):
        return BitsandbytesInt8()
    if not quantization.get("load_in_4bit"):
        _refuse("load_in_4bit and load_in_8bit", None)
    if (kind := quantization.get("bnb_4bit_quant_type")) != "nf4":
        _refuse("bnb_4bit_quant_type", kind)
    if (storage := quantization.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
        _refuse("bnb_4bit_quant_storage", storage)
    return BitsandbytesNf4()


def _refuse(key: str, value: Any) -> NoReturn:
    raise ModelError(
        f"config.json has {KEY} with {key}={shown(value)}, which is not supported. "
        f"Supported: {_SUPPORTED}. Use another checkpoint of the model, or a dense one "
        "with quantize_base."
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], StorageLayout]] = {
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": lambda _: _row_layout("fbgemm", Fp8Weight.format, "channel"),
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda _: Mxfp4Layout(),
}
