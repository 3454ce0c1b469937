"""The `jaxlora` command."""

import argparse
import io
import logging
import pathlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler

from jaxlora import __version__, console
from jaxlora.bench.subjects import SUBJECTS
from jaxlora.bench.subjects import run as run_benchmark
from jaxlora.errors import JaxloraError

if TYPE_CHECKING:
    from jaxlora.config import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 1 after an error, or 130 after Ctrl-C.
    """
    # A file name that the terminal cannot show must not raise an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    _set_up_logging(arguments.verbose)
    try:
        return arguments.run(arguments) or 0
    except JaxloraError as error:
        print(f"jaxlora: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"jaxlora: error: {_describe(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxlora: interrupted.", file=sys.stderr)
        return 130


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _set_up_logging(verbose: bool) -> None:
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if console.stderr.is_terminal:
        handler = RichHandler(console=console.stderr, show_path=False)
    logger = logging.getLogger("jaxlora")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    warnings.showwarning = _log_warning
    # Orbax logs every phase of every save.
    logging.getLogger("absl").setLevel(logging.ERROR)


def _log_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Logs a warning on one line, without its location in the code."""
    from jaxlora.train.compilation_cache import add_advice

    logging.getLogger("jaxlora").warning("%s", add_advice(str(message)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxlora",
        description="Train many LoRA adapters at once on one frozen language model.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "Train the jobs of a run file together.")
    train.add_argument("run_file", help="YAML; see docs/run_file.md")
    train.add_argument("--output-dir", help="replaces output_dir of the run file")
    _add_mesh(train)
    _add_processes(train)
    train.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint"
    )

    plan = command(
        "plan",
        _plan,
        "Show how a run's samples will be packed: microbatches, fill, simulated time. "
        "Reads the tokenizer and the jobs' data; needs no weights and no GPU.",
    )
    plan.add_argument("run_file", help="YAML; see docs/run_file.md")
    _add_mesh(plan)
    plan.add_argument(
        "--steps", type=_positive, help="only each job's first N steps", metavar="N"
    )
    plan.add_argument("--picture", help="write a Gantt picture (.png, .svg or .pdf)")

    convert = command(
        "convert",
        _convert,
        "Convert a GGUF file, or a checkpoint in another dtype, to a Hugging Face "
        "folder of safetensors.",
    )
    convert.add_argument("source", help="GGUF file, checkpoint folder or hub id")
    convert.add_argument("out", help="folder to write; must not exist")
    convert.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    _add_revision(convert)

    merge = command(
        "merge", _merge, "Merge an adapter into its base as a Hugging Face folder."
    )
    merge.add_argument("base", help="checkpoint folder or hub id")
    merge.add_argument("adapter", help="PEFT folder")
    merge.add_argument("out", help="folder to write; must not exist")
    merge.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    _add_revision(merge)

    export = command(
        "export",
        _export,
        "Write a PEFT folder for each job of a run: as the run exported it, or as of "
        "the newest checkpoint. The exit status is 1 if a job has nothing to write.",
    )
    export.add_argument("run_dir", help="output_dir of a run")
    export.add_argument("out", help="folder for one PEFT folder per job")
    export.add_argument("--job", action="append", help="only this job; repeatable")
    export.add_argument(
        "--overwrite",
        action="store_true",
        help="replace folders in OUT that jaxlora did not write",
    )

    _add_bench(command)

    inspect = command(
        "inspect",
        _inspect,
        "Describe a model folder, a PEFT folder, a run or a run file; or the device.",
    )
    inspected = inspect.add_mutually_exclusive_group(required=True)
    inspected.add_argument("path", nargs="?", help="folder, run file or hub id")
    inspected.add_argument(
        "--device",
        action="store_true",
        help="describe the GPU (or CPU), and which kernels and attention can run there",
    )
    _add_revision(inspect)
    return parser


def _add_bench(command: Callable[..., argparse.ArgumentParser]) -> None:
    bench = command("bench", _bench, "Run a benchmark and print its tables.")
    bench.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = (f"  {name:12} {s.summary}" for name, s in SUBJECTS.items())
    bench.epilog = "\n".join(["subjects:", *listed])
    bench.add_argument(
        "subject",
        choices=SUBJECTS,
        help="see below; `jaxlora bench SUBJECT --help` lists its options",
        metavar="SUBJECT",
    )
    bench.add_argument("options", nargs=argparse.REMAINDER, metavar="...")


def _add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", help="branch, tag or commit of a hub id", metavar="REV"
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        help="replaces mesh of the run file: sizes such as stage=2,fsdp=2, or auto",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes, on one host or more; see docs/multi_host.md"
    )
    group.add_argument(
        "--coordinator", help="address of process 0", metavar="HOST:PORT"
    )
    group.add_argument("--num-processes", type=_positive, help="processes in all")
    group.add_argument(
        "--process-id", type=int, help="number of this process, from 0", metavar="I"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _train(arguments: argparse.Namespace) -> int:
    from jaxlora.distributed.environment import find_membership
    from jaxlora.memory.gpu_share import take_free_gpus
    from jaxlora.run_file import load_run

    member = find_membership(
        arguments.coordinator, arguments.num_processes, arguments.process_id
    )
    options = {"output_dir": arguments.output_dir or None, "mesh": arguments.mesh}
    given = {key: value for key, value in options.items() if value is not None}
    config = load_run(arguments.run_file, **given)
    local_ids = None if member is None else member.local_device_ids
    take_free_gpus(local_ids, gathers=config.may_gather)
    if member is None:
        return _train_in_process(config, resume=arguments.resume)
    from jaxlora.distributed.start import joined

    with joined(member):
        return _train_in_process(config, resume=arguments.resume)


def _train_in_process(config: "RunConfig", *, resume: bool) -> int:
    from jaxlora.distributed import processes
    from jaxlora.train.report import print_summary
    from jaxlora.train.trainer import Trainer

    result = Trainer(config).train(resume=resume)
    if processes.is_first():
        print_summary(result)
    if result.interrupted:
        return 130
    return int(any(job.progress.status == "failed" for job in result.jobs))


def _plan(arguments: argparse.Namespace) -> None:
    from jaxlora.memory.gpu_share import take_free_gpus
    from jaxlora.plan import plan_run
    from jaxlora.plan_report import draw_plan, print_plan
    from jaxlora.run_file import load_run

    given = {} if arguments.mesh is None else {"mesh": arguments.mesh}
    config = load_run(arguments.run_file, **given)
    take_free_gpus(gathers=config.may_gather)  # the memory that training has
    planned = plan_run(config, steps=arguments.steps)
    print_plan(planned, Console())
    if arguments.picture:
        drawn = draw_plan(planned, arguments.picture)
        total = len(planned.whole.schedule.microbatches)
        print(f"wrote {arguments.picture}: the first {drawn} of {total} microbatches")


def _convert(arguments: argparse.Namespace) -> None:
    from jaxlora.hf.convert import convert

    folder = convert(
        arguments.source,
        arguments.out,
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    print(f"wrote {folder}")


def _merge(arguments: argparse.Namespace) -> None:
    from jaxlora.adapters.merge import merge_adapter

    folder = merge_adapter(
        arguments.base,
        arguments.adapter,
        arguments.out,
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    print(f"wrote {folder}")


def _export(arguments: argparse.Namespace) -> int:
    from jaxlora.train.export import export_checkpoint

    exported = export_checkpoint(
        pathlib.Path(arguments.run_dir),
        pathlib.Path(arguments.out),
        arguments.job,
        overwrite=arguments.overwrite,
    )
    for folder in exported.folders:
        print(f"wrote {folder}")
    for name, reason in exported.left_out.items():
        print(f"jaxlora: not exported: {name}: {reason}", file=sys.stderr)
    return int(bool(exported.left_out))


def _bench(arguments: argparse.Namespace) -> None:
    run_benchmark(arguments.subject, arguments.options)


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.device:
        from jaxlora.inspect_device import inspect_device

        return inspect_device(Console())
    from jaxlora.inspect import inspect_path

    inspect_path(arguments.path, Console(), revision=arguments.revision)
