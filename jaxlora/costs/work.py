"""Counts the operations and the memory traffic of the parts of a decoder per token.

These are formulas over the sizes of the model. The base is frozen, so the backward pass
of a linear costs as much as its forward pass: it has no gradient of the weight.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax.numpy as jnp

from jaxlora.models.build import LayerLinear
from jaxlora.models.config import DeltaShape
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linears
from jaxlora.modules.attention import WideHeads
from jaxlora.modules.banded_attention import band_tokens
from jaxlora.modules.gated_delta import CHUNK_TOKENS
from jaxlora.modules.triton_gated_delta import triton_delta_unsupported
from jaxlora.pallas_kernels.expert_rows import TILE_ROWS


class _DeltaWaits(NamedTuple):
    """How much longer than its traffic the gated delta rule takes.

    A chunk of a sample waits for the one before it. Both were measured on an H200, for
    8,192 tokens and 32 heads of 128 x 128.

    Attributes:
        forward: Time of the forward pass by that of its traffic.
        backward: Time of the backward pass, which computes the forward pass again, by
            that of the forward pass.
    """

    forward: float
    backward: float


_PLAIN_DELTA = _DeltaWaits(9, 3.2)  # 4.7 ms forward, and 15 ms in both passes
_TRITON_DELTA = _DeltaWaits(3.2, 3.6)  # 0.27 and 0.96 ms
# Traffic per score of plain XLA's attention, forward: in float32 to memory, three times
# from there for the softmax, and the weights in bfloat16. It was not measured.
_SCORE_BYTES = 20
_LOGIT_BYTES = 16  # traffic per logit: in float32 to the loss, in bfloat16 to the head


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one token.

    Attributes:
        flops: Floating point operations of matrix products, without those in fp8.
        fp8_flops: Floating point operations of matrix products in fp8.
        memory_bytes: Bytes that operations other than matrix products read and write.
    """

    flops: float = 0.0
    fp8_flops: float = 0.0
    memory_bytes: float = 0.0

    def __rmul__(self, number: float) -> "Work":
        return Work(
            flops=number * self.flops,
            fp8_flops=number * self.fp8_flops,
            memory_bytes=number * self.memory_bytes,
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            fp8_flops=self.fp8_flops + other.fp8_flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Passes[T: (Work, float)]:
    """Work, or the time, of one token in the forward and in the backward pass."""

    forward: T
    backward: T

    @property
    def both(self) -> T:
        """Both passes together."""
        return self.forward + self.backward

    def __add__(self, other: "Passes[T]") -> "Passes[T]":
        return Passes(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
        )


def layer_work(spec: DecoderSpec, layer: int, mean_tokens: float) -> Passes[Work]:
    """Counts the work of one token in one layer.

    Args:
        spec: The decoder.
        layer: Number of the layer.
        mean_tokens: Mean length of the samples.
    """
    forward, backward = Work(), Work()
    for name, linear in linears(spec.config, layer).items():
        path = f"layers.{layer}.{name}"
        is_adapted = path in spec.adapted
        rank = 0
        if spec.slots is not None and is_adapted:
            rank = spec.slots.rank_of(is_of_experts=linear.experts is not None)
        fp8_forward, fp8_backward = _fp8_passes(spec, path)
        copies = _copies(linear)
        forward += copies * _product_work(linear, rank, is_fp8=fp8_forward)
        backward += copies * _product_work(linear, 2 * rank, is_fp8=fp8_backward)
    mixing = _mixing_passes(spec, layer, mean_tokens)
    attention, elementwise = mixing.forward, _elementwise_work(spec, layer)
    forward += attention + elementwise
    backward += mixing.backward + elementwise + elementwise
    backward += _remat_work(spec, layer, forward, attention, elementwise)
    return Passes(forward=forward, backward=backward)


def embedding_work(spec: DecoderSpec) -> Passes[Work]:
    """Counts the work of one token in the embedding, which only copies rows."""
    itemsize = jnp.dtype(spec.options.dtype).itemsize
    copied = Work(memory_bytes=2 * spec.config.hidden_size * itemsize)
    return Passes(forward=copied, backward=Work())


def head_work(spec: DecoderSpec, target_share: float = 1.0) -> Passes[Work]:
    """Counts the work of one token in the head and the loss.

    The gradient is computed with the loss, in the forward pass.

    Args:
        spec: The decoder.
        target_share: Share of the tokens that are trained on.
    """
    width, vocab_size = spec.config.hidden_size, spec.config.vocab_size
    forward = Work(
        flops=4 * target_share * width * vocab_size,
        memory_bytes=_LOGIT_BYTES * target_share * vocab_size,
    )
    return Passes(forward=forward, backward=Work())


def _fp8_passes(spec: DecoderSpec, path: str) -> tuple[bool, bool]:
    """Whether the forward and the backward pass of a linear multiply in fp8."""
    base = spec.options.base_format
    if base is None or not base.quantizes(path) or ".experts." in path:
        return False, False
    return base.options.multiplies_forward, base.options.multiplies_backward


def _product_work(linear: LayerLinear, rank: int, *, is_fp8: bool = False) -> Work:
    """Work of a linear and of products with A and B, each of the given rank."""
    k, n = linear.in_features, linear.out_features
    frozen, adapter = 2 * k * n, 2 * rank * (k + n)
    if is_fp8:
        return Work(flops=adapter, fp8_flops=frozen)
    return Work(flops=frozen + adapter)


def _copies(linear: LayerLinear) -> int:
    """Returns how many rows of a token a linear computes."""
    return 1 if linear.experts is None else linear.experts.chosen


def microbatch_work(spec: DecoderSpec, layer: int, num_tokens: int) -> Passes[Work]:
    """Counts the work of a microbatch in one layer that no token adds to.

    Blocks of experts' rows have padding, and their weights may be dequantized. That of
    other linears was not measured.

    Args:
        spec: The decoder.
        layer: Number of the layer.
        num_tokens: Tokens of the microbatch, on which the size of blocks depends.
    """
    forward, backward = Work(), Work()
    for name, linear in linears(spec.config, layer).items():
        if (shape := linear.experts) is None:
            continue
        path, rank = f"layers.{layer}.{name}", 0
        if spec.slots is not None and path in spec.adapted:
            rank = spec.slots.rank_of(is_of_experts=True)
        # Half of the last block of a group is padding, and half of a tile's last one.
        rows = spec.expert_block_rows(shape, num_tokens)
        padding = shape.number * (spec.num_expert_slots * rows + TILE_ROWS - rows) / 2
        read = _dequantizing(spec, linear, path)
        forward += padding * _product_work(linear, rank) + read
        backward += padding * _product_work(linear, 2 * rank) + read
        # Nothing in the backward pass needs the output of the last one again.
        if spec.options.remat in ("mlp", "layer") and linear.role != "row":
            again = rank if spec.options.remat == "layer" else 0
            backward += padding * _product_work(linear, again) + read
    return Passes(forward=forward, backward=backward)


def _dequantizing(spec: DecoderSpec, linear: LayerLinear, path: str) -> Work:
    """Work of dequantizing a linear of all experts of a layer once."""
    base, shape = spec.options.base_format, linear.experts
    if shape is None or base is None or not base.quantizes(path):
        return Work()
    sizes = linear.out_features, linear.in_features, shape.number
    stored = base.shapes(*sizes).values()
    read = sum(math.prod(one.shape) * one.dtype.itemsize for one in stored)
    written = math.prod(sizes) * jnp.dtype(spec.options.dtype).itemsize
    return Work(memory_bytes=read + written)


def _mixing_passes(spec: DecoderSpec, layer: int, mean_tokens: float) -> Passes[Work]:
    """Work of the part of a layer in which rows see other rows."""
    shape = spec.config.delta_shape(layer)
    if shape is None:
        forward = _attention_work(spec, layer, mean_tokens)
        # The backward pass computes the scores again; then four products, not two.
        backward = Work(
            flops=2.5 * forward.flops, memory_bytes=2.5 * forward.memory_bytes
        )
        return Passes(forward=forward, backward=backward)
    return _delta_passes(shape, spec.options.dtype)


def _attention_work(spec: DecoderSpec, layer: int, mean_tokens: float) -> Work:
    """Work of the scores and of the weighted values; a token sees half its sample.

    Where plain XLA runs wide heads beside kernels for the others, it also computes what
    the masks of a band hide, and puts scores into memory.
    """
    config, options = spec.config.at_layer(layer), spec.options
    window = config.layer_windows[layer]
    if options.wide_heads != WideHeads(config.head_dim, "xla"):
        keys = mean_tokens / 2 if window is None else min(mean_tokens / 2, window)
        return Work(flops=4 * config.query_features * keys)
    keys = band_tokens(options.max_segment_tokens, window)
    return Work(
        flops=4 * config.query_features * keys,
        memory_bytes=_SCORE_BYTES * config.num_heads * keys,
    )


def _delta_passes(shape: DeltaShape, dtype: jnp.dtype) -> Passes[Work]:
    """Work of the gated delta rule in chunks, whatever the samples."""
    chunk, key, value = CHUNK_TOKENS, shape.key_dim, shape.value_dim
    key_heads, heads = shape.num_key_heads, shape.num_value_heads
    if triton_delta_unsupported(dtype, shape) is None:
        waits = _TRITON_DELTA
        # Queries and keys, which two kernels read; two matrices of a chunk, written and
        # read; values and outputs.
        elements = 4 * key * key_heads + (4 * chunk + 2 * value) * heads
        traffic = jnp.dtype(dtype).itemsize * elements
    else:
        waits = _PLAIN_DELTA
        # Matrices of a chunk, S before it, and rows on the way, each written and read.
        traffic = 2 * 4 * heads * (6 * chunk + key * value / chunk + 4 * value)
    of_value_head = 6 * key * value + 4 * chunk * value + chunk**2
    flops = 4 * chunk * key * key_heads + of_value_head * heads
    forward = Work(flops=flops, memory_bytes=waits.forward * traffic)
    backward = Work(
        flops=waits.backward * forward.flops,
        memory_bytes=waits.backward * forward.memory_bytes,
    )
    return Passes(forward=forward, backward=backward)


def _elementwise_work(spec: DecoderSpec, layer: int) -> Work:
    """Memory traffic of norms, residual sums, rotary positions and the activation."""
    config = spec.config.at_layer(layer)
    width, experts = config.hidden_size, config.expert_shape(layer)
    elements = 10 * width + 3 * config.intermediate_size
    if experts is not None:  # each copy is gathered, and added to its token
        # Devices that share the experts have rows for all copies that could come.
        parts = config.expert_parts
        copies = parts * min(experts.chosen, experts.number // parts)
        inner = experts.features * copies + (experts.shared_features or 0)
        elements = 10 * width + 3 * inner + 4 * width * copies
    shape = config.delta_shape(layer)
    if shape is None:
        elements += 4 * (config.query_features + config.kv_features)
    else:  # the convolution, the norms of heads and the gate of the output
        elements += 4 * shape.mixed_features + 3 * shape.value_features
    return Work(memory_bytes=elements * jnp.dtype(spec.options.dtype).itemsize)


def _remat_work(
    spec: DecoderSpec, layer: int, forward: Work, attention: Work, elementwise: Work
) -> Work:
    """Work that the backward pass of a layer does again."""
    if spec.options.remat == "none":
        return Work()
    if spec.options.remat == "elementwise":
        heads = spec.config.at_layer(layer)
        is_fused = spec.options.attention_of(heads.head_dim) != "xla"
        is_fused |= spec.config.delta_shape(layer) is not None
        return elementwise if is_fused else elementwise + attention
    made = list(linears(spec.config, layer).values())

    def frozen(linear: LayerLinear) -> Work:
        is_fp8, _ = _fp8_passes(spec, f"layers.{layer}.{linear.name}")
        return _copies(linear) * _product_work(linear, 0, is_fp8=is_fp8)

    if spec.options.remat == "layer":
        # Nothing in the backward pass needs the layer's output again.
        down = frozen(made[-1])
        return dataclasses.replace(
            forward,
            flops=forward.flops - down.flops,
            fp8_flops=forward.fp8_flops - down.fp8_flops,
        )
    # The MLP follows the first linear that writes the hidden states.
    after = [linear.role for linear in made].index("row") + 1
    again = (frozen(linear) for linear in made[after:] if linear.role != "row")
    return functools.reduce(operator.add, again, Work())
