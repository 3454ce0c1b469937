"""Predicts the throughput of meshes of H200 GPUs by simulation.

The time of a pass is estimated from the sizes of the model and the rates of the GPU;
`jaxlora.costs` says how well this agrees with measurements. Jobs of log-normal lengths
are packed into ticks, and the ticks are simulated on the stages of each mesh. Nothing
is measured, so any CPU will do. These costs are not part of the simulation: optimizer
steps, evaluation, checkpoints, and the sums of gradients over replicas.

Prints a table. With --output-dir, writes scaling.csv.

    jaxlora bench scaling --model llama-3.1-70b --output-dir bench
"""

import argparse
import dataclasses
import platform
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import about, dicts_table, write_csv
from jaxlora.bench.scheduler.lengths import jobs
from jaxlora.bench.shapes import LARGE, MODELS, config_json
from jaxlora.costs.device_speed import find_speed
from jaxlora.costs.stages import decoder_seconds
from jaxlora.hf.config import model_config
from jaxlora.hf.names import linear_names, linear_path
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    StageCost,
    pack_ticks,
)
from jaxlora.scheduler.lanes import ticks_of
from jaxlora.scheduler.plan import Plan, evaluate
from jaxlora.scheduler.replicas import Load, choose_slots, decide_pinning
from jaxlora.scheduler.types import batches_by_job
from jaxlora.sharding.mesh_sizes import MeshSizes

