"""Chooses the capacity of microbatches: the number asked for, or by device memory.

This module replaces `microbatch_tokens: auto` by a number before a run starts. It
refuses a run that the device cannot hold, and names changes that would make it fit.
"""

import dataclasses
import logging
import math
import pathlib
import typing
from collections.abc import Iterator, Sequence

import jax

from jaxlora.config import RunConfig
from jaxlora.data.tokenize import TokenizedData
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.models.decoder import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.train import memory
from jaxlora.train.memory import DeviceMemory, Footprint, in_words
from jaxlora.train.run_folder import read_run_record

logger = logging.getLogger(__name__)

_MOST_TOKENS = 32768  # a larger capacity is no faster
_LARGEST_UNIT = 1024
_ENOUGH = 0.85  # a choice that needs less than this share of the memory is made again


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of an automatic capacity.

    Attributes:
        smallest: Capacity for the longest sample that the jobs may have.
        largest: Capacity for one mean step of every job that runs at once, and for any
            sample. More is of no use, as a microbatch never holds two steps of a job.
        unit: The capacity is a multiple of this.
    """

    smallest: int
    largest: int
    unit: int

    @staticmethod
    def of(
        config: RunConfig,
        train: Sequence[TokenizedData],
        held_out: Sequence[TokenizedData] = (),
    ) -> "Bounds":
        """Computes the bounds of a run.

        Args:
            config: The run.
            train: Training samples of each job.
            held_out: Held-out samples of the jobs that have any.
        """
        block = config.block_tokens
        num_slots = config.max_concurrent_jobs or len(config.jobs)
        longest = max(int(data.lengths.max()) for data in (*train, *held_out))
        steps = [
            min(job.batch_size, len(data.samples)) * data.num_tokens / len(data.samples)
            + block / 2
            for job, data in zip(config.jobs, train, strict=True)
        ]
        at_once = sum(sorted(steps, reverse=True)[:num_slots])
        most = max(min(_MOST_TOKENS, at_once), longest)
        unit = block
        while 2 * unit <= min(_LARGEST_UNIT, most / 8):
            unit *= 2
        largest = _up(most, unit)
        allowed = max(job.max_length for job in config.jobs)
        smallest = _up(min(allowed, largest), unit)
        return Bounds(smallest=smallest, largest=largest, unit=unit)

    def choose(
        self, footprint: Footprint, num_bytes: int, below: int | None = None
    ) -> int | None:
        """Returns the largest capacity that fits into `num_bytes`; None if none does.

        Args:
            footprint: Memory as a function of the capacity.
            num_bytes: Available memory.
            below: Exclusive upper bound on the capacity.
        """
        fitting = footprint.fitting_tokens(num_bytes) // self.unit * self.unit
        most = self.largest if below is None else below - self.unit
        return min(fitting, most) if min(fitting, most) >= self.smallest else None


def _up(num_tokens: float, unit: int) -> int:
    return math.ceil(num_tokens / unit) * unit


def as_begun(config: RunConfig, folder: pathlib.Path) -> RunConfig:
    """Replaces `auto` by the number that a run in this folder began with, if any.

    Raises:
        CheckpointError: `block_tokens` differs from what the run began with, or the
            run's record is damaged.
    """
    record = read_run_record(folder)
    if config.microbatch_tokens != "auto" or record is None:
        return config
    number = record.microbatch_tokens
    if number % config.block_tokens:
        raise CheckpointError(
            f"the run in {folder} began with {number} for microbatch_tokens: auto, "
            f"which is not a multiple of block_tokens={config.block_tokens}. Give the "
            "block_tokens that the run began with, or choose another output_dir."
        )
    logger.info("microbatch_tokens: auto: %d, as when the run began", number)
    return with_capacity(config, number)


def provisional(config: RunConfig, bounds: Bounds) -> RunConfig:
    """Replaces `auto` by some number, for results that do not depend on the choice."""
    if config.microbatch_tokens != "auto":
        return config
    return with_capacity(config, bounds.largest)


def with_capacity(config: RunConfig, num_tokens: int) -> RunConfig:
    """Returns the run with another capacity."""
    return config.model_copy(update={"microbatch_tokens": num_tokens})


class Capacity:
    """Settles the capacity of a run's microbatches: asked for, chosen, then verified.

    Attributes:
        config: The run, with a number for `microbatch_tokens`.
    """

    def __init__(self, config: RunConfig, spec: DecoderSpec, bounds: Bounds):
        """Replaces `auto` by a number, before the training step is compiled.

        Args:
            config: The run.
            spec: Decoder of the run.
            bounds: Bounds of an automatic capacity.

        Raises:
            ConfigError: The weights and adapters alone do not fit; or the capacity is
                `auto` and the device does not report its memory.
        """
        self.config = config
        self._spec, self._bounds = spec, bounds
        self._may_grow = True
        self._fitting: int | None = None
        self._too_large: int | None = None
        resident = memory.resident(spec)
        available = memory.device_memory(resident.base)
        self._is_free = config.microbatch_tokens == "auto"
        if available is None and self._is_free:
            raise ConfigError(
                "microbatch_tokens: auto goes by the device's memory, and the device's "
                "allocator does not say how much there is (XLA_PYTHON_CLIENT_ALLOCATOR "
                "chooses the allocator). Give a number for microbatch_tokens."
            )
        if available is None:
            logger.info(
                "memory: whether the run fits is not checked, as the device's "
                "allocator does not say how much there is"
            )
        elif resident.total(0) > available.num_bytes:
            raise self._refusal(resident, available)
        elif self._is_free:
            self._choose(self._estimate(), available, "estimated")

    def _estimate(self, spec: DecoderSpec | None = None) -> Footprint:
        return memory.estimated(spec or self._spec, self.config.block_tokens)

    def _choose(self, found: Footprint, available: DeviceMemory, how: str) -> None:
        """Chooses the largest capacity that fits, or one that was measured to fit."""
        number = self._bounds.choose(found, available.num_bytes, self._too_large)
        smallest = self._bounds.smallest
        number = max(number or 0, self._fitting or 0)
        if not number and self._too_large == smallest:
            raise self._refusal(found, available)
        # An estimate may be too high, so the smallest capacity is tried anyway, unless
        # a measurement has shown that it does not fit.
        number = number or smallest
        self.config = with_capacity(self.config, number)
        logger.info(
            "microbatch_tokens: auto: %d, %s: base %s, adapters %s and %s a token make "
            "%s of %s (%s); no more than %d, which hold a step of every job",
            number,
            how,
            in_words(found.base),
            in_words(found.slots),
            in_words(found.per_token + found.passing),
            in_words(found.total(number)),
            in_words(available.num_bytes),
            available.of,
            self._bounds.largest,
        )

    def settle(self, program: jax.stages.Compiled) -> bool:
        """Checks whether the compiled training step fits; False: compile it again.

        If it does not fit, `config` gets a smaller capacity. If much memory remains
        free, `config` gets a larger one, but only once.

        Args:
            program: Training step, compiled for the capacity of `config`.

        Raises:
            ConfigError: The run does not fit, and its capacity cannot be reduced.
        """
        tokens = self.config.limits.capacity
        resident = memory.resident(self._spec)
        available = memory.device_memory(resident.base + resident.slots)
        if available is None:
            return True
        found = memory.measured(self._spec, program, self.config.limits)
        if found is None:
            logger.info("memory: the compiler does not say what the step needs")
            return True
        needed = found.total(tokens)
        if needed > available.num_bytes:
            if not self._is_free:
                raise self._refusal(found, available)
            self._too_large = tokens
            self._choose(found, available, "measured")
            return False
        self._fitting = tokens
        has_room = needed < _ENOUGH * available.num_bytes
        has_room &= tokens < self._bounds.largest
        if self._is_free and self._may_grow and has_room:
            self._may_grow = False
            self._choose(found, available, "measured")
            if self.config.limits.capacity != tokens:
                return False
        logger.info(
            "memory: %s needed with microbatches of %d tokens, %s there",
            in_words(needed),
            tokens,
            in_words(available.num_bytes),
        )
        return True

    # ---- what would fit --------------------------------------------------------------

    def _refusal(self, found: Footprint, available: DeviceMemory) -> ConfigError:
        config, limit = self.config, available.num_bytes
        tokens = config.microbatch_tokens if found.per_token else 0
        assert isinstance(tokens, int)
        what = f"base {in_words(found.base)}, adapters {in_words(found.slots)}"
        if tokens:
            rest = found.total(tokens) - found.base - found.slots
            what += f", a training step of {tokens} tokens {in_words(rest)}"
        cures = list(self._cures(found, tokens, limit))
        advice = "One of these would make it fit:\n- " + "\n- ".join(cures)
        if not cures:
            advice = (
                "No single setting of remat, microbatch_tokens, max_concurrent_jobs or "
                "slot_rank would make it fit; together they might."
            )
        return ConfigError(
            f"this run needs {in_words(found.total(tokens))} ({what}), and there are "
            f"{in_words(limit)} ({available.of}). {advice}"
        )

    def _cures(self, found: Footprint, tokens: int, limit: int) -> Iterator[str]:
        """Yields changes, each of which alone would make the run fit."""
        slots = self._spec.slots
        assert slots is not None
        if tokens:
            yield from self._remat_cures(found, tokens, limit)
            unit = self._bounds.unit
            fitting = found.fitting_tokens(limit) // unit * unit
            if fitting >= self._bounds.smallest:
                yield f"microbatch_tokens: {fitting}"

        def fits(share: float) -> bool:
            smaller = dataclasses.replace(found, slots=int(found.slots * share))
            return smaller.total(tokens) <= limit

        for key, most in (
            ("max_concurrent_jobs", slots.num_slots),
            ("slot_rank", slots.rank),
        ):
            best = next((n for n in range(most - 1, 0, -1) if fits(n / most)), None)
            if best is not None:
                also = ", and no job of a larger rank" if key == "slot_rank" else ""
                yield f"{key}: {best}{also}"

    def _remat_cures(self, found: Footprint, tokens: int, limit: int) -> Iterator[str]:
        """Yields the weakest remat, stronger than the run's, that makes the run fit."""
        choices = typing.get_args(Remat)
        stronger = choices[choices.index(self.config.remat) + 1 :]
        if not stronger:
            return
        # The error of the estimate with the run's own remat.
        factor = found.step(tokens) / self._estimate().step(tokens)
        for more in stronger:
            needed = self._with_remat(more, factor).total(tokens)
            if needed <= limit:
                yield f"remat: {more} (needs about {in_words(needed)})"
                return

    def _with_remat(self, remat: Remat, factor: float) -> Footprint:
        """Estimates the footprint with another remat, corrected by a factor."""
        options = dataclasses.replace(self._spec.options, remat=remat)
        found = self._estimate(dataclasses.replace(self._spec, options=options))
        return dataclasses.replace(
            found, per_token=factor * found.per_token, passing=factor * found.passing
        )
