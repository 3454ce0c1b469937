"""The groups that `groups: auto` stands for, as the planner of sweeps gives them.

Planning needs the rates and the memory of the devices, so it starts JAX on them. It is
done in a process of its own, as the driver of a sweep must leave them to the workers.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from jaxlora.config import RunConfig
from jaxlora.errors import ConfigError, ProcessError
from jaxlora.run.saved_fields import Size, type_adapter
from jaxlora.sharding.mesh_sizes import MeshSizes

COMMAND = (sys.executable, "-m", "jaxlora.forecast.sweep_process")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """A group of devices, and what it trains.

    Attributes:
        mesh: Its mesh.
        num_slots: Configurations that it trains at once.
        slot_rank: Rank of its slots.
        microbatch_tokens: Capacity of its microbatches.
        names: Its configurations, in the order in which they begin.
    """

    mesh: str
    num_slots: Size
    slot_rank: Size
    microbatch_tokens: Size
    names: tuple[str, ...]

    def __post_init__(self):
        """Checks the mesh."""
        MeshSizes.parse(self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlans:
    """The groups of a sweep.

    Attributes:
        groups: The groups.
        ranks: Largest rank of each configuration's modules, by name.
        seconds: Predicted time until the last configuration ends, if none ends early.
    """

    groups: tuple[GroupPlan, ...]
    ranks: Mapping[str, int]
    seconds: float

    @staticmethod
    def of(values: Mapping[str, Any]) -> "GroupPlans":
        """Returns the groups that JSON values describe."""
        return type_adapter(GroupPlans).validate_python(values)


def plan_in_process(config: RunConfig) -> GroupPlans:
    """Plans a sweep on the devices of this host.

    Raises:
        ConfigError: It cannot be planned; the message says why.
        ProcessError: The process that plans has ended without an answer.
    """
    given = config.model_dump_json().encode()
    done = subprocess.run(COMMAND, input=given, stdout=subprocess.PIPE)
    if done.returncode or not done.stdout:
        raise ProcessError(
            f"sweep.groups is auto, and the process that plans the groups ended with "
            f"status {done.returncode}; its log is above. Give a number of groups, or "
            "a list, instead."
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return GroupPlans.of(answer)
