"""LoRA kernels as functions of arrays, independent of models and jobs."""

from jaxlora.pallas_kernels.dropout import Dropout, MaskWords, dropout_keys, mask_words
from jaxlora.pallas_kernels.mosaic.compile import compile_program
from jaxlora.pallas_kernels.mosaic.layer import unsupported as mosaic_unsupported
from jaxlora.pallas_kernels.multi_lora_linear import (
    IMPLEMENTATIONS,
    Implementation,
    multi_lora_linear,
    multi_lora_linears,
)
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.reference import multi_lora_linear_reference
from jaxlora.pallas_kernels.settings import KernelSettings, kernel_settings

__all__ = [
    "IMPLEMENTATIONS",
    "Dropout",
    "Implementation",
    "KernelSettings",
    "MaskWords",
    "Projection",
    "compile_program",
    "dropout_keys",
    "kernel_settings",
    "mask_words",
    "mosaic_unsupported",
    "multi_lora_linear",
    "multi_lora_linear_reference",
    "multi_lora_linears",
]
