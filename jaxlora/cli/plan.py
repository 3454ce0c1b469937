"""`jaxlora plan`."""

import argparse

from rich.console import Console

from jaxlora.cli.command import Command
from jaxlora.cli.options import OPTIONS, add_mesh, positive_int


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", help="YAML; see docs/run_file.md")
    add_mesh(parser)
    parser.add_argument(
        "--steps", type=positive_int, help="only each job's first N steps", metavar="N"
    )
    parser.add_argument(
        "--other-machine",
        action="store_true",
        help="plan for another machine than this one, whose devices, kernels and "
        "memory are then not checked",
    )
    parser.add_argument("--picture", help="write a Gantt picture (.png, .svg or .pdf)")


def _run(arguments: argparse.Namespace) -> None:
    from jaxlora.memory.gpu_share import take_free_gpus
    from jaxlora.plan import plan_run
    from jaxlora.plan_report import draw_plan, print_plan
    from jaxlora.run_file import RunFile

    given = {} if arguments.mesh is None else {"mesh": arguments.mesh}
    file = RunFile.read(arguments.run_file, **OPTIONS)
    config = file.config(given, finds_files=True)
    take_free_gpus(gathers=config.may_gather)  # the memory that training has
    with file.rewords(given):
        planned = plan_run(
            config, steps=arguments.steps, other_machine=arguments.other_machine
        )
    print_plan(planned, Console())
    if arguments.picture:
        drawn = draw_plan(planned, arguments.picture)
        total = len(planned.whole.schedule.microbatches)
        print(f"wrote {arguments.picture}: the first {drawn} of {total} microbatches")


COMMAND = Command(
    name="plan",
    text="Show how a run's samples will be packed: microbatches, fill, simulated time. "
    "Reads the tokenizer and the jobs' data; needs no weights and no GPU. Refuses what "
    "`jaxlora train` would refuse before its first step.",
    add_arguments=_add_arguments,
    run=_run,
)
