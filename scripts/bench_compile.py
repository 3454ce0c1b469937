"""Measures the time to trace, lower and compile the fused training step, cold.

    python -m scripts.bench_compile --models wide-2 smollm2-135m llama-3.1-8b

Each row runs in a process of its own with an empty persistent cache, and then again, as
a later run would, with the cache that it has filled. No weights are made. `--serial`
compiles the kernels one after the other, as XLA does on its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from scripts.bench_models import config_json
from tests import tiny

# The smallest model that the fused kernels support.
_WIDE = tiny.CONFIG | {"hidden_size": 256, "intermediate_size": 320}
_LENGTHS = {"wide-2": (1024, 96, 40)}  # tokens of a microbatch, longest, mean
_USUAL_LENGTHS = (8192, 2048, 480)


def measure(model: str, num_layers: int | None, serial: bool) -> dict:
    """Times the steps of compiling in this process."""
    import jax
    import jax.numpy as jnp

    from jaxlora.adapters.optimizer import zero_state
    from jaxlora.hf.config import model_config
    from jaxlora.hf.names import linear_names, linear_path
    from jaxlora.models.decoder import DecoderOptions
    from jaxlora.models.spec import DecoderSpec
    from jaxlora.modules.multi_lora_linear import SlotShape
    from jaxlora.pallas_kernels import compile_program
    from jaxlora.scheduler import Limits
    from jaxlora.train import memory
    from jaxlora.train.step import CompiledSteps, no_garbage_collection

    tokens, longest, mean = _LENGTHS.get(model, _USUAL_LENGTHS)
    fields = _WIDE if model == "wide-2" else config_json(model, num_layers)
    options = DecoderOptions(
        dtype=jnp.dtype(jnp.bfloat16),
        implementation="mosaic",
        attention="cudnn",
        max_segment_tokens=longest,
        mean_segment_tokens=mean,
    )
    config = model_config(fields)
    slots = SlotShape(num_slots=4, rank=16)
    linears = tuple(sorted(map(linear_path, linear_names(config))))
    spec = DecoderSpec(config=config, options=options, slots=slots, adapted=linears)
    state = jax.eval_shape(lambda: zero_state(spec.adapter_shapes(), slots.num_slots))
    limits = Limits(capacity=tokens, block_tokens=64)
    jax.block_until_ready(jnp.zeros(1))  # starts the backend

    began = time.perf_counter()
    with no_garbage_collection():
        traced = CompiledSteps(spec).accumulate.trace(
            spec.base_shapes(),
            state.params,
            state.pending,
            memory._settings_shapes(spec),
            memory._batch_shapes(limits),
            memory._key_shapes(spec),
        )
        after_trace = time.perf_counter()
        lowered = traced.lower()
        after_lower = time.perf_counter()
        program = lowered.compile() if serial else compile_program(lowered)
    after_compile = time.perf_counter()
    found = program.memory_analysis()
    return {
        "model": model,
        "kernels": "one by one" if serial else "side by side",
        "trace_seconds": round(after_trace - began, 2),
        "lower_seconds": round(after_lower - after_trace, 2),
        "compile_seconds": round(after_compile - after_lower, 2),
        "total_seconds": round(after_compile - began, 2),
        "temp_gib": round(found.temp_size_in_bytes / 2**30, 2) if found else None,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "cpus": os.cpu_count(),
    }


def main() -> None:
    """Prints one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["wide-2"])
    parser.add_argument("--layers", type=int, help="instead of the models' own")
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        (model,) = arguments.models
        print(json.dumps(measure(model, arguments.layers, arguments.serial)))
        return
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                _run(model, arguments, folder, cache)


def _run(model: str, arguments: argparse.Namespace, folder: str, cache: str) -> None:
    command = [sys.executable, "-m", "scripts.bench_compile", "--here"]
    command += ["--models", model]
    if arguments.layers:
        command += ["--layers", str(arguments.layers)]
    if arguments.serial:
        command.append("--serial")
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(json.dumps({"model": model, "error": done.stderr[-2000:]}), flush=True)
        return
    row = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"cache": cache, **row}), flush=True)


if __name__ == "__main__":
    main()
