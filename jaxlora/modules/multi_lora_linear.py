"""Flax module: a frozen linear layer with one LoRA for each slot."""

import dataclasses
import functools
import typing
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxlora.modules.base_param import BaseParam
from jaxlora.modules.quantized_kernel import QuantizedKernel, as_dense, make_kernel
from jaxlora.modules.trained_tensors import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TrainedTensor,
    common_rank,
    tensors_with,
    unpadded,
)
from jaxlora.pallas_kernels import (
    LINEAR_RESULTS,
    DoraGain,
    Dropout,
    KernelSettings,
    MaskWords,
    Projection,
    QuantizedWeight,
    column_norms,
    dora_gain,
    dropout_keys,
    frozen_linear,
    multi_lora_linears,
)
from jaxlora.sharding.tensor import counted_once, sum_out


class SlotVariable(nnx.Variable):
    """A setting of each slot: data to the compiled step, never trained."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotShape:
    """The slot tables of a layer.

    Attributes:
        num_slots: G, number of adapters that the tables hold.
        rank: R, largest rank of a slot; smaller ones are zero-padded.
        use_dropout: Whether training can drop features. It is compiled into the
            programs; the rate of each slot is data.
        settings: The settings of jobs for which there are tables; see
            `TrainedTensor.setting`.
        dora_dropout: Whether a slot can have both DoRA and dropout, which takes a
            second product with W. It is compiled into the programs.
        keeps_start: Whether a slot can hold an adapter of which half of the ranks is
            fixed; see `jaxlora.adapters.initial`. It is compiled into the programs.
        optimizers: Names of the optimizers of jobs, sorted, for whose state there are
            tables; see `jaxlora.adapters.optimizers`.
        has_score: Whether slots have a score head; see `jaxlora.models.score`.

    Raises:
        ValueError: A size is not positive.
    """

    num_slots: int
    rank: int
    use_dropout: bool = True
    settings: tuple[str, ...] = ()
    dora_dropout: bool = False
    keeps_start: bool = False
    optimizers: tuple[str, ...] = ("adamw",)
    has_score: bool = False

    @property
    def tensors(self) -> tuple[TrainedTensor, ...]:
        """The trained tensors for which there are tables."""
        return tensors_with(self.settings.__contains__)

    def __post_init__(self):
        if self.num_slots < 1 or self.rank < 1:
            raise ValueError(
                f"num_slots and rank must be positive, got {self.num_slots} and "
                f"{self.rank}."
            )


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Slot of each row of tokens, and the keys of the dropout masks.

    Attributes:
        block_adapter: Slot of each token block; -1 for padding, whose rows are zero.
        token_index: The token's index in its job's global batch; None: no dropout.
        seed: Each slot's job seed; None: no dropout.
        step: Each slot's optimizer step; None: no dropout.
        words: Random words of the masks, by (layer, projection); see
            `with_shared_inputs`.
        settings: Slot settings for the fused kernels, by (layer, projection).
    """

    block_adapter: Int[Array, " NB"]
    token_index: Int[Array, " T"] | None = None
    seed: Int[Array, " G"] | None = None
    step: Int[Array, " G"] | None = None
    words: Mapping[tuple[int, int], MaskWords] = dataclasses.field(default_factory=dict)
    settings: Mapping[tuple[int, int], KernelSettings] = dataclasses.field(
        default_factory=dict
    )

    def for_layer(self, layer: int) -> "Routing":
        """Returns the routing without the words and settings of other layers."""
        return dataclasses.replace(
            self,
            words={k: v for k, v in self.words.items() if k[0] == layer},
            settings={k: v for k, v in self.settings.items() if k[0] == layer},
        )

    def seed_and_step(self) -> tuple[Int[Array, " G"], Int[Array, " G"]]:
        """Each slot's job seed and optimizer step, for dropout.

        Raises:
            ValueError: One of them is missing.
        """
        if self.seed is None or self.step is None:
            raise ValueError(
                "the routing has token_index, but not both seed and step: dropout "
                "takes all three, and without token_index nothing is dropped."
            )
        return self.seed, self.step


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
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    trained_rank: SlotVariable
    dora_norms: SlotVariable | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        slots: SlotShape | None = None,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        layer: int = 0,
        projection: int = 0,
        implementation: str = "xla",
        kernel: QuantizedWeight | None = None,
        input_parts: int = 1,
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
            layer: Keys the dropout masks, with `projection`.
            projection: Keys the dropout masks; differs between layers that share x.
            implementation: Name of the kernel back end in `pallas_kernels.BACKENDS`.
            kernel: Quantized weight, in one of `pallas_kernels.FORMATS`; None: the
                kernel is random and in `dtype`.
            input_parts: Devices among which the input features are divided. K is the
                number of this device then, and the output a term of a sum over them;
                see `jaxlora.sharding.tensor`.
            rngs: Source of the random kernel; not needed for a quantized one.

        Raises:
            ValueError: The quantized weight is not one of this layer, or there is
                neither a quantized weight nor `rngs`.
        """
        k, n = in_features, out_features
        self.in_features, self.input_parts = k, input_parts
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

    def load_slot(
        self,
        slot: int,
        *tensors: Float[Array | np.ndarray, "..."],
        scaling: float,
        dropout: float = 0.0,
    ) -> None:
        """Puts an adapter into a slot, in place.

        Args:
            slot: Which slot, from 0.
            *tensors: The trained tensors at the adapter's own rank r, in the order of
                `SlotShape.tensors`: A, K r; then B, r N.
            scaling: `lora_alpha / r`, or `lora_alpha / sqrt(r)` for rsLoRA.
            dropout: Dropout rate of the LoRA path.

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
            variable = getattr(self, tensor.name)
            rows = jnp.zeros(variable.shape[1:], jnp.float32)
            rows = rows.at[unpadded(value.shape)].set(value)
            variable[...] = variable[...].at[slot].set(rows)
        for variable, value in (
            (self.scaling, scaling),
            (self.dropout, dropout),
            (self.rank, rank),
            *([(self.trained_rank, rank)] if self.slots.keeps_start else []),
        ):
            variable[...] = variable[...].at[slot].set(value)

    def __call__(self, x: Float[Array, "T K"], routing: Routing) -> Float[Array, "T N"]:
        """Applies the layer to token rows, each token block with its own adapter.

        Raises:
            ValueError: The routing has only some of the keys of the dropout masks.
        """
        (y,) = apply_together([self], x, routing)
        return y

    def _frozen(self, x: Float[Array, "T K"], routing: Routing) -> Float[Array, "T N"]:
        bias, w = self._bias, self._weight
        if isinstance(w, QuantizedWeight):
            blocks, name = routing.block_adapter, self.implementation
            return frozen_linear(x, w, bias, blocks, implementation=name)
        y = checkpoint_name(jnp.matmul(x, w), LINEAR_RESULTS)
        return y if bias is None else y + bias

    @property
    def _weight(self) -> Float[Array, "K N"] | QuantizedWeight:
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
    def _has_dora(self) -> bool:
        return self.slots is not None and MAGNITUDE in self.slots.tensors

    def keep_norms(self, dtype: DTypeLike) -> None:
        """Computes the norms of DoRA once, for weights and slots that stay the same.

        Args:
            dtype: Dtype of the rows that will come.
        """
        if self._has_dora:
            norms = SlotVariable(self._norms(self._weight, dtype))
            self.dora_norms = nnx.data(norms)

    def _norms(
        self, w: Float[Array, "K N"] | QuantizedWeight, dtype: DTypeLike
    ) -> Float[Array, "G N"]:
        arrays = as_dense(w, dtype), self.lora_a[...], self.lora_b[...], self._scaling
        total = functools.partial(sum_out, num_devices=self.input_parts)
        return column_norms(*jax.lax.stop_gradient(arrays), total=total)

    def _dora(self, x: Float[Array, "T K"], routing: Routing) -> DoraGain | None:
        if not self._has_dora:
            return None
        if self.dora_norms is None:
            w = self._weight
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

    def _projection(self, x: Float[Array, "T K"], routing: Routing) -> Projection:
        assert self.slots is not None
        return Projection(
            w=self._weight,
            a=self._trainable(LORA_A),
            b=self._trainable(LORA_B),
            scaling=self._scaling,
            rank=self.rank[...],
            bias=self._bias,
            dropout=self._dropout(routing),
            dora=self._dora(x, routing),
            extra={
                tensor.name: getattr(self, tensor.name)[...]
                for tensor in self.slots.tensors
                if tensor not in (LORA_A, LORA_B, MAGNITUDE)
            },
            settings=routing.settings.get(self.place),
        )

    @property
    def place(self) -> tuple[int, int]:
        """Layer and projection, which key the dropout masks."""
        return self.layer, self.projection

    def _dropout(self, routing: Routing) -> Dropout | None:
        if routing.token_index is None:
            return None
        words, key = routing.words.get(self.place), None
        if words is None:
            assert self.input_parts == 1, "kernels do not know the first feature"
            key = dropout_keys(*routing.seed_and_step(), *self.place)
        return Dropout(key, self.dropout[...], routing.token_index, words)


