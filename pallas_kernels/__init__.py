"""LoRA kernels as functions of arrays, independent of models and jobs."""

from jaxlora.pallas_kernels.backends import BACKENDS, Backend, get_backend
from jaxlora.pallas_kernels.dora import DoraGain, column_norms, dora_gain
from jaxlora.pallas_kernels.dropout import Dropout, MaskWords, dropout_keys, mask_words
from jaxlora.pallas_kernels.expert_rows import (
    RowPlan,
    combine_rows,
    gather_rows,
    route_rows,
)
from jaxlora.pallas_kernels.experts import (
    block_rows_for,
    expert_input,
    expert_linears,
    expert_output,
)
from jaxlora.pallas_kernels.given_mask import GivenMask, pack_mask, unpack_mask
from jaxlora.pallas_kernels.mosaic.compile import (
    compile_program,
    lowers_elsewhere,
    prepare_to_load,
    start_workers,
    trace_program,
)
from jaxlora.pallas_kernels.op import (
    LINEAR_RESULTS,
    frozen_linear,
    multi_lora_linear,
    multi_lora_linears,
)
from jaxlora.pallas_kernels.producers import (
    Gate,
    multi_lora_gate,
    norm_gradient,
    produce,
    unsupported_norm_gradient,
    unsupported_producer,
)
from jaxlora.pallas_kernels.projection import (
    KernelSettings,
    LinearShape,
    Projection,
    kernel_settings,
)
from jaxlora.pallas_kernels.quantized import (
    FORMATS,
    OPTIONS,
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
    WeightOptions,
    quantize_rows,
    row_scale,
)
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction

__all__ = [
    "BACKENDS",
    "FORMATS",
    "LINEAR_RESULTS",
    "OPTIONS",
    "Backend",
    "DoraGain",
    "Dropout",
    "Fp8Weight",
    "Gate",
    "GivenMask",
    "Int8Weight",
    "KernelSettings",
    "LinearShape",
    "MaskWords",
    "Mxfp4Weight",
    "Nf4Weight",
    "Projection",
    "QuantizedWeight",
    "RowArguments",
    "RowFunction",
    "RowPlan",
    "WeightOptions",
    "block_rows_for",
    "column_norms",
    "combine_rows",
    "compile_program",
    "dora_gain",
    "dropout_keys",
    "expert_input",
    "expert_linears",
    "expert_output",
    "frozen_linear",
    "gather_rows",
    "get_backend",
    "kernel_settings",
    "lowers_elsewhere",
    "mask_words",
    "multi_lora_gate",
    "multi_lora_linear",
    "multi_lora_linears",
    "norm_gradient",
    "pack_mask",
    "prepare_to_load",
    "produce",
    "quantize_rows",
    "route_rows",
    "row_scale",
    "start_workers",
    "trace_program",
    "unpack_mask",
    "unsupported_norm_gradient",
    "unsupported_producer",
]
