"""Formats of frozen quantized base weights."""

from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.int8 import Int8Weight
from jaxlora.pallas_kernels.quantized.nf4 import Nf4Weight
from jaxlora.pallas_kernels.quantized.rows import quantize_rows, row_scale
from jaxlora.pallas_kernels.quantized.table import FORMATS
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight

__all__ = [
    "FORMATS",
    "Fp8Weight",
    "Int8Weight",
    "Nf4Weight",
    "QuantizedWeight",
    "quantize_rows",
    "row_scale",
]