def apply_together(
    linears: Sequence[MultiLoraLinear], x: Float[Array, "T K"], routing: Routing
) -> list[Float[Array, "T _"]]:
    """Applies linears that share x, such as q, k and v, and reads x only once.

    Linears whose weights have different formats run one format after the other.

    Raises:
        ValueError: Linears with slots differ in `implementation`.
    """
    adapted = [linear for linear in linears if linear.slots is not None]
    kinds = {linear.implementation for linear in adapted}
    if len(kinds) > 1:
        raise ValueError(
            f"linears that run together must share an implementation, got {kinds}."
        )
    outputs: dict[int, Array] = {}
    for places in _by_format(linears).values():
        made = multi_lora_linears(
            x,
            [linears[i]._projection(x, routing) for i in places],
            routing.block_adapter,
            implementation=linears[places[0]].implementation,
        )
        outputs |= zip(places, made, strict=True)
    return [
        linear._frozen(x, routing) if linear.slots is None else outputs[i]
        for i, linear in enumerate(linears)
    ]


def _by_format(linears: Sequence[MultiLoraLinear]) -> dict[object, list[int]]:
    """Groups the places of linears with slots by how their weights are stored."""
    groups: dict[object, list[int]] = defaultdict(list)
    for i, linear in enumerate(linears):
        if linear.slots is not None:
            groups[jax.tree.structure(linear._weight)].append(i)
    return groups
