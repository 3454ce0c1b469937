"""`jaxlora bench`."""

import argparse

from jaxlora.bench.subjects import SUBJECTS
from jaxlora.bench.subjects import run as run_benchmark
from jaxlora.cli.options import Command, add_device, use_device


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = (f"  {name:12} {s.summary}" for name, s in SUBJECTS.items())
    parser.epilog = "\n".join(["subjects:", *listed])
    parser.add_argument(
        "subject",
        choices=SUBJECTS,
        help="see below; `jaxlora bench SUBJECT --help` lists its options",
        metavar="SUBJECT",
    )
    add_device(parser)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...")


def _run(arguments: argparse.Namespace) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_device(parser)
    device, options = parser.parse_known_args(arguments.options)
    use_device(device if device.device else arguments)
    run_benchmark(arguments.subject, options)


COMMAND = Command(
    name="bench",
    text="Run a benchmark and print its tables.",
    example="jaxlora bench kernels",
    add_arguments=_add_arguments,
    run=_run,
)
