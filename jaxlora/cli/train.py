"""`jaxlora train` and `jaxlora sweep`."""

import argparse
import logging
import pathlib
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
from jaxlora.common.console import show, stdout
from jaxlora.common.garbage import no_garbage_collection
from jaxlora.errors import ConfigError

if TYPE_CHECKING:
    from jaxlora.config import RunConfig
    from jaxlora.config.run_file import RunFile
    from jaxlora.train.report.summary import RunResult

logger = logging.getLogger(__name__)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", help="YAML; see docs/run_file.md")
    add_overrides(parser)
    parser.add_argument("--output-dir", help="replaces output_dir of the run file")
    add_mesh(parser)
    add_device(parser)
    _add_processes(parser)
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint"
    )
    parser.add_argument(
        "--drop-state",
        action="store_true",
        help="with --resume: end jobs that have done more steps than they have now (or "
        "that early_stopping with less patience ends), and drop their optimizer states",
    )
    parser.add_argument(
        "--replan",
        action="store_true",
        help="with --resume: choose replicas, and all else that is auto, anew for the "
        "jobs that have not ended",
    )
    parser.add_argument(
        "--page",
        type=_port,
        nargs="?",
        const=8766,
        help="show the run in a browser while it trains, at http://127.0.0.1:PORT (by "
        "default 8766; 0 takes any free port). Nothing can be changed there",
        metavar="PORT",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(
            f"{text} is no port; give one up to 65535, or 0 for any free one"
        )
    return int(text)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes, on one host or more; see docs/multi_host.md"
    )
    group.add_argument(
        "--coordinator", help="address of process 0", metavar="HOST:PORT"
    )
    group.add_argument("--num-processes", type=positive_int, help="processes in all")
    group.add_argument(
        "--process-id", type=int, help="number of this process, from 0", metavar="I"
    )


def _train(arguments: argparse.Namespace) -> int:
    """Trains the run of a run file; returns the exit status."""
    from jaxlora.common.background import in_background
    from jaxlora.plan.memory.gpu_share import query_gpus, take_free_gpus

    # nvidia-smi may take as long as the imports, and fails at once without GPUs.
    gpus = in_background(query_gpus)
    with no_garbage_collection():
        from jaxlora.config import run_file  # noqa: F401
        from jaxlora.distributed.start import find_membership, joined, local_device_ids

    use_device(arguments)
    member = find_membership(
        arguments.coordinator, arguments.num_processes, arguments.process_id
    )
    if arguments.replan and not arguments.resume:
        raise ConfigError(
            "--replan chooses anew for a run that goes on. Give --resume with it, or "
            "leave it out: a new run chooses anyway."
        )
    file, given, config = read_run(arguments)
    if config.sweep is not None and config.sweep.has_groups:
        with file.rewords(given):
            return _train_groups(config, arguments, file, is_member=member is not None)
    local_ids = None if member is None else local_device_ids()
    take_free_gpus(local_ids, gathers=config.may_gather, query=gpus.result)
    with file.rewords(given):
        if member is None:
            return _train_in_process(config, arguments, file)
        with joined(member):
            return _train_in_process(config, arguments, file)


def _serve_page(config: "RunConfig", port: int | None) -> None:
    """Serves the page of the run, if it is wanted, until the process ends."""
    if port is None:
        return
    from jaxlora.serve.run_page import serve_run

    address = serve_run(pathlib.Path(config.output_dir), str(config.model), port)
    logger.info("page: %s", address)


def _train_groups(
    config: "RunConfig",
    arguments: argparse.Namespace,
    file: "RunFile",
    *,
    is_member: bool,
) -> int:
    """Trains a sweep in several groups of devices; returns the exit status."""
    from jaxlora.sweeps.engine.run import run_groups
    from jaxlora.sweeps.files import print_summary
    from jaxlora.train.report.run_callbacks import KeepRunFile

    assert config.sweep is not None
    if is_member:
        raise ConfigError(
            f"sweep.groups is {config.sweep.groups_text}, and this process is one of "
            "several of a run. Start jaxlora sweep once, on one host; for groups on "
            "several hosts, set sweep.ray."
        )
    for name in ("drop_state", "replan"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} changes a run of one process, and "
                f"sweep.groups is {config.sweep.groups_text}. Leave it out."
            )
    copy = KeepRunFile(file)
    _serve_page(config, arguments.page)
    result = run_groups(config, resume=arguments.resume, on_start=copy.write)
    print_summary(result)
    return _status(result)


def _status(result: "RunResult") -> int:
    """Returns the exit status of a run."""
    if result.interrupted:
        return 130
    return int(any(job.progress.status == "failed" for job in result.jobs))


def _train_in_process(
    config: "RunConfig", arguments: argparse.Namespace, file: "RunFile"
) -> int:
    from jaxlora.common.heap import keep_freed_memory
    from jaxlora.device_check import import_while_starting, start_backend

    keep_freed_memory()
    start_backend()
    with no_garbage_collection():
        from jaxlora.distributed import processes
        from jaxlora.run.folder import check_folder
        from jaxlora.run.lock import check_not_in_use
        from jaxlora.sweeps.control import Trainer
        from jaxlora.sweeps.files import print_summary
        from jaxlora.train.report.run_callbacks import KeepRunFile

        # Loading programs needs it.
        import_while_starting("jax.experimental.mosaic.gpu")

    folder = pathlib.Path(config.output_dir)
    processes.from_first(lambda: check_not_in_use(folder))
    processes.from_first(lambda: check_folder(folder, resume=arguments.resume))
    if processes.is_first():
        _serve_page(config, arguments.page)
    callbacks = [KeepRunFile(file)] if processes.is_first() else []
    result = Trainer(config, replan=arguments.replan).train(
        resume=arguments.resume, drop_state=arguments.drop_state, callbacks=callbacks
    )
    if processes.is_first():
        print_summary(result)
    return _status(result)


def _add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the configurations, plan them on the GPUs of this machine, and "
        "train nothing",
    )
    add_price(parser)


def _sweep(arguments: argparse.Namespace) -> int:
    _, _, config = read_run(arguments)
    if config.sweep is None:
        raise ConfigError(
            f"{arguments.run_file} has no sweep, which names the settings to try. Add "
            "one, as in docs/howto/sweep.md, or run jaxlora train."
        )
    if arguments.dry_run:
        _print_plan(config, arguments)
        return 0
    return _train(arguments)


def _print_plan(config: "RunConfig", arguments: argparse.Namespace) -> None:
    """Prints the configurations, and where and when each would train."""
    from jaxlora.forecast import plan_run_groups
    from jaxlora.forecast.sweep_groups import NO_TIME, print_groups
    from jaxlora.plan.memory.gpu_share import take_free_gpus
    from jaxlora.sweeps.files import print_configurations

    use_device(arguments)
    console = stdout()
    print_configurations(config, console)
    take_free_gpus(gathers=config.may_gather)  # the memory that training has
    if (groups := plan_run_groups(config)) is None:
        show(console, NO_TIME, soft_wrap=True)
        return
    print_groups(groups, console, price_per_hour=arguments.price_per_hour)


TRAIN = Command(
    name="train",
    text="Train the jobs of a run file together.",
    example="jaxlora train run.yaml",
    add_arguments=_add_arguments,
    run=_train,
)
SWEEP = Command(
    name="sweep",
    text="Train the configurations of a run file with a sweep, give up the bad ones "
    "early, and report which are best. `jaxlora train` does the same.",
    example="jaxlora sweep run.yaml",
    add_arguments=_add_sweep_arguments,
    run=_sweep,
)
