"""Memory that calls of linears take beside their results."""

from collections.abc import Iterable

from jaxlora.families.model_config import LayerLinear
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.trained_tensors import MAGNITUDE
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
    """Returns the bytes that the largest call of linears takes beside its results.

    These are dequantized weights, transposed ones, the products of which the norms of
    DoRA are made, and the matrices of VeRA. They are freed when the call has ended.

    Args:
        spec: The decoder, or one stage of it.
    """
    base, of_norms = spec.options.base_format, _norm_bytes(spec)
    of_vera = _vera_bytes(spec)
    if base is None:
        return of_norms + of_vera
    each = _bytes_per_weight(spec, base)
    calls: dict[tuple[int, str], int] = {}
    for number in spec.layer_numbers:
        for linear in _quantized(spec, base, number):
            call = number, _TOGETHER.get(linear.name, linear.name)
            size = each * linear.in_features * linear.out_features
            calls[call] = calls.get(call, 0) + size
    return max(of_norms, *calls.values(), 0) + of_vera


def _vera_bytes(spec: DecoderSpec) -> int:
    """Bytes of the matrices of VeRA of one call of linears, and of their gradients."""
    if spec.slots is None or not spec.slots.has_vera:
        return 0
    calls: dict[tuple[str, str], int] = {}
    for path in spec.adapted:
        _, layer, name = path.split(".", 2)
        linear, call = spec.linear(path), (layer, _TOGETHER.get(name, name))
        size = linear.in_features + linear.out_features
        calls[call] = calls.get(call, 0) + size
    each = 2 * 4 * spec.slots.num_slots * spec.slots.rank  # two in float32
    return each * max(calls.values(), default=0)


def _norm_bytes(spec: DecoderSpec) -> int:
    """Bytes for the norms of DoRA of one linear: see `column_norms`."""
    if spec.slots is None or MAGNITUDE not in spec.slots.tensors:
        return 0
    products = 2 * 4 * spec.slots.num_slots * spec.slots.rank  # two in float32
    sizes = [0]
    for path in spec.adapted:
        linear, is_dense = spec.linear(path), not spec.options.weight_format(path)
        copy = 0 if is_dense else linear.in_features * spec.options.dtype.itemsize
        sizes.append(linear.out_features * (products + copy))
    return max(sizes)


def _bytes_per_weight(spec: DecoderSpec, base: BaseFormat) -> int:
    if not base.options.multiplies_backward:
        return spec.options.dtype.itemsize
    backend = get_backend(spec.options.implementation)
    return 1 if backend.reads_transpose and not base.options.stores_transpose else 0


def _quantized(
    spec: DecoderSpec, base: BaseFormat, number: int
) -> Iterable[LayerLinear]:
    return (
        linear
        for name, linear in spec.config.linears().items()
        if base.quantizes(f"layers.{number}.{name}")
    )
