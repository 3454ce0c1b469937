"""Memory of weights that linears on a quantized base make for each of their calls."""

from collections.abc import Iterable

from jaxlora.families.model_config import LayerLinear
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels import get_backend

# Linears that share their input run in one call; see `apply_together`.
_TOGETHER = {
    "self_attn.q_proj": "q, k and v",
    "self_attn.k_proj": "q, k and v",
    "self_attn.v_proj": "q, k and v",
    "mlp.gate_proj": "gate and up",
    "mlp.up_proj": "gate and up",
}


def scratch_bytes(spec: DecoderSpec) -> int:
    """Returns the bytes that the largest call of linears takes for its own weights.

    These are dequantized weights, or transposed fp8 weights. They are freed when the
    call has ended.

    Args:
        spec: The decoder, or one stage of it.
    """
    base = spec.options.base_format
    if base is None:
        return 0
    each = _bytes_per_weight(spec, base)
    calls: dict[tuple[int, str], int] = {}
    for number in spec.layer_numbers:
        for linear in _quantized(spec, base, number):
            call = number, _TOGETHER.get(linear.name, linear.name)
            size = each * linear.in_features * linear.out_features
            calls[call] = calls.get(call, 0) + size
    return max(calls.values(), default=0)


def _bytes_per_weight(spec: DecoderSpec, base: BaseFormat) -> int:
    if not base.options.multiplies_backward:
        return spec.options.dtype.itemsize
    backend = get_backend(spec.options.implementation)
    return 1 if backend.transposes_fp8 and not base.options.stores_transpose else 0


def _quantized(
    spec: DecoderSpec, base: BaseFormat, number: int
) -> Iterable[LayerLinear]:
    return (
        linear
        for name, linear in spec.config.linears().items()
        if base.quantizes(f"layers.{number}.{name}")
    )
