"""The replicas of a run that differ in their devices or microbatches."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from jaxlora.config.strict import Devices, StrictModel, Tokens, Wrong
from jaxlora.sharding.mesh_sizes import MeshSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaShape:
    """One replica.

    Attributes:
        tokens: Tokens of its microbatches, padding included.
        tensor: Devices that share each layer.
    """

    tokens: int
    tensor: int = 1


def in_order(shapes: Iterable[ReplicaShape]) -> list[ReplicaShape]:
    """Returns replicas in the order of a run, of which the first takes all steps."""
    return sorted(shapes, key=lambda one: (-one.tokens, -one.tensor))


class ReplicaConfig(StrictModel):
    """Some replicas of a run that are alike: each has the base and all adapters.

    Attributes:
        tensor: Devices that share each layer of a replica.
        count: Number of such replicas.
        microbatch_tokens: Tokens of their microbatches, padding included; `auto`: as
            many as fit. Longer samples run on other replicas.
    """

    belongs = {
        "stage": "a mesh, and each replica of a list has all layers. Set tensor in the "
        "place of it, or leave replicas out and set mesh: stage=2"
    }

    tensor: Devices = 1
    count: Devices = 1
    microbatch_tokens: Tokens | Literal["auto"] = "auto"


def listed(replicas: Sequence[ReplicaShape]) -> list[dict[str, int]]:
    """Returns the settings of replicas, those with the largest microbatches first."""
    counts = Counter(replicas)
    return [
        {"microbatch_tokens": one.tokens, "tensor": one.tensor, "count": counts[one]}
        for one in in_order(counts)
    ]


def describe_list(shapes: Sequence[ReplicaShape]) -> str:
    """Names replicas, such as `8,192 on tensor=2 + 3 x 2,048 tokens`."""
    counts, parts = Counter(shapes), []
    ordered = in_order(counts)
    for one in ordered:
        text, count = f"{one.tokens:,}", counts[one]
        text = f"{count} x {text}" if count > 1 else text
        text += " tokens" if one is ordered[-1] else ""
        parts.append(f"{text} on tensor={one.tensor}" if one.tensor > 1 else text)
    return " + ".join(parts)


def replica_rules(run: Any, wrong: Wrong) -> None:
    """Adds the settings of a run that do not fit its replicas."""
    if run.replicas is None:
        return
    for one in run.replica_shapes:
        if one.tokens % run.block_tokens:
            wrong["replicas"] = (
                f"microbatch_tokens={one.tokens} of a replica is not a multiple of "
                f"block_tokens={run.block_tokens}."
            )
        if run.block_tokens % one.tensor:
            wrong["replicas"] = (
                f"tensor={one.tensor} of a replica does not divide block_tokens="
                f"{run.block_tokens}, and its devices divide the rows of microbatches. "
                f"Set block_tokens to a multiple of {one.tensor}."
            )
    first = run.replica_shapes[:1]
    if run.microbatch_tokens not in ("auto", *(one.tokens for one in first)):
        wrong["microbatch_tokens"] = (
            f"microbatch_tokens={run.microbatch_tokens}, and the replicas have their "
            "own. Leave it out."
        )
    # When a run is planned, its mesh becomes that of the first replica.
    meshes = MeshSizes(), *(MeshSizes(tensor=one.tensor) for one in first)
    if run.mesh == "auto" or run.mesh_sizes not in meshes:
        wrong["mesh"] = (
            f"mesh is {run.mesh}, and replicas have devices of their own. Leave mesh "
            "or replicas out."
        )
    if run.packer != "joint":
        wrong["packer"] = (
            f"packer is {run.packer}, and only joint fills replicas. Set packer: joint."
        )
    if run.microbatch_shapes:
        wrong["microbatch_shapes"] = (
            "each replica has one shape. Leave microbatch_shapes out, or add a replica "
            "with smaller microbatches."
        )
    if run.sweep is not None and run.sweep.has_groups:
        wrong["sweep"] = (
            "sweep.groups and replicas both divide the devices. Leave one of them out."
        )
