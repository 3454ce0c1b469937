"""The table of formats of quantized weights. A new format is one entry and one file."""

from jaxlora.pallas_kernels.quantized.fp8 import Fp8Options
from jaxlora.pallas_kernels.quantized.int8 import Int8Options
from jaxlora.pallas_kernels.quantized.mxfp4 import Mxfp4Options
from jaxlora.pallas_kernels.quantized.nf4 import Nf4Options
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight, WeightOptions

OPTIONS: dict[str, type[WeightOptions]] = {
    options.weight.format: options
    for options in (Fp8Options, Int8Options, Mxfp4Options, Nf4Options)
}
FORMATS: dict[str, type[QuantizedWeight]] = {
    name: options.weight for name, options in OPTIONS.items()
}
