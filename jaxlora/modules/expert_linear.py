"""Flax module: a frozen linear of each expert, with one adapter for each slot."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxlora.modules.base_param import BaseParam, SlotVariable
from jaxlora.modules.quantized_kernel import QuantizedKernel
from jaxlora.modules.routing import Place, Routing, live_scaling
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.lora import VARIANT as LORA
from jaxlora.modules.variants.variant import TrainedTensor
from jaxlora.pallas_kernels import Dropout, Projection, QuantizedWeight
from jaxlora.sharding.tensor import counted_once, first_index


class ExpertLinear(nnx.Module):
    """`x W[e] + bias[e] + scaling[g] * dropout(x) A[g, e] B[g, e]`, e and g by row.

    All experts have the same rank and scaling in a slot. Of the variants of LoRA, there
    is LoRA alone.

    Attributes:
        kernel: Frozen weights W, X K N, or quantized ones.
        bias: Frozen bias, X N, or None.
        lora_a: A of each slot and expert, G X K R.
        lora_b: B of each slot and expert, G X R N.
        scaling: `lora_alpha / rank` of each slot, G.
        dropout: Dropout rate of each slot, G.
        rank: Rank of each slot's adapter here, G; 0 where it does not adapt.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_experts: int,
        slots: SlotShape | None = None,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        projection: int = 0,
        kernel: QuantizedWeight | None = None,
        input_parts: int = 1,
    ):
        """Makes the linears, with weights of zero and empty slots.

        Args:
            in_features: K.
            out_features: N.
            num_experts: X.
            slots: Shape of the slot tables; None: plain frozen linears.
            use_bias: Whether they add biases.
            dtype: Dtype of kernels and activations.
            projection: Keys the dropout masks; differs between linears that share x.
            kernel: Quantized weights, whose arrays have a first axis of X; None: those
                of zero in `dtype`.
            input_parts: Devices among which the input features are divided. K is the
                number of this device then, and the output a term of a sum over them.
        """
        self.sizes = x, k, n = num_experts, in_features, out_features
        self.kernel = (
            BaseParam(jnp.zeros(self.sizes, dtype))
            if kernel is None
            else QuantizedKernel(kernel)
        )
        self.bias = BaseParam(jnp.zeros((x, n), dtype)) if use_bias else None
        self.projection, self.slots = projection, slots
        self.input_parts = input_parts
        if slots is None:
            return
        g, rank = slots.num_slots, slots.rank_of(is_of_experts=True)
        for tensor in LORA.tensors:
            shape = g, x, *tensor.shape(k, n, rank)
            setattr(self, tensor.name, nnx.LoRAParam(jnp.zeros(shape, jnp.float32)))
        self.scaling = SlotVariable(jnp.zeros((g,), jnp.float32))
        self.dropout = SlotVariable(jnp.zeros((g,), jnp.float32))
        self.rank = SlotVariable(jnp.zeros((g,), jnp.int32))
        for variant in slots.variants:
            for name, one in variant.settings(slots, k, n).items():
                zeros = jnp.zeros((g, *one.shape), one.dtype)
                setattr(self, name, SlotVariable(zeros))

    @property
    def place(self) -> Place:
        """Place among the linears of a layer, which keys the dropout masks."""
        return None, self.projection

    def for_kernels(self, routing: Routing, num_adapters: int) -> Projection:
        """Returns what the kernels read.

        Args:
            routing: Slot of each row, and the keys of dropout masks.
            num_adapters: Number of slots of the linears that run together, if this one
                has none.
        """
        own = self.kernel
        w = own.weight if isinstance(own, QuantizedKernel) else own[...]
        bias = None
        if self.bias is not None:
            bias = counted_once(self.bias[...], self.input_parts)
        if self.slots is None:
            (x, k, n), g = self.sizes, num_adapters
            return Projection(
                w=w,
                bias=bias,
                a=jnp.zeros((x * g, k, 1), jnp.float32),
                b=jnp.zeros((x * g, 1, n), jnp.float32),
                scaling=jnp.zeros(g, jnp.float32),
                rank=jnp.zeros(g, jnp.int32),
            )
        dropout, rank = None, self.rank[...]
        if routing.token_index is not None:
            key = routing.keys[self.place]
            first = None
            if self.input_parts > 1:
                first = first_index(self.sizes[1], self.input_parts)
            given = key, self.dropout[...], routing.token_index
            dropout = Dropout(*given, first_feature=first)
        return Projection(
            w=w,
            bias=bias,
            a=self._by_slot(LORA_A),
            b=self._by_slot(LORA_B),
            scaling=live_scaling(self.scaling[...], rank),
            rank=rank,
            dropout=dropout,
            settings=routing.settings.get(self.place),
        )

    def _by_slot(self, tensor: TrainedTensor) -> Float[Array, "XG ..."]:
        """Returns a table as kernels take it, all slots of an expert together."""
        table = getattr(self, tensor.name)[...]
        g, x, *sizes = table.shape
        return table.swapaxes(0, 1).reshape(x * g, *sizes)