DEVICE = find_speed("NVIDIA H200")
DEVICES_PER_NODE = 8
MEAN_TOKENS = 1060  # of the samples
NUM_STEPS, BATCH_SIZE = 16, 16  # of each job
MESHES = (
    "fsdp=1",
    "fsdp=4",
    "stage=4",
    "stage=8",
    "stage=16",
    "stage=2,fsdp=8",
    "data=2,stage=8",
    "data=4,stage=16",
    "data=8,stage=8",
    "stage=8,fsdp=8",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Rates that the simulation takes as given.

    Attributes:
        capacity: Tokens of a microbatch.
        fsdp_factor: Time of a pass with gathered weights, relative to the time with
            weights that are on every device.
        node_bytes: Bytes per second from a device to one of another node.
    """

    capacity: int
    fsdp_factor: float
    node_bytes: float


def decoder(model: str) -> DecoderSpec:
    """Returns a model with all its linears adapted at rank 16."""
    config = model_config(config_json(model))
    options = DecoderOptions(
        dtype=jnp.dtype("bfloat16"),
        max_segment_tokens=4096,
        mean_segment_tokens=MEAN_TOKENS,
    )
    return DecoderSpec(
        config=config,
        options=options,
        slots=SlotShape(num_slots=4, rank=16),
        adapted=tuple(sorted(map(linear_path, linear_names(config)))),
    )


def stage_costs(spec: DecoderSpec, sizes: MeshSizes, given: Assumptions) -> CostModel:
    """Returns the seconds of passes and transfers on a mesh.

    If the mesh spans several nodes, all transfers take as long as those between nodes.
    """
    seconds = decoder_seconds(spec, DEVICE)
    factor = given.fsdp_factor if sizes.fsdp > 1 else 1.0
    stages = tuple(
        StageCost(forward=_per_token(t.forward), backward=_per_token(t.backward))
        for t in (s * factor for s in seconds.stages(seconds.borders(sizes.stage)))
    )
    itemsize = jnp.dtype(spec.options.dtype).itemsize
    sent = given.capacity * spec.config.hidden_size * itemsize
    transfer = DEVICE.transfer_seconds(sent)
    if sizes.num_devices > DEVICES_PER_NODE:
        transfer = max(transfer, sent / given.node_bytes)
    return CostModel(stages=stages, buckets=(given.capacity,), communication=transfer)


def _per_token(seconds: float) -> AffineCost:
    return AffineCost(base=0.0, per_token=seconds, per_square=0.0)


def predict(
    samples: Sequence[Sample],
    sizes: MeshSizes,
    in_flight: int,
    cost: CostModel,
    given: Assumptions,
) -> tuple[Plan, Lanes]:
    """Packs and simulates jobs on a mesh.

    Returns:
        The plan, and its lanes.
    """
    lanes = Lanes(
        data=sizes.data,
        fsdp=sizes.fsdp,
        pipeline=Pipeline.one_f_one_b(sizes.stage, in_flight),
    )
    loads = {
        job: Load(
            num_batches=len(batches),
            batch_tokens=sum(s.num_tokens for b in batches for s in b) / len(batches),
        )
        for job, batches in batches_by_job(samples).items()
    }
    lanes = decide_pinning(
        list(loads.values()), lanes, given.capacity, len(loads)
    ).lanes
    if lanes.pinned:
        slots = choose_slots(
            {job: load.tokens for job, load in loads.items()}, {}, lanes
        )
        samples = [dataclasses.replace(s, owner=slots[s.owner]) for s in samples]
    limits = Limits(capacity=given.capacity, block_tokens=64)
    packed = pack_ticks(samples, limits, "joint", lanes, cost)
    return evaluate(packed, samples, lanes, cost), lanes


def rows(
    model: str, num_jobs: Sequence[int], given: Assumptions
) -> Iterator[dict[str, object]]:
    """Yields a row for each mesh, number of jobs, and number of ticks in flight."""
    spec = decoder(model)
    for number in num_jobs:
        samples = jobs(
            ["lognormal"] * number,
            num_samples=NUM_STEPS * BATCH_SIZE,
            batch_size=BATCH_SIZE,
        )
        tokens = sum(s.num_tokens for s in samples)
        alone = None  # tokens per second of one GPU
        for words in MESHES:
            sizes = MeshSizes.parse(words)
            cost = stage_costs(spec, sizes, given)
            for in_flight in sorted({sizes.stage, 2 * sizes.stage - 1}):
                plan, lanes = predict(samples, sizes, in_flight, cost, given)
                rate = tokens / plan.simulation.makespan / sizes.num_devices
                alone = rate if alone is None else alone
                yield {
                    "model": model,
                    "jobs": number,
                    "mesh": words,
                    "gpus": sizes.num_devices,
                    "in_flight": in_flight,
                    "pinned": "yes" if lanes.pinned else "no",
                    "fill_percent": round(100 * tick_fill(plan.schedule, lanes), 1),
                    "bubble_percent": abs(round(100 * plan.simulation.bubble, 1)),
                    "tokens_per_second_per_gpu": round(rate),
                    "of_one_gpu": round(rate / alone, 3),
                }


def tick_fill(schedule: Schedule, lanes: Lanes) -> float:
    """Returns the fraction of real tokens in the ticks that are not no-ops."""
    ticks = ticks_of(schedule.microbatches, lanes.num_lanes)
    num_microbatches = lanes.num_lanes * sum(map(any, ticks))
    return schedule.fill * len(schedule.microbatches) / max(1, num_microbatches)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("scaling", __doc__)
    add_output_dir(out)
    out.add_argument("--model", choices=MODELS, default=LARGE)
    out.add_argument("--jobs", type=int, nargs="+", default=[4, 16, 64])
    out.add_argument("--microbatch-tokens", type=int, default=8192)
    out.add_argument(
        "--fsdp-factor",
        type=float,
        default=1.065,
        help="time of a pass with gathered weights, relative to one without; the "
        "default was measured on four H200s",
    )
    out.add_argument(
        "--node-gigabytes",
        type=float,
        default=50.0,
        help="GB per second from a GPU to one of another node",
    )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    given = Assumptions(
        capacity=args.microbatch_tokens,
        fsdp_factor=args.fsdp_factor,
        node_bytes=args.node_gigabytes * 1e9,
    )
    table = list(rows(args.model, args.jobs, given))
    print("Simulated, not measured.")
    print(dicts_table(table))
    if args.output_dir:
        end = about(platform.machine()) | {"versions": f"NumPy {np.__version__}"}
        write_csv(args.output_dir / "scaling.csv", [row | end for row in table])
