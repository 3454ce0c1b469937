"""Flax module: a frozen linear layer with one LoRA for each slot."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxlora.modules.base_param import BaseParam, SlotVariable
from jaxlora.modules.quantized_kernel import QuantizedKernel, as_dense, make_kernel
from jaxlora.modules.routing import LinearInput, Place, Routing
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    VERA_B,
    VERA_D,
    TrainedTensor,
    common_rank,
    unpadded,
)
from jaxlora.modules.vera import chosen_pair, vera_pair
from jaxlora.pallas_kernels import (
    LINEAR_RESULTS,
    DoraGain,
    Dropout,
    Projection,
    QuantizedWeight,
    column_norms,
    dora_gain,
    dropout_keys,
    frozen_linear,
    multi_lora_linears,
)
from jaxlora.sharding.tensor import counted_once, sum_out

_keep_results = jax.checkpoint_policies.save_only_these_names(LINEAR_RESULTS)


class MultiLoraLinear(nnx.Module):
    """`x W + bias + scaling[g] * dropout(x) A[g] B[g]`, g by token block.

    `load_slot` puts an adapter in; until then each slot gives the base layer's output.

    Attributes:
        kernel: Frozen weight W, K N; or a `QuantizedKernel` of it.
        bias: Frozen bias, N, or None.
        lora_a: Shrink matrices, float32, G K R; `nnx.LoRAParam`.
        lora_b: Expand matrices, float32, G R N; `nnx.LoRAParam`.
        scaling: `lora_alpha / rank` of each slot, G.
        dropout: Dropout rate of each slot, G.
        rank: Rank of each slot's adapter here, G; 0 where it does not adapt.
        trained_rank: Its first ranks, which are trained, G; absent if all are, see
            `SlotShape.keeps_start`.
        dora_norms: Norms that `keep_norms` computed, G N; None: each call computes
            them.
        vera_a: Shrink matrices of VeRA, G K R, of which the linear takes its first
            input features; absent without VeRA, as are the next two.
        vera_b: Expand matrices of VeRA, G R N, likewise.
        has_vera: Whether each slot has VeRA, G.
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    trained_rank: SlotVariable
    vera_a: SlotVariable
    vera_b: SlotVariable
    has_vera: SlotVariable
    dora_norms: SlotVariable | None

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
            rngs: Source of the random kernel; not needed for a quantized one.

        Raises:
            ValueError: The quantized weight is not one of this layer, or there is
                neither a quantized weight nor `rngs`.
        """
        k, n = in_features, out_features
        self.in_features, self.input_parts = k, input_parts
        self.output_parts = output_parts
        self.kernel = make_kernel(kernel, (k, n), dtype, rngs)
        self.bias = BaseParam(jnp.zeros((n,), dtype)) if use_bias else None
        self.layer, self.projection = layer, projection
        self.implementation = implementation
        self.slots = slots
        self.dora_norms = None
        if slots is None:
            return
        g = slots.num_slots
        for tensor in slots.tensors:
            shape = g, *tensor.shape(k, n, slots.rank)
            setattr(self, tensor.name, nnx.LoRAParam(jnp.zeros(shape, jnp.float32)))
        self.scaling = SlotVariable(jnp.zeros((g,), jnp.float32))
        self.dropout = SlotVariable(jnp.zeros((g,), jnp.float32))
        self.rank = SlotVariable(jnp.zeros((g,), jnp.int32))
        if slots.keeps_start:
            self.trained_rank = SlotVariable(jnp.zeros((g,), jnp.int32))
        if slots.has_vera:
            # The decoder's own are larger: they serve all of its linears.
            self.vera_a = SlotVariable(jnp.zeros((g, k, slots.rank), jnp.float32))
            self.vera_b = SlotVariable(jnp.zeros((g, slots.rank, n), jnp.float32))
            self.has_vera = SlotVariable(jnp.zeros((g,), jnp.bool_))

    def load_slot(
        self,
        slot: int,
        *tensors: Float[Array | np.ndarray, "..."],
        scaling: float,
        dropout: float = 0.0,
        vera: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Puts an adapter into a slot, in place.

        Args:
            slot: Which slot, from 0.
            *tensors: The trained tensors at the adapter's own rank r, in the order of
                `SlotShape.tensors`: A, K r; then B, r N.
            scaling: `lora_alpha / r`, or `lora_alpha / sqrt(r)` for rsLoRA.
            dropout: Dropout rate of the LoRA path.
            vera: Matrices of VeRA, K r and r N; None: the adapter is not VeRA.

        Raises:
            ValueError: The layer has no slots, a tensor is missing, or the slot or the
                rank is too large.
        """
        if self.slots is None:
            raise ValueError("this layer has no slots: make it with slots=SlotShape().")
        num_slots, largest = self.slots.num_slots, self.slots.rank
        if not 0 <= slot < num_slots:
            raise ValueError(f"slot {slot} is not one of the {num_slots} slots.")
        rank = common_rank(self.slots.tensors, tensors)
        if rank is None or rank > largest:
            shapes = " and ".join(str(array.shape) for array in tensors)
            raise ValueError(
                f"tensors of shapes {shapes} must share a rank of at most {largest}."
            )
        for tensor, value in zip(self.slots.tensors, tensors, strict=True):
            _put_padded(getattr(self, tensor.name), slot, value)
        for variable, value in (
            (self.scaling, scaling),
            (self.dropout, dropout),
            (self.rank, rank),
            *([(self.trained_rank, rank)] if self.slots.keeps_start else []),
            *([(self.has_vera, vera is not None)] if self.slots.has_vera else []),
        ):
            variable[...] = variable[...].at[slot].set(value)
        if vera is not None:
            pair = self.vera_a, self.vera_b
            for variable, value in zip(pair, vera, strict=True):
                _put_padded(variable, slot, value)

    def __call__(
        self, x: Float[Array, "T K"] | LinearInput, routing: Routing
    ) -> Float[Array, "T N"]:
        """Applies the layer to token rows, each token block with its own adapter.

        Raises:
            ValueError: The routing has only some of the keys of the dropout masks.
        """
        given = LinearInput.of(x)
        if self.slots is None:
            return self.frozen(given.x, routing)
        (y,) = apply_adapted([self], given, routing)
        return y

    def frozen(self, x: Float[Array, "T K"], routing: Routing) -> Float[Array, "T N"]:
        """Applies the frozen layer alone."""
        bias, w = self._bias, self.weight
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
    def _bias(self) -> Float[Array, " N"] | None:
        """The bias, which one device adds if they divide the input."""
        if self.bias is None:
            return None
        return counted_once(self.bias[...], self.input_parts)

    @property
    def _scaling(self) -> Float[Array, " G"]:
        return jnp.where(self.rank[...] > 0, self.scaling[...], 0.0)

    @property
    def has_dora(self) -> bool:
        """Whether slots can have DoRA here."""
        return self.slots is not None and MAGNITUDE in self.slots.tensors

    def keep_norms(self, dtype: DTypeLike) -> None:
        """Computes the norms of DoRA once, for weights and slots that stay the same.

        Args:
            dtype: Dtype of the rows that will come.
        """
        if self.has_dora:
            norms = SlotVariable(self._norms(self.weight, dtype))
            self.dora_norms = nnx.data(norms)

    def _norms(
        self, w: Float[Array, "K N"] | QuantizedWeight, dtype: DTypeLike
    ) -> Float[Array, "G N"]:
        arrays = as_dense(w, dtype), self.lora_a[...], self.lora_b[...], self._scaling
        total = functools.partial(sum_out, num_devices=self.input_parts)
        return column_norms(*jax.lax.stop_gradient(arrays), total=total)

    def _dora(self, x: Float[Array, "T K"], routing: Routing) -> DoraGain | None:
        if not self.has_dora:
            return None
        if self.dora_norms is None:
            w = self.weight
            if isinstance(w, QuantizedWeight):
                # It is dequantized beside the product with x. Otherwise XLA could
                # dequantize the weights of many layers in advance.
                w, _ = jax.lax.optimization_barrier(jax.lax.stop_gradient((w, x)))
            norms = checkpoint_name(self._norms(w, x.dtype), LINEAR_RESULTS)
        else:
            norms = self.dora_norms[...]
        assert self.slots is not None
        drops = self.slots.dora_dropout and routing.token_index is not None
        magnitude = getattr(self, MAGNITUDE.name)[...]
        magnitude = jnp.where(self.rank[...][:, None] > 0, magnitude, 0.0)
        return dora_gain(magnitude, norms, self.dropout[...] > 0 if drops else None)

    def _trainable(self, tensor: TrainedTensor) -> Float[Array, "G ..."]:
        """The table of A or B, without a gradient of the ranks that are fixed."""
        table = getattr(self, tensor.name)[...]
        assert self.slots is not None
        if not self.slots.keeps_start:
            return table
        axis = 1 + tensor.dimensions.index("R")
        rank = jax.lax.broadcasted_iota(jnp.int32, table.shape, axis)
        is_trained = rank < self.trained_rank[...][:, None, None]
        return jnp.where(is_trained, table, jax.lax.stop_gradient(table))

    def _matrices(self) -> tuple[Float[Array, "G K R"], Float[Array, "G R N"]]:
        """A and B of all slots."""
        slots = self.slots
        assert slots is not None
        if not slots.has_vera:
            return self._trainable(LORA_A), self._trainable(LORA_B)
        vera = vera_pair(
            self.vera_a[...],
            self.vera_b[...],
            getattr(self, VERA_D.name)[...],
            getattr(self, VERA_B.name)[...],
            self.in_features,
            self.input_parts,
            self.output_parts,
        )
        if not slots.has_lora:
            return vera
        lora = self._trainable(LORA_A), self._trainable(LORA_B)
        return chosen_pair(self.has_vera[...], vera, lora)

    def _projection(self, x: Float[Array, "T K"], routing: Routing) -> Projection:
        dora = self._dora(x, routing)
        return dataclasses.replace(self.lora_projection(routing), dora=dora)

    def lora_projection(self, routing: Routing) -> Projection:
        """Returns what the kernels read of the linear, without DoRA."""
        assert self.slots is not None
        own = LORA_A, LORA_B, MAGNITUDE, VERA_D, VERA_B
        a, b = self._matrices()
        return Projection(
            w=self.weight,
            a=a,
            b=b,
            scaling=self._scaling,
            rank=self.rank[...],
            bias=self._bias,
            dropout=self._dropout(routing),
            extra={
                tensor.name: getattr(self, tensor.name)[...]
                for tensor in self.slots.tensors
                if tensor not in own
            },
            settings=routing.settings.get(self.place),
        )

    @property
    def place(self) -> Place:
        """Layer and projection, which key the dropout masks."""
        return self.layer, self.projection

    def _dropout(self, routing: Routing) -> Dropout | None:
        if routing.token_index is None:
            return None
        words, key = routing.words.get(self.place), None
        if words is None:
            assert self.input_parts == 1, "kernels do not know the first feature"
            assert self.layer is not None, "a decoder computes the words"
            key = dropout_keys(*routing.seed_and_step(), self.layer, self.projection)
        return Dropout(key, self.dropout[...], routing.token_index, words)


def _put_padded(variable: nnx.Variable, slot: int, value: Array | np.ndarray) -> None:
    """Puts a tensor into a slot of a table, filled up with zeros."""
    rows = jnp.zeros(variable.shape[1:], jnp.float32)
    rows = rows.at[unpadded(value.shape)].set(value)
    variable[...] = variable[...].at[slot].set(rows)


def apply_adapted(
    linears: Sequence[MultiLoraLinear], given: LinearInput, routing: Routing
) -> Sequence[Float[Array, "T _"]]:
    """Applies linears with slots whose weights have one format; see `shared_input`."""

    def run(x):
        return multi_lora_linears(
            x,
            [linear._projection(x, routing) for linear in linears],
            routing.block_adapter,
            s=[given.s[linear.place] for linear in linears] if given.s else None,
            implementation=linears[0].implementation,
        )

    slots = linears[0].slots
    if slots is not None and slots.has_vera:
        # The matrices that are made for VeRA are made again for the gradient.
        run = jax.checkpoint(run, policy=_keep_results)
    return run(given.x)
