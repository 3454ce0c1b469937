"""The memory of a run while it trains: predicted, measured, and how many jobs fit.

A run's slots are allocated when it starts, and its microbatches have the shape that was
compiled. So a job that joins should take nothing but its weights' way to the device.
The device's reports correct that, and a job that would not fit waits for a slot.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxlora.common.comparison import NOT_KNOWN, Comparison
from jaxlora.distributed import processes
from jaxlora.memory.device_memory import format_bytes
from jaxlora.memory.need import MemoryNeed
from jaxlora.scheduler.memory_model import Coefficients, Load, MemoryModel

logger = logging.getLogger(__name__)

_MOST_READINGS = 3  # of a load: later ones show little that is new


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A report of a device's allocator, in bytes.

    Attributes:
        peak: The most that was in use since the process began.
        limit: What may be in use.
    """

    peak: int
    limit: int


# Returns the reading of the device with the highest peak; None: devices report none.
ReadMemory = Callable[[], Reading | None]


def read_devices() -> Reading | None:
    """Reads the devices of this process; see `ReadMemory`."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    found = [reading for one in stats if (reading := _reading(one)) is not None]
    return max(found, key=lambda reading: reading.peak, default=None)


def _reading(stats: Mapping[str, Any]) -> Reading | None:
    try:
        return Reading(peak=stats["peak_bytes_in_use"], limit=stats["bytes_limit"])
    except KeyError:
        return None


class RunMemory:
    """Predicts the memory of a run, and corrects that by what its devices report.

    A reading that is missing or cannot be true changes nothing.
    """

    def __init__(
        self,
        need: MemoryNeed | None,
        num_slots: int,
        read: ReadMemory = read_devices,
    ):
        """Reads the devices before the first step.

        Args:
            need: What the compiled run needs; None: it is not known, and nothing is
                predicted.
            num_slots: Number of slots.
            read: Reads the devices.
        """
        self._need, self._num_slots, self._read = need, num_slots, read
        self._latest: Reading | None = None
        self._num_read: Counter[Load] = Counter()
        self._most_jobs = 1  # that have run at once
        self._has_warned = False
        self._model: MemoryModel | None = None
        if need is None or not need.tokens:
            return
        first = self._reading()
        planned = Coefficients(
            base=need.base_bytes + need.adapter_bytes,
            per_token=need.step_bytes / need.tokens,
        )
        peak = 0.0 if first is None else first.peak
        largest = Load(jobs=num_slots, tokens=need.tokens)
        self._model = MemoryModel(planned, largest, peak=peak)

    def note(self, num_jobs: int, tokens: int) -> None:
        """Reads the devices after steps, unless they were read for the like before.

        Args:
            num_jobs: Jobs that run.
            tokens: Tokens of the microbatches' compiled shape.
        """
        load = Load(jobs=num_jobs, tokens=tokens)
        self._most_jobs = max(self._most_jobs, num_jobs)
        if self._model is None or self._num_read[load] >= _MOST_READINGS:
            return
        self._num_read[load] += 1
        if (found := self._reading()) is not None:
            self._model.observe(load, found.peak)

    @property
    def num_readings(self) -> int:
        """Readings by `note`, alike on all processes; `usable_slots` follows them."""
        return self._num_read.total()

    def compared(self) -> Comparison:
        """Reads the devices again; returns the run's peak beside the prediction."""
        if self._need is None:
            return NOT_KNOWN
        self._reading()
        peak = None if self._latest is None else self._latest.peak
        return Comparison(predicted=self._need.total_bytes, measured=peak)

    def usable_slots(self, tokens: int) -> int:
        """Returns how many jobs may run at once, alike on all processes.

        These are at least as many as have run at once before.

        Args:
            tokens: Tokens of the microbatches' compiled shape.
        """
        return min(processes.gather(self._usable_slots(tokens)))

    def _usable_slots(self, tokens: int) -> int:
        model, latest = self._model, self._latest
        if model is None or latest is None or not model.num_observed:
            return self._num_slots  # the compiled run was found to fit
        for jobs in range(self._num_slots, self._most_jobs, -1):
            bound = model.bound(Load(jobs=jobs, tokens=tokens))
            if bound + self._start_bytes <= latest.limit:
                return jobs
        return self._most_jobs

    @property
    def _start_bytes(self) -> float:
        """Bytes that a starting job copies to the device beside a step."""
        assert self._need is not None
        return self._need.adapter_bytes / self._num_slots

    def explain(self, num_jobs: int, tokens: int) -> str:
        """Says in one line why no more jobs run.

        Args:
            num_jobs: Jobs that may run at once.
            tokens: Tokens of the microbatches' compiled shape.
        """
        need, latest = self._need, self._latest
        assert need is not None and latest is not None and self._model is not None
        total = self._model.bound(Load(jobs=num_jobs + 1, tokens=tokens))
        rest = total - need.base_bytes - need.adapter_bytes
        parts = {
            "base": need.base_bytes,
            "adapters": need.adapter_bytes,
            f"a training step of {tokens} tokens and all else": rest,
            "the start of a job": self._start_bytes,
        }
        listed = ", ".join(f"{k} {format_bytes(v)}" for k, v in parts.items())
        unused = format_bytes(latest.limit - latest.peak)
        whole = format_bytes(sum(parts.values()))
        return (
            f"memory: at most {num_jobs} of {self._num_slots} slots are used, and the "
            f"other jobs wait. One more would need {whole} ({listed}), and there are "
            f"{format_bytes(latest.limit)}, of which {unused} were never in use. Lower "
            "microbatch_tokens, or set a stronger remat."
        )

    def _reading(self) -> Reading | None:
        """Reads the devices; None: nothing, or nothing that can be true."""
        try:
            found = self._read()
        except Exception as error:  # whatever it is, training can go on
            self._warn(f"the devices' memory cannot be read: {error}")
            return None
        if found is None:
            return None
        if (why := self._fault(found)) is not None:
            self._warn(f"the devices report a memory that cannot be: {why}")
            return None
        self._latest = found
        return found

    def _fault(self, found: Reading) -> str | None:
        """Says what is wrong with a reading; None: nothing is known to be."""
        peak, limit, need = found.peak, found.limit, self._need
        if not all(isinstance(n, int) and n > 0 for n in (peak, limit)):
            return f"{found}"
        shown, least = format_bytes(peak), 0
        if need is not None:
            least = need.base_bytes + need.adapter_bytes
        if peak > limit:
            return f"a peak of {shown} of {format_bytes(limit)}"
        if peak < least:
            return f"a peak of {shown}, less than weights and slots have"
        if self._latest is not None and peak < self._latest.peak:
            return f"a peak of {shown} after one of {format_bytes(self._latest.peak)}"
        return None

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            logger.warning("%s. Predictions stay as they are.", text)
        self._has_warned = True
