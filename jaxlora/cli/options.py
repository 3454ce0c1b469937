"""Options that several commands have."""

import argparse
import math

# Options that replace a setting of the run file, by the setting.
OPTIONS = {"output_dir": "--output-dir", "mesh": "--mesh"}


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", help="branch, tag or commit of a hub id", metavar="REV"
    )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        help="replaces mesh of the run file: sizes such as stage=2,fsdp=2, or auto",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu",),
        help="cpu: compute on the CPU although there is a GPU",
    )


def use_device(arguments: argparse.Namespace) -> None:
    """Does what `--device` asks for; JAX must not have started."""
    from jaxlora.device_check import use_cpu

    if arguments.device == "cpu":
        use_cpu()


def positive_int(text: str) -> int:
    """Reads a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def add_price(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="P",
        help="price of one GPU for an hour, in any currency; all GPUs of the machine "
        "are paid for",
    )


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price, such as 2.50")
    return price
