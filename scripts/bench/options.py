"""Command-line options that benchmarks share."""

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from jaxlora.pallas_kernels.triton.target import forced_capability


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option that asks for files."""
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="folder for all rows as JSON lines, and for tables in Markdown; without "
        "it, nothing is written",
        metavar="DIR",
    )


def add_capability(parser: argparse.ArgumentParser) -> None:
    """Adds the option that compiles Triton kernels for another GPU."""
    parser.add_argument(
        "--capability",
        type=int,
        help="ten times the compute capability for which Triton compiles, such as 80; "
        "by default the device's",
    )


def triton_code(capability: int | None) -> contextlib.AbstractContextManager[None]:
    """Returns the context of the option: Triton compiles for that GPU inside."""
    if capability is None:
        return contextlib.nullcontext()
    return forced_capability(capability)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a training step, apart from its model and its batch."""
    parser.add_argument("--layers", type=int, help="replaces the models' own number")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--longest-tokens", type=int, default=2048, help="in a sample")
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--attention", choices=["auto", "cudnn", "triton", "xla"], default="auto"
    )


def shared_fields(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that are fields of a dataclass; lists become tuples."""
    names = {field.name for field in dataclasses.fields(case)} & vars(options).keys()
    found = {name: getattr(options, name) for name in names}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
