"""Prints, by estimate, which settings `auto` takes for models on GPUs of some sizes.

Nothing is trained. Attention and the LoRA linears are those of plain XLA, without
dropout, as compiled on this machine.
"""

import argparse
import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from jaxlora.bench.shapes import MODELS, config_json
from jaxlora.config import RunConfig
from jaxlora.costs.device_speed import find_speed
from jaxlora.costs.gpus import GPUS, Gpu
from jaxlora.hf.config import model_config
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.memory.gpu_share import SHARE
from jaxlora.memory.mesh import MeshStages, resident_footprint
from jaxlora.memory.options import fastest, find_options
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.pallas_kernels import FORMATS

_RESERVE = 0.05
_BOUNDS = Bounds(
    smallest=1024,
    largest=16384,
    unit=1024,
    remats=("none", "mlp", "layer"),
    sample_tokens=400.0,
    window_tokens=4 * 16384.0,
)
_CONFIG = RunConfig(
    model="m",
    jobs=[{"name": "a", "data": {"path": "a.jsonl"}}],  # type: ignore[list-item]
    microbatch_tokens="auto",
    remat="auto",
)


# A GPU of each memory size.
_NAMES = ("rtx4090", "a100-40", "l40s", "a100-80", "h200")
SHOWN = tuple(next(gpu for gpu in GPUS if gpu.name == name) for name in _NAMES)


def cell(spec: DecoderSpec, gpu: Gpu) -> str:
    """Describes the settings that `auto` takes on a GPU that runs nothing else."""
    num_bytes = int(gpu.memory_gib * 2**30 * SHARE * (1 - _RESERVE))
    available = DeviceMemory(num_bytes=num_bytes, source="a described device")
    stages = MeshStages.of(_CONFIG, spec)
    if resident_footprint(stages).total_bytes(0) > num_bytes:
        return "does not fit"
    found = find_options(_CONFIG, stages, _BOUNDS, available, find_speed(gpu.kind))
    chosen = fastest(found)
    if not chosen.fits:
        return "does not fit"
    needed = format_bytes(chosen.found.total_bytes(chosen.tokens))
    return f"{chosen.remat}, {chosen.tokens:,}, {needed}"


def decoder(model: str, base: str = "bfloat16") -> DecoderSpec:
    """Makes the decoder of a model with 4 slots of rank 16.

    Args:
        model: Name of the model.
        base: Format of the linears' frozen weights; all else is in bfloat16.
    """
    config = model_config(config_json(model))
    options = DecoderOptions(
        dtype=jnp.dtype("bfloat16"),
        base_format=BaseFormat.named(base) if base in FORMATS else None,
        max_segment_tokens=1024,
        mean_segment_tokens=400,
    )
    return DecoderSpec(
        config=config,
        options=options,
        slots=SlotShape(num_slots=4, rank=16),
        adapted=tuple(sorted(map(linear_path, linear_names(config)))),
    )


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    out = argparse.ArgumentParser(
        prog="jaxlora bench memory", description="What fits, by estimate."
    )
    names = ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"]
    names += ["qwen2.5-14b", "qwen2.5-32b"]
    out.add_argument("--models", nargs="+", choices=MODELS, default=names)
    bases = ["bfloat16", *FORMATS]
    out.add_argument("--bases", nargs="+", choices=bases, default=bases[:1])
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table in Markdown."""
    args = parser().parse_args(argv)
    gpus = " | ".join(f"{g.kind}, {g.memory_gib:g} GiB" for g in SHOWN)
    print(f"| model | base | {gpus} |")
    print("|---" * (len(SHOWN) + 2) + "|")
    for model, base in itertools.product(args.models, args.bases):
        spec = decoder(model, base)
        cells = " | ".join(cell(spec, gpu) for gpu in SHOWN)
        print(f"| {model} | {base} | {cells} |", flush=True)
