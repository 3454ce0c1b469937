"""Rows of the step benchmark: what each one runs, and on which tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.profile.tokens import Microbatch, full_microbatch
from scripts.bench.report import Timing
from scripts.bench.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Workload):
    """One row of the table.

    Attributes:
        row: One of `ROWS`.
        adapters: Number of adapters. Rows of other libraries have one.
        microbatches: Microbatches of a step.
        median_tokens: Median length of a sample.
        profile: Whether to attribute device time to parts as well.
    """

    row: str
    adapters: int = 4
    microbatches: int = 1
    median_tokens: int = 600
    profile: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Settings of a row.

    Attributes:
        library: `jaxlora`, or `torch` for transformers with peft.
        has_adapters: Whether it trains adapters, or runs the base alone.
        settings: Settings of the run, for jaxlora.
        layout: Layout of samples for torch: `packed` under a block mask, or `padded`.
    """

    library: str
    has_adapters: bool = True
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = "packed"


def _jaxlora(implementation: str, **settings: Any) -> Row:
    """Returns a row of a run with these settings."""
    own = {"remat": "none"} | settings | {"implementation": implementation}
    return Row(library="jaxlora", settings=own)


def _fp8(args: Mapping[str, Any], **settings: Any) -> Row:
    """Returns a row of the fused kernels on an fp8 base with settings of its format."""
    base = {"quantize_base": "fp8", "quantize_base_args": args}
    return _jaxlora("mosaic", **base, **settings)


FROZEN, PEER = "adapters off", "peft, packed"
FP8 = "jaxlora mosaic, fp8"
ONE_COPY, TWO_COPIES = {"weight_copies": 1}, {"weight_copies": 2}
_MXFP4 = {"quantize_base": "mxfp4", "keep_bf16": (r"self_attn\..*",)}
ROWS = {
    FROZEN: dataclasses.replace(_jaxlora("xla"), has_adapters=False),
    "jaxlora mosaic": _jaxlora("mosaic"),
    "jaxlora triton": _jaxlora("triton"),
    "jaxlora xla": _jaxlora("xla"),
    "jaxlora mosaic, remat mlp": _jaxlora("mosaic", remat="mlp"),
    "jaxlora mosaic, remat layer": _jaxlora("mosaic", remat="layer"),
    "jaxlora mosaic, remat elementwise": _jaxlora("mosaic", remat="elementwise"),
    "jaxlora mosaic, one program": _jaxlora("mosaic", layers_per_program=1000),
    "jaxlora mosaic, 2 layers per program": _jaxlora("mosaic", layers_per_program=2),
    "jaxlora mosaic, 4 layers per program": _jaxlora("mosaic", layers_per_program=4),
    "jaxlora mosaic, 8 layers per program": _jaxlora("mosaic", layers_per_program=8),
    FP8: _fp8(TWO_COPIES),
    f"{FP8}, one copy": _fp8(ONE_COPY),
    f"{FP8}, one copy, remat elementwise": _fp8(ONE_COPY, remat="elementwise"),
    f"{FP8}, down_proj kept": _fp8(TWO_COPIES, keep_bf16=("down_proj",)),
    f"{FP8} forward": _fp8({"fp8_backward": False}),
    "jaxlora mosaic, int8": _jaxlora("mosaic", quantize_base="int8"),
    "jaxlora mosaic, nf4": _jaxlora("mosaic", quantize_base="nf4"),
    "jaxlora mosaic, nf4, remat layer": _jaxlora(
        "mosaic", quantize_base="nf4", remat="layer"
    ),
    "jaxlora mosaic, experts in mxfp4": _jaxlora("mosaic", **_MXFP4),
    "jaxlora mosaic, experts in mxfp4, remat layer": _jaxlora(
        "mosaic", **_MXFP4, remat="layer"
    ),
    "jaxlora xla, remat layer": _jaxlora("xla", remat="layer"),
    PEER: Row(library="torch"),
    "peft, padded": Row(library="torch", layout="padded"),
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
