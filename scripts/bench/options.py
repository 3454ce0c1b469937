"""Command-line options that benchmarks share."""

import argparse
from pathlib import Path


def make_parser(subject: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of `jaxlora bench SUBJECT`, which has no options yet."""
    return argparse.ArgumentParser(
        prog=f"jaxlora bench {subject}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option that asks for files."""
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="folder for CSV files and plots; without it, nothing is written",
        metavar="DIR",
    )


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
