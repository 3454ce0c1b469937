"""`jaxlora sweep`."""

import argparse

from rich.console import Console

from jaxlora.cli.command import Command
from jaxlora.cli.train import add_arguments, read_run, train
from jaxlora.errors import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the configurations and train nothing",
    )


def _run(arguments: argparse.Namespace) -> int:
    from jaxlora.sweeps.configurations import print_configurations

    _, _, config = read_run(arguments)
    if config.sweep is None:
        raise ConfigError(
            f"{arguments.run_file} has no sweep, which names the settings to try. Add "
            "one, as in docs/howto/sweep.md, or run jaxlora train."
        )
    if arguments.dry_run:
        print_configurations(config, Console())
        return 0
    return train(arguments)


COMMAND = Command(
    name="sweep",
    text="Train the configurations of a run file with a sweep, give up the bad ones "
    "early, and report which are best. `jaxlora train` does the same.",
    add_arguments=_add_arguments,
    run=_run,
)
