"""Formats of frozen quantized base weights."""

from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.int8 import Int8Weight
from jaxlora.pallas_kernels.quantized.mxfp4 import Mxfp4Weight
from jaxlora.pallas_kernels.quantized.nf4 import Nf4Weight
from jaxlora.pallas_kernels.quantized.rows import quantize_rows, row_scale
from jaxlora.pallas_kernels.quantized.table import FORMATS, OPTIONS
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight, WeightOptions

__all__ = [
    "FORMATS",
    "OPTIONS",
    "Fp8Weight",
    "Int8Weight",
    "Mxfp4Weight",
    "Nf4Weight",
    "QuantizedWeight",
    "WeightOptions",
    "quantize_rows",
    "row_scale",
]
