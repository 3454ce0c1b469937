"""`jaxlora sweep`."""

import argparse
from typing import TYPE_CHECKING

from jaxlora.cli.command import Command
from jaxlora.cli.options import add_price, read_run, use_device
from jaxlora.cli.train import add_arguments, train
from jaxlora.common.console import show, stdout
from jaxlora.errors import ConfigError

if TYPE_CHECKING:
    from jaxlora.config import RunConfig


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the configurations, plan them on the GPUs of this machine, and "
        "train nothing",
    )
    add_price(parser)


def _run(arguments: argparse.Namespace) -> int:
    _, _, config = read_run(arguments)
    if config.sweep is None:
        raise ConfigError(
            f"{arguments.run_file} has no sweep, which names the settings to try. Add "
            "one, as in docs/howto/sweep.md, or run jaxlora train."
        )
    if arguments.dry_run:
        _print_plan(config, arguments)
        return 0
    return train(arguments)


def _print_plan(config: "RunConfig", arguments: argparse.Namespace) -> None:
    """Prints the configurations, and where and when each would train."""
    from jaxlora.forecast import plan_run_groups
    from jaxlora.forecast.sweep_groups import NO_TIME, print_groups
    from jaxlora.plan.memory.gpu_share import take_free_gpus
    from jaxlora.sweeps.configurations import print_configurations

    use_device(arguments)
    console = stdout()
    print_configurations(config, console)
    take_free_gpus(gathers=config.may_gather)  # the memory that training has
    if (groups := plan_run_groups(config)) is None:
        show(console, NO_TIME, soft_wrap=True)
        return
    print_groups(groups, console, price_per_hour=arguments.price_per_hour)


COMMAND = Command(
    name="sweep",
    text="Train the configurations of a run file with a sweep, give up the bad ones "
    "early, and report which are best. `jaxlora train` does the same.",
    example="jaxlora sweep run.yaml",
    add_arguments=_add_arguments,
    run=_run,
)
