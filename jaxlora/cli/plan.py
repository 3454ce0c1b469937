"""`jaxlora plan`."""

import argparse
from typing import TYPE_CHECKING

from jaxlora.cli.options import (
    Command,
    add_device,
    add_mesh,
    add_overrides,
    add_price,
    positive_int,
    read_run,
    use_device,
)
from jaxlora.common.console import say, stdout
from jaxlora.errors import ConfigError

if TYPE_CHECKING:
    from jaxlora.config import RunConfig
    from jaxlora.costs.gpus import GpuMachine
    from jaxlora.forecast import RunForecast


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", help="YAML; see docs/run_file.md")
    add_overrides(parser)
    add_mesh(parser)
    add_device(parser)
    parser.add_argument(
        "--steps", type=positive_int, help="only each job's first N steps", metavar="N"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME[xN]",
        help="plan for GPUs that need not be here: a100-40, a100-80, h100, h200, l40s "
        "or rtx4090, and how many, as in h100x4",
    )
    parser.add_argument(
        "--replicas",
        choices=["auto"],
        help="plan replicas of different shapes for samples of different lengths, on "
        "all GPUs, in place of a mesh",
    )
    add_price(parser)
    parser.add_argument("--picture", help="write a Gantt picture (.png, .svg or .pdf)")


def _run(arguments: argparse.Namespace) -> int | None:
    from jaxlora.cli.outputs import check_output
    from jaxlora.costs.gpus import parse_machine
    from jaxlora.device_check import use_cpu
    from jaxlora.forecast.report import draw_plan, picture_kind, print_plan

    use_device(arguments)
    machine = None
    if arguments.gpu is not None:
        machine = parse_machine(arguments.gpu)
        use_cpu()  # the GPU that is here, if there is one, is of no use
    file, given, config = read_run(arguments)
    if arguments.picture:
        picture_kind(arguments.picture)
        data = [one.path for job in config.jobs for one in job.data.sets]
        check_output(arguments.picture, [arguments.run_file, config.model, *data])
    is_listed = config.replicas is not None and arguments.replicas is None
    if is_listed and arguments.picture:
        raise ConfigError(
            "--picture simulates devices that are alike, and the run file has "
            "replicas. Leave one of them out."
        )
    with file.rewords(given):
        if arguments.replicas is not None:
            _plan_replicas(config, machine, arguments)
            return None
        planned = _plan(config, machine, arguments.steps)
    if planned is None:
        return 1
    if arguments.price_per_hour is not None and planned.time is None:
        raise ConfigError(
            "--price-per-hour needs a predicted time, and the rates of this device are "
            "not known. Name the GPU that is paid for, as in --gpu h100."
        )
    print_plan(planned, stdout(), price_per_hour=arguments.price_per_hour)
    if arguments.picture:
        shown = draw_plan(planned, arguments.picture)
        say(f"wrote {arguments.picture}: {shown}")
    return None


def _plan_replicas(
    config: "RunConfig", machine: "GpuMachine | None", arguments: argparse.Namespace
) -> None:
    """Prints and draws replicas of different shapes for a run."""
    from jaxlora.forecast.replicas import (
        draw_replicas,
        plan_run_replicas,
        print_replicas,
    )

    for option in ("steps", "price_per_hour"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option.replace('_', '-')} is for the plan of a mesh. Leave it or "
                "--replicas out."
            )
    replicas = plan_run_replicas(config, machine)
    if replicas is None:
        raise ConfigError(
            "--replicas needs the rates of the GPUs, and those of this device are not "
            "known. Name GPUs, as in --gpu h100x16, or measure with `jaxlora profile`."
        )
    print_replicas(replicas, stdout())
    if arguments.picture:
        say(f"wrote {arguments.picture}: {draw_replicas(replicas, arguments.picture)}")


def _plan(
    config: "RunConfig", machine: "GpuMachine | None", steps: int | None
) -> "RunForecast | None":
    """Plans a run; if it does not fit into other GPUs, says so and returns None."""
    from jaxlora.forecast import plan_run
    from jaxlora.forecast.report import print_misfit
    from jaxlora.plan.memory.gpu_share import take_free_gpus
    from jaxlora.plan.memory.need import DoesNotFitError

    if machine is None:
        take_free_gpus(gathers=config.may_gather)  # the memory that training has
        return plan_run(config, steps=steps)
    try:
        return plan_run(config, steps=steps, machine=machine)
    except DoesNotFitError as error:
        print_misfit(error, machine, stdout())
        return None


COMMAND = Command(
    name="plan",
    text="Show whether a run fits, how long it takes, and how well its samples are "
    "packed, on this machine or with --gpu on another one. Reads the tokenizer and the "
    "jobs' data; needs no weights and no GPU. Refuses what `jaxlora train` would "
    "refuse before its first step; exits with 1 if the run does not fit.",
    example="jaxlora plan run.yaml",
    add_arguments=_add_arguments,
    run=_run,
)
