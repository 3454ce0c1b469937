"""Rows of the step benchmark: what each one runs, and on which tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlora.bench.report import Timing
from jaxlora.bench.tokens import Microbatch, full_microbatch
from jaxlora.models.base_format import BaseFormat
from jaxlora.scheduler import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        model: One of `shapes.MODELS`.
        row: One of `ROWS`.
        layers: Replaces the model's own number of layers, unless None.
        adapters: Number of adapters. Rows of other libraries have one.
        rank: Rank of each adapter.
        dropout: Dropout rate of each adapter.
        microbatch_tokens: Tokens of a microbatch.
        microbatches: Microbatches of a step.
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
    layers: int | None = None
    adapters: int = 4
    rank: int = 16
    dropout: float = 0.1
    microbatch_tokens: int = 8192
    microbatches: int = 1
    block_tokens: int = 64
    median_tokens: int = 600
    longest_tokens: int = 2048
    dtype: str = "bfloat16"
    attention: str = "auto"
    capability: int | None = None
    repeats: int = 10
    profile: bool = False

    @property
    def limits(self) -> Limits:
        """Limits of a microbatch."""
        return Limits(capacity=self.microbatch_tokens, block_tokens=self.block_tokens)


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
        layout: Layout of samples for torch: `packed` under a block mask, or `padded`.
    """

    library: str
    has_adapters: bool = True
    implementation: str = "xla"
    base_format: BaseFormat | None = None
    keep_bf16: tuple[str, ...] = ()
    remat: str = "none"
    layout: str = "packed"


def _fused(remat: str = "none", **options: Any) -> Row:
    """Returns a row of the fused kernels."""
    return Row(library="jaxlora", implementation="mosaic", remat=remat, **options)


def _quantized(name: str, *, remat: str = "none", keep_bf16=(), **options: Any) -> Row:
    """Returns the row of the fused kernels on a quantized base."""
    base_format = BaseFormat.named(name, **options)
    return _fused(remat, base_format=base_format, keep_bf16=keep_bf16)


FROZEN, PEER = "adapters off", "peft, packed"
FP8 = "jaxlora mosaic, fp8"
ROWS = {
    FROZEN: Row(library="jaxlora", has_adapters=False),
    "jaxlora mosaic": _fused(),
    "jaxlora triton": Row(library="jaxlora", implementation="triton"),
    "jaxlora xla": Row(library="jaxlora"),
    "jaxlora mosaic, remat mlp": _fused("mlp"),
    "jaxlora mosaic, remat layer": _fused("layer"),
    "jaxlora mosaic, remat elementwise": _fused("elementwise"),
    FP8: _quantized("fp8", transposed=True),
    f"{FP8}, one copy": _quantized("fp8"),
    f"{FP8}, one copy, remat elementwise": _quantized("fp8", remat="elementwise"),
    f"{FP8}, down_proj kept": _quantized(
        "fp8", transposed=True, keep_bf16=("down_proj",)
    ),
    f"{FP8} forward": _quantized("fp8", fp8_backward=False),
    "jaxlora mosaic, int8": _quantized("int8"),
    "jaxlora mosaic, nf4": _quantized("nf4"),
    "jaxlora xla, remat layer": Row(library="jaxlora", remat="layer"),
    "torch, adapters off": Row(library="torch", has_adapters=False),
    PEER: Row(library="torch"),
    "peft, padded": Row(library="torch", layout="padded"),
    "peft, packed, remat": Row(library="torch", remat="layer"),
}


def microbatches(case: Case, vocab_size: int) -> list[Microbatch]:
    """Makes the microbatches of a step, equal for all rows with as many jobs."""
    lengths = {"median": case.median_tokens, "longest": case.longest_tokens}
    return [
        full_microbatch(case.adapters, case.limits, vocab_size, **lengths, seed=i)
        for i in range(case.microbatches)
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
        **timing.columns("step_ms", 2),
        "device": device,
    }
