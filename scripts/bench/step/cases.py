"""Rows of the step benchmark: what each one runs, and on which tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlora.bench.report import Timing
from jaxlora.bench.tokens import Lengths, Microbatch, full_microbatch
from jaxlora.models.base_format import BaseFormat
from jaxlora.scheduler import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        model: One of `shapes.MODELS`.
        row: One of `ROWS`.
        num_layers: Replaces the model's own number of layers, unless None.
        num_jobs: Number of adapters. Rows of other libraries have one.
        rank: Rank of each adapter.
        dropout: Dropout rate of each adapter.
        capacity: Tokens of a microbatch.
        num_microbatches: Microbatches of a step.
        block_tokens: Tokens of a block.
        median_tokens: Median length of a sample.
        longest_tokens: Largest length of a sample.
        dtype: Dtype of weights and activations.
        attention: Implementation of attention in jaxlora: `auto`, `cudnn`, `triton` or
            `xla`.
        capability: Ten times the compute capability for which Triton compiles, such as
            80; None: the device's.
        repeats: Number of timed steps.
        profile: Whether to attribute device time to parts as well.
    """

    model: str
    row: str
    num_layers: int | None = None
    num_jobs: int = 4
    rank: int = 16
    dropout: float = 0.1
    capacity: int = 8192
    num_microbatches: int = 1
    block_tokens: int = 64
    median_tokens: int = 600
    longest_tokens: int = 2048
    dtype: str = "bfloat16"
    attention: str = "auto"
    capability: int | None = None
    repeats: int = 10
    profile: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """How a row runs.

    Attributes:
        library: `jaxlora`, or `torch` for transformers with peft.
        has_adapters: Whether it trains adapters, or runs the base alone.
        implementation: LoRA kernels, for jaxlora.
        base_format: How the base is quantized, for jaxlora; None: it is not.
        keep_bf16: Linears that are not quantized, as in a run file.
        remat: What the backward pass recomputes. For torch, every value but `none`
            means transformers' gradient checkpointing.
        layout: Layout of samples for torch: `packed` under a block mask, `padded`, or
            `flash` for flash attention over packed rows.
    """

    library: str
    has_adapters: bool = True
    implementation: str = "xla"
    base_format: BaseFormat | None = None
    keep_bf16: tuple[str, ...] = ()
    remat: str = "none"
    layout: str = "packed"


def _quantized(
    name: str,
    *,
    remat: str = "none",
    keep_bf16: tuple[str, ...] = (),
    **options: Any,
) -> Row:
    """Returns the row of the fused kernels on a quantized base."""
    return Row(
        library="jaxlora",
        implementation="mosaic",
        base_format=BaseFormat.named(name, **options),
        keep_bf16=keep_bf16,
        remat=remat,
    )


FROZEN, PEER = "adapters off", "peft, packed"
ROWS = {
    FROZEN: Row(library="jaxlora", has_adapters=False),
    "jaxlora mosaic": Row(library="jaxlora", implementation="mosaic"),
    "jaxlora triton": Row(library="jaxlora", implementation="triton"),
    "jaxlora xla": Row(library="jaxlora"),
    "jaxlora mosaic, remat mlp": Row(
        library="jaxlora", implementation="mosaic", remat="mlp"
    ),
    "jaxlora mosaic, remat layer": Row(
        library="jaxlora", implementation="mosaic", remat="layer"
    ),
    "jaxlora mosaic, remat elementwise": Row(
        library="jaxlora", implementation="mosaic", remat="elementwise"
    ),
    "jaxlora mosaic, fp8": _quantized("fp8", transposed=True),
    "jaxlora mosaic, fp8, one copy": _quantized("fp8"),
    "jaxlora mosaic, fp8, one copy, remat elementwise": _quantized(
        "fp8", remat="elementwise"
    ),
    "jaxlora mosaic, fp8, down_proj kept": _quantized(
        "fp8", transposed=True, keep_bf16=("down_proj",)
    ),
    "jaxlora mosaic, fp8 forward": _quantized("fp8", fp8_backward=False),
    "jaxlora mosaic, int8": _quantized("int8"),
    "jaxlora mosaic, nf4": _quantized("nf4"),
    "jaxlora xla, remat layer": Row(library="jaxlora", remat="layer"),
    "torch, adapters off": Row(library="torch", has_adapters=False),
    PEER: Row(library="torch"),
    "peft, padded": Row(library="torch", layout="padded"),
    "peft, flash attention": Row(library="torch", layout="flash"),
    "peft, packed, remat": Row(library="torch", remat="layer"),
}


def microbatches(case: Case, vocab_size: int) -> list[Microbatch]:
    """Makes the microbatches of a step, equal for all rows with as many jobs."""
    limits = Limits(capacity=case.capacity, block_tokens=case.block_tokens)
    lengths = Lengths(median=case.median_tokens, longest=case.longest_tokens)
    return [
        full_microbatch(case.num_jobs, limits, lengths, vocab_size, seed=i)
        for i in range(case.num_microbatches)
    ]


def result(times: Sequence[float], num_tokens: int, device: str) -> dict[str, Any]:
    """Makes the columns that every measured row has.

    Args:
        times: Milliseconds of each step.
        num_tokens: Tokens of a step, without padding.
        device: Name of the device.
    """
    timing = Timing.of(times)
    return {
        "tokens": num_tokens,
        "tokens_per_second": round(1000 * num_tokens / timing.median),
        "step_ms": round(timing.median, 2),
        "p10_ms": round(timing.p10, 2),
        "p90_ms": round(timing.p90, 2),
        "device": device,
    }
