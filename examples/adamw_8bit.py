"""An optimizer of your own: AdamW with moments in 8 bits (arXiv 2110.02861).

It has the codes of bitsandbytes (`dynamic`, nearest value) and takes 2.03 bytes of
state for each weight, where AdamW takes 8. Losses are close to those of AdamW, and not
the same. bitsandbytes takes 256 neighbors of the flat matrix, and here a block is of
one row of rank, so that it does not depend on the ranks of others.

    python examples/tiny_model.py
    python examples/adamw_8bit.py
"""

import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxlora
from jaxlora import LoraJob, RunConfig, Trainer

BLOCK = 256  # values that share a scale
# Axis of the features in the matrices of an adapter, K r and r N.
FEATURES = {"lora_a": 0, "lora_b": 1}


class State8Bit(NamedTuple):
    """Moments of AdamW, each by name of the tensor.

    Attributes:
        count: Steps done.
        mu_codes: First moments of matrices, uint8, as places in `dynamic_map`.
        mu_scales: Largest magnitude of each block of them, float32.
        nu_codes: Second moments of matrices, uint8.
        nu_scales: Largest value of each block of them, float32.
        mu: First moments of other tensors, float32.
        nu: Second moments of other tensors, float32.
    """

    count: Any
    mu_codes: Any
    mu_scales: Any
    nu_codes: Any
    nu_scales: Any
    mu: Any
    nu: Any


def dynamic_map(*, is_signed: bool) -> np.ndarray:
    """The 256 values of bitsandbytes' `dynamic` data type, ascending, float32.

    Seven decades below 1 have 1, 2, ... 64 values each (with both signs; 2 to 128
    without), in the middle of equal parts of [0.1, 1) times a power of ten; 0 and 1 are
    the others (section 2.2 of the paper).
    """
    values = [0.0, 1.0]
    for decade in range(7):
        num_parts = 2 ** (decade + (not is_signed))
        bounds = np.linspace(0.1, 1, num_parts + 1, dtype=np.float32)
        means = (bounds[:-1] + bounds[1:]) / 2 * np.float32(10.0 ** (decade - 6))
        values += [*means, *(-means if is_signed else ())]
    return np.sort(np.array(values, np.float32))


_MAPS = {"mu": dynamic_map(is_signed=True), "nu": dynamic_map(is_signed=False)}


def encode(values: jax.Array, axis: int, table: np.ndarray) -> tuple[Any, Any]:
    """Quantizes a matrix to the nearest values of a table.

    A block is 256 neighbors along one axis.

    Args:
        values: The matrix, float32.
        axis: Axis of the features.
        table: The 256 values of the codes, times the block's scale, ascending.

    Returns:
        The codes, uint8, of the matrix's shape; and the scale of each block, float32,
        with blocks in the place of features.
    """
    blocks = _blocks(values, axis)
    scales = jnp.max(jnp.abs(blocks), axis + 1)
    safe = jnp.expand_dims(jnp.where(scales > 0, scales, 1.0), axis + 1)
    middles = (table[:-1] + table[1:]) / 2
    codes = jnp.searchsorted(middles, blocks / safe).astype(jnp.uint8)
    return _flat(codes, axis, values.shape), scales


def decode(codes: jax.Array, scales: jax.Array, axis: int, table: Any) -> jax.Array:
    """Returns the values of `encode`; see there."""
    blocks = jnp.asarray(table)[_blocks(codes, axis).astype(jnp.int32)]
    return _flat(blocks * jnp.expand_dims(scales, axis + 1), axis, codes.shape)


def _blocks(values: jax.Array, axis: int) -> jax.Array:
    """Splits an axis into blocks of 256, of which the last is filled with zeros."""
    num_blocks = -(-values.shape[axis] // BLOCK)
    missing = [(0, 0)] * values.ndim
    missing[axis] = 0, num_blocks * BLOCK - values.shape[axis]
    shape = *values.shape[:axis], num_blocks, BLOCK, *values.shape[axis + 1 :]
    return jnp.pad(values, missing).reshape(shape)


def _flat(blocks: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    joined = blocks.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(joined, 0, shape[axis], axis=axis)


def adamw_8bit(
    learning_rate: Any,
    weight_decay: Any,
    *,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
) -> optax.GradientTransformation:
    """Makes AdamW with 8-bit moments of matrices, in blocks; see `encode`.

    A step decodes the moments, updates them in float32 and uses them, and encodes them
    with new scales, as in bitsandbytes. Other tensors than those of `FEATURES` are
    small: their moments are float32.

    Args:
        learning_rate: Learning rate.
        weight_decay: Decoupled weight decay.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def packed(moments: Any) -> State8Bit:
        fields: dict[str, dict[str, Any]] = {name: {} for name in State8Bit._fields}
        for moment, table in _MAPS.items():
            for name, values in getattr(moments, moment).items():
                if name not in FEATURES:
                    fields[moment][name] = values
                    continue
                codes, scales = encode(values, FEATURES[name], table)
                fields[f"{moment}_codes"][name] = codes
                fields[f"{moment}_scales"][name] = scales
        return State8Bit(**fields | {"count": moments.count})

    def unpacked(state: State8Bit) -> optax.ScaleByAdamState:
        moments = {}
        for moment, table in _MAPS.items():
            codes = getattr(state, f"{moment}_codes")
            scales = getattr(state, f"{moment}_scales")
            moments[moment] = getattr(state, moment) | {
                name: decode(codes[name], scales[name], FEATURES[name], table)
                for name in codes
            }
        return optax.ScaleByAdamState(count=state.count, **moments)

    def init(params: Any) -> State8Bit:
        return packed(adam.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, moments = adam.update(updates, unpacked(state), params)
        return updates, packed(moments)

    return optax.chain(
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


if __name__ == "__main__":
    shutil.rmtree("runs/adamw_8bit", ignore_errors=True)  # of an earlier call
    jaxlora.register_optimizer("adamw_8bit", adamw_8bit)
    jobs = [
        LoraJob(
            name=name,
            data={"path": "examples/data/orders.jsonl"},
            optimizer=name,
            learning_rate=1e-2,
            steps=8,
            batch_size=4,
            max_length=400,
        )
        for name in ("adamw", "adamw_8bit")
    ]
    config = RunConfig(
        model="models/tiny",
        output_dir="runs/adamw_8bit",
        microbatch_tokens=1024,
        jobs=jobs,
    )
    result = Trainer(config).train()
    jaxlora.print_summary(result)
