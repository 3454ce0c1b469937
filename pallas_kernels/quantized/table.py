"""The table of formats of quantized weights. A new format is one entry and one file."""

from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.int8 import Int8Weight
from jaxlora.pallas_kernels.quantized.nf4 import Nf4Weight
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight

FORMATS: dict[str, type[QuantizedWeight]] = {
    weight.format: weight for weight in (Fp8Weight, Int8Weight, Nf4Weight)
}
