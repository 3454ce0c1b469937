"""Flax module: a frozen linear layer with one adapter for each slot."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxlora.modules.base_param import BaseParam, SlotVariable
from jaxlora.modules.quantized_kernel import QuantizedKernel, make_kernel
from jaxlora.modules.routing import LinearInput, Place, Routing
from jaxlora.modules.shared_input import apply_together
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import common_rank, unpadded
from jaxlora.pallas_kernels import LINEAR_RESULTS, QuantizedWeight, frozen_linear
from jaxlora.sharding.tensor import counted_once


class MultiLoraLinear(nnx.Module):
    """`x W + bias + scaling[g] * dropout(x) A[g] B[g]`, g by token block.

    `load_slot` puts an adapter in; until then each slot gives the base layer's output.
    The variants of the slots make A and B of what they train, and they can scale the
    output; see `jaxlora.modules.variants`. Each of their tensors is an attribute, a
    `nnx.LoRAParam` in float32 (`lora_a` is G K R, `lora_b` G R N), and so is each of
    their settings, a `SlotVariable`.

    Attributes:
        kernel: Frozen weight W, K N; or a `QuantizedKernel` of it.
        bias: Frozen bias, N, or None.
        scaling: `lora_alpha / rank` of each slot, G.
        dropout: Dropout rate of each slot, G.
        rank: Rank of each slot's adapter here, G; 0 where it does not adapt.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        slots: SlotShape | None = None,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        layer: int | None = 0,
        projection: int = 0,
        implementation: str = "xla",
        kernel: QuantizedWeight | None = None,
        input_parts: int = 1,
        output_parts: int = 1,
        output_sections: tuple[int, ...] = (1,),
        rngs: nnx.Rngs | None = None,
    ):
        """Makes the layer with a random or a quantized kernel, and empty slots.

        A layer with a quantized kernel is made of a weight [N, K] by, for example,
        `MultiLoraLinear(k, n, kernel=Nf4Weight.quantize(w), slots=...)`.

        Args:
            in_features: K.
            out_features: N.
            slots: Shape of the slot tables; None: a plain frozen linear.
            use_bias: Whether the frozen layer adds a bias.
            dtype: Dtype of kernel, bias and activations.
            layer: Keys the dropout masks, with `projection`; None: the routing has
                their words, see `Routing.for_layer`.
            projection: Keys the dropout masks; differs between layers that share x.
            implementation: Name of the kernel back end in `pallas_kernels.BACKENDS`.
            kernel: Quantized weight, in one of `pallas_kernels.FORMATS`; None: the
                kernel is random and in `dtype`.
            input_parts: Devices among which the input features are divided. K is the
                number of this device then, and the output a term of a sum over them;
                see `jaxlora.sharding.tensor`.
            output_parts: Parts into which devices divide the output features. N is the
                number of this device then.
            output_sections: Proportions of sections of the output features, of each of
                which a device has a part.
            rngs: Source of the random kernel; not needed for a quantized one.

        Raises:
            ValueError: The quantized weight is not one of this layer, or there is
                neither a quantized weight nor `rngs`.
        """
        k, n = in_features, out_features
        self.in_features, self.input_parts = k, input_parts
        self.output_parts, self.output_sections = output_parts, output_sections
        self.kernel = make_kernel(kernel, (k, n), dtype, rngs)
        self.bias = BaseParam(jnp.zeros((n,), dtype)) if use_bias else None
        self.layer, self.projection = layer, projection
        self.implementation = implementation
        self.slots = slots
        if slots is None:
            return
        g = slots.num_slots
        for tensor in slots.tensors:
            shape = g, *tensor.shape(k, n, slots.rank)
            setattr(self, tensor.name, nnx.LoRAParam(jnp.zeros(shape, jnp.float32)))
        self.scaling = SlotVariable(jnp.zeros((g,), jnp.float32))
        self.dropout = SlotVariable(jnp.zeros((g,), jnp.float32))
        self.rank = SlotVariable(jnp.zeros((g,), jnp.int32))
        for variant in slots.variants:
            for name, one in variant.settings(slots, k, n).items():
                zeros = jnp.zeros((g, *one.shape), one.dtype)
                setattr(self, name, SlotVariable(zeros))

    def load_slot(
        self,
        slot: int,
        *tensors: Float[Array | np.ndarray, "..."],
        scaling: float,
        dropout: float = 0.0,
        **given: Any,
    ) -> None:
        """Puts an adapter into a slot, in place.

        Args:
            slot: Which slot, from 0.
            *tensors: The trained tensors at the adapter's own rank r, in the order of
                `SlotShape.tensors`: A, K r; then B, r N.
            scaling: `lora_alpha / r`, or `lora_alpha / sqrt(r)` for rsLoRA.
            dropout: Dropout rate of the LoRA path.
            **given: What its variant needs besides, such as `vera`, the matrices of
                VeRA, K r and r N; without them, the adapter is not VeRA.

        Raises:
            ValueError: The layer has no slots, a tensor is missing, or the slot or the
                rank is too large.
            TypeError: No variant of the slots takes a keyword.
        """
        if self.slots is None:
            raise ValueError("this layer has no slots: make it with slots=SlotShape().")
        known = {word for v in self.slots.variants for word in v.load_keywords}
        if unknown := sorted(given.keys() - known):
            raise TypeError(
                f"no variant of the slots takes {unknown[0]!r}: their settings are "
                f"{list(self.slots.settings)}."
            )
        num_slots, largest = self.slots.num_slots, self.slots.rank
        if not 0 <= slot < num_slots:
            raise ValueError(f"slot {slot} is not one of the {num_slots} slots.")
        rank = common_rank(self.slots.tensors, tensors)
        if rank is None or rank > largest:
            shapes = " and ".join(str(array.shape) for array in tensors)
            raise ValueError(
                f"tensors of shapes {shapes} must share a rank of at most {largest}."
            )
        names = [tensor.name for tensor in self.slots.tensors]
        values: dict[str, Any] = dict(zip(names, tensors, strict=True))
        values |= {"scaling": scaling, "dropout": dropout, "rank": rank}
        for variant in self.slots.variants:
            values |= variant.slot_settings(self.slots, rank, **given)
        for name, value in values.items():
            variable = getattr(self, name)
            rows = np.zeros(variable.shape[1:], variable.dtype)
            rows[unpadded(np.shape(value))] = value
            variable[...] = variable[...].at[slot].set(rows)

    def __call__(
        self, x: Float[Array, "T K"] | LinearInput, routing: Routing
    ) -> Float[Array, "T N"]:
        """Applies the layer to token rows, each token block with its own adapter.

        Raises:
            ValueError: The routing has only some of the keys of the dropout masks.
        """
        (y,) = apply_together([self], x, routing)
        return y

    def frozen(self, x: Float[Array, "T K"], routing: Routing) -> Float[Array, "T N"]:
        """Applies the frozen layer alone."""
        bias, w = self.own_bias, self.weight
        if isinstance(w, QuantizedWeight):
            blocks, name = routing.block_adapter, self.implementation
            return frozen_linear(x, w, bias, blocks, implementation=name)
        y = checkpoint_name(jnp.matmul(x, w), LINEAR_RESULTS)
        return y if bias is None else y + bias

    @property
    def weight(self) -> Float[Array, "K N"] | QuantizedWeight:
        """The frozen weight, as `Projection` takes it."""
        kernel = self.kernel
        return kernel.weight if isinstance(kernel, QuantizedKernel) else kernel[...]

    @property
    def own_bias(self) -> Float[Array, " N"] | None:
        """The bias, which one device adds if they divide the input."""
        if self.bias is None:
            return None
        return counted_once(self.bias[...], self.input_parts)

    @property
    def place(self) -> Place:
        """Layer and projection, which key the dropout masks."""
        return self.layer, self.projection

    def table(self, name: str) -> Array:
        """A trained tensor, or a setting, of all slots."""
        return getattr(self, name)[...]

    def constant(self, name: str) -> Array | None:
        """What `keep_constants` kept by this name; None: it was not called."""
        return self.table(name) if hasattr(self, name) else None

    def keep_constants(self, dtype: DTypeLike) -> None:
        """Computes once what does not change while weights and slots stay the same.

        Args:
            dtype: Dtype of the rows that will come.
        """
        for variant in () if self.slots is None else self.slots.variants:
            for name, value in variant.constants(self, dtype).items():
                setattr(self, name, SlotVariable(value))
