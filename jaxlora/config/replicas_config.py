"""The replicas of a run whose microbatches differ in size."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pydantic

from jaxlora.config.strict import PositiveInt, Rule, StrictModel


def _replicas_are_one_device(replica: Any) -> tuple[str, str] | None:
    for axis in ("tensor", "stage"):
        if (size := getattr(replica, axis)) > 1:
            return axis, (
                f"{axis}={size}: a replica is one device so far. Leave {axis} out, or "
                "leave replicas out and divide the model by mesh."
            )
    return None


class ReplicaConfig(StrictModel):
    """Some replicas of a run that are alike: each has the base and all adapters.

    Attributes:
        tensor: Devices that share each layer of a replica; only 1 so far.
        stage: Pipeline stages of a replica; only 1 so far.
        count: Number of such replicas.
        microbatch_tokens: Tokens of their microbatches, padding included. Longer
            samples run on other replicas.
    """

    rules = (_replicas_are_one_device,)

    tensor: PositiveInt = 1
    stage: PositiveInt = 1
    count: PositiveInt = 1
    microbatch_tokens: PositiveInt


def listed(tokens: Sequence[int]) -> list[dict[str, int]]:
    """Returns the settings of replicas with microbatches of these tokens."""
    return [
        {"microbatch_tokens": size, "count": count}
        for size, count in sorted(Counter(tokens).items(), reverse=True)
    ]


_LIST = pydantic.TypeAdapter(tuple[ReplicaConfig, ...])


def check_listed(replicas: object) -> object:
    """Returns a value of `replicas`: a list, `auto` or None.

    Raises:
        ValueError: It is a word other than `auto`, or empty, or a replica in it cannot
            be used.
    """
    if replicas is None or replicas == "auto":
        return replicas
    if isinstance(replicas, str):
        raise ValueError(
            "expected auto, or a list such as [{microbatch_tokens: 8192}, "
            "{microbatch_tokens: 2048, count: 3}]."
        )
    if isinstance(replicas, list | tuple) and not replicas:
        raise ValueError("replicas is empty. List them, or leave replicas out.")
    # A union would name its members in the place of a fault.
    return _LIST.validate_python(replicas)


def _replicas_hold_whole_blocks(run: Any) -> tuple[str, str] | None:
    for tokens in run.replica_tokens:
        if tokens % run.block_tokens:
            return "replicas", (
                f"microbatch_tokens={tokens} of a replica is not a multiple of "
                f"block_tokens={run.block_tokens}."
            )
    return None


def _replicas_have_their_own_tokens(run: Any) -> tuple[str, str] | None:
    if run.replicas is not None and run.microbatch_tokens not in (
        "auto",
        *run.replica_tokens[:1],
    ):
        return "microbatch_tokens", (
            f"microbatch_tokens={run.microbatch_tokens}, and the replicas have their "
            "own. Leave it out."
        )
    return None


def _replicas_stand_alone(run: Any) -> tuple[str, str] | None:
    if run.replicas is None:
        return None
    if run.mesh == "auto" or run.mesh_sizes.num_devices > 1:
        return "mesh", (
            f"mesh is {run.mesh}, and replicas are single devices so far. Leave mesh "
            "or replicas out."
        )
    if run.packer != "joint":
        return "packer", (
            f"packer is {run.packer}, and only joint fills replicas. Set packer: joint."
        )
    if run.microbatch_shapes:
        return "microbatch_shapes", (
            "each replica has one shape. Leave microbatch_shapes out, or add a replica "
            "with smaller microbatches."
        )
    if run.sweep is not None and run.sweep.has_groups:
        return "sweep", (
            "sweep.groups and replicas both divide the devices. Leave one of them out."
        )
    return None


OF_REPLICAS: tuple[Rule, ...] = (
    _replicas_hold_whole_blocks,
    _replicas_have_their_own_tokens,
    _replicas_stand_alone,
)
