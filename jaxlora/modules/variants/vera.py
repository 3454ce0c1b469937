"""VeRA: two trained vectors in each linear, beside random matrices that all share.

VeRA (arXiv 2310.11454) adds `((x A) * d) B * b` to the output of a linear. A and B are
frozen, drawn from a seed as PEFT draws them, and shared by all linears of an adapter,
which take the first of their rows and columns. The vectors d and b are trained.

That is LoRA with the matrices A d and B b, so every back end runs it. Those are made in
each pass and not kept: they are as large as LoRA's, while an adapter trains and saves R
+ N numbers in a linear.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlora.common.json_file import shown
from jaxlora.config import LoraJob
from jaxlora.errors import AdapterError
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.variant import (
    Pair,
    Tensors,
    TrainedTensor,
    Variant,
)
from jaxlora.sharding.rules import TENSOR
from jaxlora.sharding.tensor import own_sections

VERA_D = TrainedTensor(
    name="vera_lambda_d",
    peft_name="vera_lambda_d",
    dimensions=("R",),
    start=lambda job, new: [np.full(one.rank, job.d_initial) for one in new],
)
VERA_B = TrainedTensor(
    name="vera_lambda_b",
    peft_name="vera_lambda_b",
    dimensions=("N",),
    start=lambda job, new: [np.zeros(one.kernel.shape[1]) for one in new],
)


@dataclasses.dataclass(frozen=True, slots=True)
class VeraMatrices:
    """The matrices that all linears of an adapter share.

    Attributes:
        key: The seed that they are drawn from (`projection_prng_key`), of which torch
            takes the low 32 bits.
        rank: Rank r.
        in_features: Largest number of input features of the adapter's linears, K.
        out_features: Largest number of output features, N.
        is_saved: Whether a PEFT folder holds them beside the seed.
    """

    key: int
    rank: int
    in_features: int
    out_features: int
    is_saved: bool = True

    @property
    def a(self) -> Float[np.ndarray, "K R"]:
        """Shrink matrix A, float32."""
        return _drawn(self.key, self.rank, self.in_features, self.out_features)[0]

    @property
    def b(self) -> Float[np.ndarray, "R N"]:
        """Expand matrix B, float32."""
        return _drawn(self.key, self.rank, self.in_features, self.out_features)[1]


@functools.lru_cache(maxsize=8)
def _drawn(
    key: int, rank: int, in_features: int, out_features: int
) -> tuple[Float[np.ndarray, "K R"], Float[np.ndarray, "R N"]]:
    """Draws the matrices of PEFT's `VeraModel`, to the bit.

    PEFT draws A, r K, and then B, N r, from `torch.Generator("cpu")`: a Mersenne
    Twister, of which each number takes the low 24 bits of one output. Both are uniform,
    with bounds of +-sqrt(6 / columns).
    """
    stream = np.random.RandomState(key & 0xFFFFFFFF)

    def draw(rows: int, columns: int) -> np.ndarray:
        bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns))
        low, high = np.float32(-bound), np.float32(bound)
        drawn = stream.randint(0, 2**32, (rows, columns), dtype=np.uint32)
        unit = (drawn & 0xFFFFFF).astype(np.float64) * 2.0**-24
        # It is rounded once, as the result of a fused multiply-add.
        return (unit * np.float64(high - low) + np.float64(low)).astype(np.float32)

    return draw(rank, in_features).T, draw(out_features, rank).T


class Vera(Variant):
    """A and B are the shared matrices times the trained vectors."""

    setting = "use_vera"
    tensors = (VERA_D, VERA_B)
    replaces_lora = True
    makes_matrices = True
    load_keywords = frozenset({"vera"})
    peft_type = "VERA"
    peft_keys = frozenset(
        {
            "d_initial",
            "init_weights",
            "projection_prng_key",
            "save_projection",
            "vera_dropout",
        }
    )
    peft_tensors = ("base_model.vera_A", "base_model.vera_B")

    # ---- in a run --------------------------------------------------------------------

    def settings(
        self, slots: Any, in_features: int, out_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The matrices, of which a decoder's are larger, as they serve all linears."""
        rank = slots.rank
        return {
            "vera_a": jax.ShapeDtypeStruct((in_features, rank), jnp.float32),
            "vera_b": jax.ShapeDtypeStruct((rank, out_features), jnp.float32),
            "has_vera": jax.ShapeDtypeStruct((), jnp.bool_),
        }

    def slot_settings(self, slots: Any, rank: int, **given: Any) -> dict[str, Any]:
        """The matrices A and B in `vera`; without them, the adapter is not VeRA."""
        matrices = given.get("vera")
        if matrices is None:
            return {"has_vera": False}
        return {"has_vera": True, "vera_a": matrices[0], "vera_b": matrices[1]}

    def matrices(self, linear: Any, made: Pair | None) -> Pair:
        """The matrices of LoRA that are equal to VeRA, in the slots that have it.

        Which rows and columns of the shared matrices a device takes depends on the
        linear, so all devices have the whole matrices.
        """
        d, b = linear.table(VERA_D.name), linear.table(VERA_B.name)
        own_a = _own(linear.table("vera_a"), 1, linear.in_features, linear.input_parts)
        outputs = linear.output_parts, linear.output_sections
        own_b = _own(linear.table("vera_b"), 2, b.shape[1], *outputs)
        vera = own_a * d[:, None], own_b * b[:, None]
        if made is None:
            return vera
        is_used = linear.table("has_vera")[:, None, None]
        return jnp.where(is_used, vera[0], made[0]), jnp.where(
            is_used, vera[1], made[1]
        )

    def call_bytes(self, slots: Any, in_features: int, out_features: int) -> int:
        """The matrices that are made, and their gradients, in float32."""
        return 2 * 4 * slots.num_slots * slots.rank * (in_features + out_features)

    # ---- of an adapter ---------------------------------------------------------------

    def as_lora(
        self, tensors: Tensors, frozen: Any, in_features: int, out_features: int
    ) -> Tensors:
        """A d and B b."""
        a = frozen.a[:in_features] * tensors[VERA_D.name]
        b = frozen.b[:, :out_features] * tensors[VERA_B.name]
        return {LORA_A.name: a, LORA_B.name: b}

    def frozen(self, job: LoraJob, shapes: Sequence[Sequence[int]]) -> VeraMatrices:
        """The matrices of the job's seed."""
        k, n = (max(sizes) for sizes in zip(*shapes, strict=True))
        return VeraMatrices(job.projection_prng_key, job.rank, k, n)

    # ---- in a PEFT folder ------------------------------------------------------------

    def to_peft(self, adapter: Any) -> dict[str, Any]:
        """One rank, and no scaling."""
        vera = adapter.vera
        return {
            "d_initial": 0.1,  # of a new adapter, PEFT's own
            "init_weights": True,
            "peft_type": self.peft_type,
            "projection_prng_key": vera.key,
            "r": vera.rank,
            "save_projection": vera.is_saved,
            "vera_dropout": adapter.dropout,
        }

    def from_peft(self, path: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
        """Checks the seed; lora_alpha is the rank, with which the scaling is 1.

        Raises:
            AdapterError: A setting cannot be used.
        """
        given = dict(config)
        dropout = given.pop("vera_dropout", 0.0)
        key = given.get("projection_prng_key")
        is_saved = given.get("save_projection", True)
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < 2**32:
            raise AdapterError(
                f"{path} has projection_prng_key={shown(key)}; wanted a whole number "
                "from 0 to below 2^32."
            )
        if not isinstance(is_saved, bool):
            raise AdapterError(
                f"{path} has save_projection={shown(is_saved)}; wanted true or false."
            )
        given |= {"use_vera": True, "save_projection": is_saved}
        return given | {"lora_alpha": given.get("r"), "lora_dropout": dropout}

    def frozen_to_peft(self, frozen: VeraMatrices) -> Tensors:
        """The matrices, unless the seed is enough."""
        if not frozen.is_saved:
            return {}
        pair = frozen.a.T, frozen.b.T
        return dict(zip(self.peft_tensors, pair, strict=True))

    def frozen_from_peft(
        self,
        folder: pathlib.Path,
        config: Mapping[str, Any],
        saved: Mapping[str, np.ndarray],
        shapes: Sequence[Sequence[int]],
    ) -> VeraMatrices:
        """The matrices of the seed; those of the file must be equal.

        Raises:
            AdapterError: They are not.
        """
        rank, key = config["r"], config["projection_prng_key"]
        k, n = (max(sizes) for sizes in zip(*shapes, strict=True))
        drawn = VeraMatrices(key, rank, k, n, is_saved=config["save_projection"])
        for name, wanted in self.frozen_to_peft(drawn).items():
            array = saved.get(name)
            if array is None or not np.array_equal(array, wanted):
                there = "is not there" if array is None else "has other values"
                raise AdapterError(
                    f"{folder}: {name} {there} than projection_prng_key={key} gives "
                    f"for this base model and rank {rank}, {list(wanted.shape)} in "
                    "float32. If it was rounded to another dtype, set save_projection "
                    "to false in adapter_config.json, and it is drawn again."
                )
        return drawn


def _own(
    matrix: jax.Array,
    axis: int,
    size: int,
    parts: int,
    sections: tuple[int, ...] = (1,),
) -> Array:
    """Returns the first features of a matrix, or this device's part of them."""
    first = jax.lax.slice_in_dim(matrix, 0, size * parts, axis=axis)
    if parts == 1:
        return first
    return own_sections(first, axis, sections, parts, jax.lax.axis_size(TENSOR))


VARIANT = Vera()
