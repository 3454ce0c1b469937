"""`jaxlora profile`."""

import argparse
import dataclasses
import pathlib

from jaxlora.cli.options import (
    Command,
    add_device,
    add_revision,
    positive_int,
    use_device,
)
from jaxlora.common.console import complain, say, stdout


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="folder or hub id, as `model` of a run file; only config.json is read, as "
        "the weights are random",
    )
    add_revision(parser)
    add_device(parser)
    _add_sizes(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--quantize-base", help="fp8, int8 or nf4", metavar="FORMAT")
    parser.add_argument(
        "--remat", choices=("none", "elementwise", "mlp", "layer"), default="none"
    )
    parser.add_argument("--implementation", default="auto", help="LoRA kernels")
    parser.add_argument("--attention", default="auto", help="attention kernels")
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and fewer repetitions"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="write here rather than into the cache, where plans look",
        metavar="FILE",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = {
        "microbatch-tokens": (8192, "of the largest microbatches"),
        "longest-tokens": (2048, "of the longest samples"),
        "block-tokens": (64, "of a block"),
        "adapters": (4, "that share a microbatch"),
        "rank": (16, "of each adapter"),
    }
    for name, (default, text) in sizes.items():
        help_text = f"{text} (default {default})"
        parser.add_argument(
            f"--{name}", type=positive_int, default=default, help=help_text, metavar="N"
        )


def _run(arguments: argparse.Namespace) -> None:
    use_device(arguments)
    from jaxlora.cli.outputs import check_output
    from jaxlora.costs.device_profile import write_profile
    from jaxlora.device_check import check_device
    from jaxlora.pallas_kernels.device import device_kind
    from jaxlora.plan.memory.gpu_share import take_free_gpus
    from jaxlora.profile.measure import Settings, measure
    from jaxlora.profile.table import print_profile
    from jaxlora.train.compilation_cache import keep_compiled_programs

    if arguments.output is not None:
        check_output(arguments.output, [arguments.model])
    take_free_gpus()
    check_device()
    keep_compiled_programs()
    names = {field.name for field in dataclasses.fields(Settings)}
    given = {name: getattr(arguments, name) for name in names}
    profile = measure(Settings(**given), note=complain)
    print_profile(profile, stdout())
    path = write_profile(device_kind(), profile, arguments.output)
    say(f"wrote {path}")


COMMAND = Command(
    name="profile",
    text="Measure a model on the device that is here: the time of passes by tokens and "
    "lengths, optimizer steps, links and memory. `jaxlora plan` and training use what "
    "was measured instead of the device's data sheet, for the same model and kernels.",
    example="jaxlora profile meta-llama/Llama-3.1-8B",
    add_arguments=_add_arguments,
    run=_run,
)
