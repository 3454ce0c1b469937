"""The layouts of bitsandbytes: int8, and nf4 with and without double quantization."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.common.json_file import parse_json, shown
from jaxlora.errors import ModelError
from jaxlora.hf.quantized.stored import (
    StorageLayout,
    StoredTensor,
    check_scales,
    host_weight,
)
from jaxlora.pallas_kernels import Int8Weight, Nf4Weight, QuantizedWeight
from jaxlora.pallas_kernels.quantized.nf4 import BLOCK, DYNAMIC, NESTED_BLOCK, NF4

_ROW_MAJOR = 0  # the other orders were for certain GPUs
_ABSMAX, _NESTED = "weight.absmax", "weight.nested_absmax"
_CODEBOOK, _NESTED_CODEBOOK = "weight.quant_map", "weight.nested_quant_map"
_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsandbytesInt8(StorageLayout):
    """`weight` [N, K] in int8 and SCB [N]: `W[n, k] = weight[n, k] * SCB[n] / 127`."""

    kind: str = "bitsandbytes int8"
    format: str = Int8Weight.format

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the weight, its scales, and the order of its values, if given."""
        tensors = (
            StoredTensor(name="weight", dtypes=("I8",), shapes=(shape,)),
            StoredTensor(name="SCB", dtypes=("F32",), shapes=(shape[:1],)),
        )
        if not has("weight_format"):
            return tensors
        order = StoredTensor(name="weight_format", dtypes=("U8",), shapes=((), (1,)))
        return (*tensors, order)

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> QuantizedWeight:
        """Returns the weight with SCB / 127 as its scale.

        Raises:
            ModelError: A scale is negative, or the values are not in row-major order.
        """
        order = arrays.get("weight_format", np.uint8(_ROW_MAJOR))
        if order.item() != _ROW_MAJOR:
            raise ModelError(
                f"{where}.weight_format is {order.item()}, an order of the values for "
                f"certain GPUs; only {_ROW_MAJOR}, row-major order, is read. Save the "
                "model again with a newer bitsandbytes."
            )
        check_scales(arrays["SCB"], f"{where}.SCB")
        return host_weight(
            self.format, values=arrays["weight"], scale=arrays["SCB"] / np.float32(127)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsandbytesNf4(StorageLayout):
    """Codes of two values per byte, in row-major order, and absmax of blocks of 64.

    With double quantization, absmax is a code itself, `weight.nested_absmax` belongs to
    blocks of 256 of them, and the JSON object in `_STATE` holds their mean.
    """

    kind: str = "bitsandbytes nf4"
    format: str = Nf4Weight.format

    def options(self, tensors: Sequence[str]) -> dict[str, Any]:
        """Returns whether there is double quantization."""
        return {"double_quant": _NESTED in tensors}

    def tensors(
        self, shape: tuple[int, int], has: Callable[[str], bool]
    ) -> tuple[StoredTensor, ...]:
        """Returns the codes, absmax, the codebooks and the JSON object."""
        values, is_nested = shape[0] * shape[1], has(_NESTED)
        blocks = -(-values // BLOCK)
        tensors = {
            "weight": ("U8", ((-(-values // 2), 1),)),
            _ABSMAX: ("U8" if is_nested else "F32", ((blocks,),)),
            _CODEBOOK: ("F32", (NF4.shape,)),
            _STATE: ("U8", ()),
        }
        if is_nested:
            tensors[_NESTED] = ("F32", ((-(-blocks // NESTED_BLOCK),),))
            tensors[_NESTED_CODEBOOK] = ("F32", (DYNAMIC.shape,))
        return tuple(
            StoredTensor(name=name, dtypes=(dtype,), shapes=shapes)
            for name, (dtype, shapes) in tensors.items()
        )

    def weight(
        self, shape: tuple[int, int], arrays: Mapping[str, np.ndarray], where: str
    ) -> QuantizedWeight:
        """Returns the weight as it is.

        Raises:
            ModelError: The codebooks, the sizes of blocks or the shape are others.
        """
        n, k = shape
        is_nested = _NESTED in arrays
        wanted = {"blocksize": BLOCK, "shape": [n, k], "quant_type": "nf4"}
        if is_nested:
            wanted["nested_blocksize"] = NESTED_BLOCK
        state = _read_state(arrays[_STATE], wanted, f"{where}.{_STATE}")
        if k % BLOCK:
            raise ModelError(
                f"{where}.weight has K={k}, not a multiple of {BLOCK}, so that its "
                "blocks reach from one row into the next; this is not supported. "
                "Quantize a dense checkpoint to int8 or fp8 instead."
            )
        _check_codebook(arrays[_CODEBOOK], NF4, f"{where}.{_CODEBOOK}")
        values, absmax = arrays["weight"].reshape(n, -1), arrays[_ABSMAX].reshape(n, -1)
        if not is_nested:
            check_scales(absmax, f"{where}.{_ABSMAX}")
            return host_weight(self.format, values=values, absmax=absmax)
        _check_codebook(
            arrays[_NESTED_CODEBOOK], DYNAMIC, f"{where}.{_NESTED_CODEBOOK}"
        )
        return host_weight(
            self.format,
            values=values,
            absmax=absmax,
            nested_absmax=arrays[_NESTED],
            nested_offset=_offset(state, f"{where}.{_STATE}"),
        )


def _read_state(
    array: np.ndarray, wanted: Mapping[str, object], where: str
) -> dict[str, Any]:
    """Reads the JSON object of a linear and compares it with the supported values."""
    try:
        state = parse_json(array.tobytes())
    except ValueError as error:
        raise ModelError(
            f"{where} is not JSON: {error}. The file is damaged: fetch or copy it "
            "again."
        ) from None
    for key, value in wanted.items():
        found = state.get(key) if isinstance(state, dict) else None
        if found != value:
            raise ModelError(
                f"{where} has {key}={shown(found)}; only {value!r} is supported here. "
                "Quantize the dense checkpoint with quantize=nf4 instead."
            )
    return state


def _offset(state: Mapping[str, Any], where: str) -> np.ndarray:
    offset = state.get("nested_offset")
    is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
    with np.errstate(over="ignore"):
        value = np.float32(offset) if is_number else np.float32(np.nan)
    if not np.isfinite(value):
        raise ModelError(
            f"{where} has nested_offset={shown(offset)}; wanted a finite number. The "
            "file is damaged: fetch or copy it again."
        )
    return np.asarray(value)


def _check_codebook(found: np.ndarray, wanted: np.ndarray, where: str) -> None:
    # Versions of bitsandbytes and torch compute them with different last digits.
    if not np.allclose(found, wanted, rtol=1e-4, atol=1e-9):
        raise ModelError(
            f"{where} is not the codebook of bitsandbytes: it differs by up to "
            f"{np.abs(found - wanted).max():.3g}. Other codebooks are not supported."
        )
