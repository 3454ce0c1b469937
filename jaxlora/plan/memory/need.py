"""Memory that a run needs on a device, in the parts that its user knows."""

import dataclasses

from jaxlora.errors import ConfigError
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.stages import MeshFootprint, MeshStages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Memory that a run needs on each device of its tightest stage, in bytes.

    Attributes:
        base_bytes: Frozen weights, or the device's part of them.
        adapter_bytes: Adapters with their optimizer state and gradients.
        step_bytes: The rest of a training step, or the copies while a checkpoint is
            taken if these need more.
        tokens: Tokens of a microbatch; 0: the training step is not known, and
            `step_bytes` are those of a checkpoint.
        where: The devices, as what follows a number of bytes; empty if there is one.
        available: Memory that there is; None: it is not known.
        has_references: Whether `adapter_bytes` has adapters that are references.
    """

    base_bytes: int
    adapter_bytes: int
    step_bytes: int
    tokens: int
    where: str
    available: DeviceMemory | None
    has_references: bool = False

    @staticmethod
    def of(
        stages: MeshStages,
        found: MeshFootprint,
        tokens: int,
        available: DeviceMemory | None,
    ) -> "MemoryNeed":
        """Returns the need of the tightest stage.

        Args:
            stages: Stages of the run.
            found: Its memory.
            tokens: Tokens of a microbatch; 0: `found` has no training step.
            available: Memory of each device.
        """
        tightest = found.tightest(tokens)
        stage = found.stages[tightest]
        slots = stages.spec.slots
        return MemoryNeed(
            base_bytes=stage.base_bytes,
            adapter_bytes=stage.adapter_bytes,
            step_bytes=stage.total_bytes(tokens) - stage.resident_bytes,
            tokens=tokens,
            where=stages.describe(tightest),
            available=available,
            has_references=slots is not None and slots.has_references,
        )

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.base_bytes + self.adapter_bytes + self.step_bytes

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as that is known."""
        return self.available is None or self.total_bytes <= self.available.num_bytes

    def describe_parts(self) -> str:
        """Lists the parts, for errors."""
        parts = f"base {format_bytes(self.base_bytes)}"
        parts += f", adapters {format_bytes(self.adapter_bytes)}"
        step = f"a training step of {self.tokens} tokens"
        if not self.tokens:
            step = "their copies while a checkpoint is taken"
        return f"{parts}, {step} {format_bytes(self.step_bytes)}"

    @property
    def subject(self) -> str:
        """Names what cures would make fit, as an object of a sentence."""
        return "it" if self.tokens else "weights and adapters, without a training step,"


class DoesNotFitError(ConfigError):
    """A run needs more memory than there is.

    Attributes:
        need: What it needs, and what there is.
        mesh: The mesh that comes closest.
        cures: Changes of single settings that would make it fit.
    """

    def __init__(self, text: str, need: MemoryNeed, mesh: str, cures: tuple[str, ...]):
        super().__init__(text)
        self.need, self.mesh, self.cures = need, mesh, cures
