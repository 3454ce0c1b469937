"""LoRA kernels: arrays in, arrays out. Knows no model and no job."""

from pallas_kernels.dropout import Dropout, dropout_keys
from pallas_kernels.mosaic.layer import unsupported as mosaic_unsupported
from pallas_kernels.multi_lora_linear import (
    IMPLEMENTATIONS,
    Implementation,
    multi_lora_linear,
    multi_lora_linears,
)
from pallas_kernels.projection import Projection
from pallas_kernels.reference import multi_lora_linear_reference

__all__ = [
    "IMPLEMENTATIONS",
    "Dropout",
    "Implementation",
    "Projection",
    "dropout_keys",
    "mosaic_unsupported",
    "multi_lora_linear",
    "multi_lora_linear_reference",
    "multi_lora_linears",
]
