"""Memory that a session needs on its device, and settings with which it fits."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxlora.config.session_config import SessionConfig
from jaxlora.errors import ConfigError
from jaxlora.hf.load import FrozenModel
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.memory.device_memory import (
    DeviceMemory,
    device_memory,
    format_bytes,
)
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.stages import MeshStages, estimated_footprint, resident_footprint
from jaxlora.session.slot_programs import with_few_slots
from jaxlora.sharding.mesh_sizes import MeshSizes

_MOST_SLOTS = 64
_ENOUGH_SLOTS = 16  # for which smaller microbatches are taken, if they make room
_LARGEST = (8192, 4096, 2048, 1024, 512)  # tokens of the largest microbatch
_RATIO = 4  # of the sizes of microbatches
_SLOWER = 4  # times as small are those of a CPU
_FREE = 0.1  # share that automatic settings leave to samplers and others
# Copies of the rows of a slot on their way from or to the host; and copies of the
# slots of a microbatch, whose weights and gradients are gathered.
_MOVING, _GATHERED = 8, 2

MostAdapters = Callable[[SessionConfig, DecoderSpec], int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SessionMemory:
    """Memory that a session needs on its device, in bytes.

    Attributes:
        base_bytes: Frozen weights.
        slot_bytes: A slot: weights, moments and gradients.
        num_slots: Number of slots.
        moving_bytes: Copies of slots that come and go.
        step_bytes: A pass over the largest microbatch.
        num_tokens: Tokens of that one.
        available: Memory that there is; None: it is not known.
    """

    base_bytes: int
    slot_bytes: int
    num_slots: int
    moving_bytes: int
    step_bytes: int
    num_tokens: int
    available: DeviceMemory | None

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        slots = self.num_slots * self.slot_bytes
        return self.base_bytes + slots + self.moving_bytes + self.step_bytes

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as that is known."""
        return self.available is None or self.total_bytes <= self.available.num_bytes

    def fitting_slots(self, *, free: float = 0.0) -> int:
        """Returns how many slots fit beside the rest, which may be less than one.

        Args:
            free: Share of the memory that stays free.
        """
        assert self.available is not None
        rest = self.total_bytes - self.num_slots * self.slot_bytes
        room = (1 - free) * self.available.num_bytes - rest
        return math.floor(room / self.slot_bytes)

    def __str__(self) -> str:
        parts = [
            f"base {format_bytes(self.base_bytes)}",
            f"{self.num_slots} slots {format_bytes(self.num_slots * self.slot_bytes)}",
            f"copies of slots {format_bytes(self.moving_bytes)}",
            f"microbatches of {self.num_tokens} tokens {format_bytes(self.step_bytes)}",
        ]
        return f"{format_bytes(self.total_bytes)} ({', '.join(parts)})"


class Room:
    """Chooses the settings of a session that are `auto`, and checks the others."""

    def __init__(
        self,
        model: FrozenModel,
        spec_of: Callable[[FrozenModel, SessionConfig], DecoderSpec],
        most_adapters: MostAdapters,
    ):
        """Reads how much memory there is.

        Args:
            model: The base model, on its device.
            spec_of: Returns the decoder of a session with given settings.
            most_adapters: Returns the most adapters of a microbatch.
        """
        self._model, self._spec_of, self._most = model, spec_of, most_adapters
        self._base = num_bytes(model.params)
        self._available = device_memory(self._base)

    def settle(self, config: SessionConfig) -> tuple[SessionConfig, SessionMemory]:
        """Returns settings without `auto`, and the memory that they need.

        Raises:
            ConfigError: There is not enough memory.
        """
        chosen, need = config, None
        for sizes in self._sizes(config):
            wanted = config.slots if config.slots != "auto" else _ENOUGH_SLOTS
            chosen = config.replace(slots=wanted, microbatch_tokens=sizes)
            need = self.need(chosen)
            if need.available is None:
                return chosen, need
            if config.slots == "auto":
                slots = max(1, min(_MOST_SLOTS, need.fitting_slots(free=_FREE)))
                chosen = chosen.replace(slots=slots)
                need = self.need(chosen)
                if need.fits and slots >= _ENOUGH_SLOTS:
                    break
            elif need.fits:
                break
        assert need is not None
        if not need.fits:
            raise _refusal(need)
        return chosen, need

    def _sizes(self, config: SessionConfig) -> Sequence[tuple[int, ...]]:
        """Returns the sizes of microbatches to try, the largest first."""
        if config.microbatch_tokens != "auto":
            return [tuple(sorted(config.microbatch_tokens))]
        is_cpu = self._available is not None and self._available.is_shared
        block, found = config.block_tokens, []
        for largest in _LARGEST:
            sizes = [max(largest // _RATIO**i, _LARGEST[-1]) for i in range(3)]
            sizes = [size // _SLOWER if is_cpu else size for size in sizes]
            found.append(tuple(sorted({-(-size // block) * block for size in sizes})))
        return found

    def need(self, config: SessionConfig) -> SessionMemory:
        """Returns the memory that settings without `auto` need."""
        spec = self._spec_of(self._model, config)
        tokens, slots = max(config.sizes), config.num_slots
        resident = resident_footprint(_alone(spec)).stages[0]
        one = resident.adapter_bytes // slots
        few = with_few_slots(spec, self._most(config, spec))
        assert few.slots is not None
        gathered = _GATHERED * few.slots.num_slots * (one // 4)
        step = 0
        if self._available is not None and not self._available.is_shared:
            estimate = estimated_footprint(_alone(few), config.block_tokens, tokens)
            step = math.ceil(estimate.stages[0].step_bytes(tokens)) + gathered
        return SessionMemory(
            base_bytes=self._base,
            slot_bytes=one,
            num_slots=slots,
            moving_bytes=min(slots, _MOVING) * one,
            step_bytes=step,
            num_tokens=tokens,
            available=self._available,
        )


def _alone(spec: DecoderSpec) -> MeshStages:
    """Returns the only stage of a decoder on one device."""
    borders = (0, spec.config.num_layers)
    return MeshStages(spec=spec, sizes=MeshSizes(), borders=borders, in_flight=1)


def _refusal(need: SessionMemory) -> ConfigError:
    assert need.available is not None
    cure = "rank or microbatch_tokens, or set remat"
    if (fitting := need.fitting_slots()) >= 1:
        cure = f"slots to {fitting}, {cure}"
    return ConfigError(
        f"the session needs {need} of {format_bytes(need.available.num_bytes)} "
        f"({need.available.source}). Lower {cure}."
    )
