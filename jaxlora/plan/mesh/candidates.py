"""Settings with which a run might run: their predicted time, and what fits of them."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import get_args

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.costs.gpus import UNKNOWN_DEVICE
from jaxlora.costs.stages import decoder_seconds
from jaxlora.models.config import is_of_expert
from jaxlora.models.options import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.tensor_parallel import check_divides
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.job.slot_spec import check_fits, decoder_spec
from jaxlora.plan.memory.bounds import Bounds, largest_fitting
from jaxlora.plan.memory.need import DoesNotFitError
from jaxlora.plan.memory.refusal import refusal
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.mesh.predict import window_seconds
from jaxlora.plan.run_plan import RunPlan, laid_out
from jaxlora.plan.stages import MeshFootprint
from jaxlora.scheduler import Schedule
from jaxlora.scheduler.stream.state import Position, Rules
from jaxlora.scheduler.stream.stream import StreamState, next_stretch
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes

_TICKS = 48  # that are packed for each candidate, at least
# Capacities that are compared, as shares of the largest one that fits. A smaller one
# may fill its microbatches better, and a pipeline fills and drains faster with it.
_SHARES = (1, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)
_GAIN = 1.01  # a smaller capacity is taken only if it is this much faster

# Share of the memory that an automatic choice leaves free on several devices. It is
# the error of the estimate, which is within 5 % of what XLA reports for the stages of
# a pipeline. Weights are read for the chosen mesh before its programs are compiled, so
# it cannot be changed if these need more. On a single device, the compiled step
# corrects the choice in both directions.
MARGIN = 0.05
UNCHECKED_TOKENS = 4096  # for a device that does not report its memory
# A host takes 0.7 ms to call the programs of a chain for one pass of a layer. It has to
# be faster than the device by some margin, as hosts differ.
_CALL_SECONDS, _CALL_MARGIN = 2 * 0.7e-3, 1.25


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan of the run with one choice of all settings that are open.

    Attributes:
        plan: The plan.
        search: The search that it is a candidate of.
        limit: Bytes that each device may need; None: any number.
        most: The largest capacity that fits on its devices with its `remat`; 0: none.
        options: The candidates on the same devices, one for each `remat`.
    """

    plan: RunPlan
    search: "Search"
    limit: int | None
    most: int
    options: tuple["Candidate", ...] = ()

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of its mesh."""
        return self.plan.stages.sizes

    @property
    def tokens(self) -> int:
        """Capacity of its microbatches."""
        return self.plan.config.limits.capacity

    @property
    def remat(self) -> Remat:
        """Part of each layer that is recomputed."""
        return self.plan.config.weakest_remat

    @functools.cached_property
    def found(self) -> MeshFootprint:
        """Its estimated memory."""
        stages, config = self.plan.stages, self.plan.config
        return mesh_stages.estimated_footprint(stages, config.block_tokens, self.tokens)

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device of the tightest stage needs."""
        return self.found.total_bytes(self.tokens)

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the devices are estimated to have the memory."""
        has_room = self.limit is None or self.needed_bytes <= self.limit
        return bool(self.most) and has_room

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted time per token; in operations if the rates are not known."""
        return self.search.seconds(self.plan)

    def refusal(self, why: str = "") -> DoesNotFitError:
        """Returns the error for a run without a candidate that fits.

        Args:
            why: What comes before the memory that this one needs.
        """
        available = self.search.machine.memory_of(self.plan.config.num_devices)
        assert available is not None, "memory of an unknown size is not checked"
        return refusal(self.plan, self.found, available, why)

    def at(self, tokens: int) -> "Candidate":
        """Returns the same candidate with another capacity."""
        config = self.plan.config.replace(microbatch_tokens=tokens)
        plan = dataclasses.replace(self.plan, config=config)
        return dataclasses.replace(self, plan=plan)

    def smaller(self) -> Iterator["Candidate"]:
        """Yields candidates with smaller capacities, of those that are compared."""
        bounds = self.plan.bounds
        if bounds.fixed is not None or self.sizes.num_devices == 1:
            return
        tried = (int(share * self.tokens) // bounds.unit for share in _SHARES)
        for tokens in sorted({units * bounds.unit for units in tried}):
            if bounds.smallest <= tokens < self.tokens:
                yield self.at(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """The choice of what is `auto` in a run on a machine.

    Attributes:
        config: The run, as it was asked for.
        model: The base model.
        jobs: Jobs of the run.
        machine: The machine.
    """

    config: RunConfig
    model: PlannedModel
    jobs: Sequence[PreparedJob]
    machine: Machine
    _packed: dict[Rules, tuple[Schedule, bool]] = dataclasses.field(
        default_factory=dict
    )

    @functools.cached_property
    def alone(self) -> RunPlan:
        """The plan of the run on one device, with the largest microbatches."""
        return self.laid_out(self.config.replace(mesh=ONE_DEVICE, replicas=None))

    @functools.cached_property
    def positions(self) -> list[Position]:
        """Positions at the start of the run; see `first_positions`."""
        return first_positions(self.jobs)

    @functools.cached_property
    def remats(self) -> tuple[Remat, ...]:
        """The choices of `remat`, from the weakest on."""
        remat = self.config.remat
        return get_args(Remat) if remat == "auto" else (remat,)

    def limit(self, config: RunConfig, margin: float) -> int | None:
        """Returns the bytes that each device of a run may need; None: any number.

        Args:
            config: The run, with a mesh or replicas.
            margin: Share of the memory that stays free on several devices.
        """
        memory = self.machine.memory_of(config.num_devices)
        if memory is None:
            return None
        return int((1 - margin * (config.num_devices > 1)) * memory.num_bytes)

    def laid_out(self, config: RunConfig, *, stores_more: bool = False) -> RunPlan:
        """Returns the plan of the run with a mesh or replicas, and with a `remat`.

        Args:
            config: The run. An automatic capacity becomes the largest that is of use.
            stores_more: Whether quantized weights are stored in the way that is read
                fastest, not in the smallest one, where their format leaves a choice.

        Raises:
            ConfigError: No kernels or attention can run the model here, or the slots or
                a microbatch cannot hold a job.
        """
        bounds = run_bounds(config, self.jobs)
        spec, kernels = decoder_spec(config, self.model, self.jobs, bounds.max_tokens)
        for job in self.jobs:
            check_fits(job, spec, bounds.max_tokens)
        if (base := spec.options.base_format) is not None:
            stored = base.options.storage_choices()[-1 if stores_more else 0]
            base = dataclasses.replace(base, options=stored)
            options = dataclasses.replace(spec.options, base_format=base)
            spec = dataclasses.replace(spec, options=options)
        # Chains were never tried on devices of several processes.
        is_chain = self.machine.num_processes == 1 and _hides_calls(
            spec, bounds, self.machine, config.mesh_sizes
        )
        if config.layers_per_program == "auto" and not is_chain:
            config = config.replace(layers_per_program=spec.config.num_layers)
        config = config.replace(microbatch_tokens=bounds.max_tokens)
        rates = self.machine.rates(spec, config.network_gbits)
        plan = laid_out(config, self.model, spec, self.jobs, bounds, rates)
        notes = Note(str(kernels)), *_pace_notes(config, len(self.jobs)), *plan.notes
        return dataclasses.replace(plan, notes=notes)

    def unlimited(self, config: RunConfig) -> Candidate:
        """Returns the fastest candidate on a mesh, if memory had no limit."""
        plan = self.laid_out(config.replace(remat=self.remats[0]))
        largest = Candidate(
            plan=plan, search=self, limit=None, most=plan.bounds.max_tokens
        )
        return min([largest, *largest.smaller()], key=lambda one: one.seconds)

    def best(self, config: RunConfig, margin: float) -> Candidate:
        """Returns the fastest candidate on a mesh; if none fits, the one closest to it.

        A stronger `remat` is left out once a weaker one fits with the largest
        microbatches that can be filled, as it would only take longer.

        Args:
            config: The run, with a mesh or replicas.
            margin: See `limit`.
        """
        options: list[Candidate] = []
        for remat in self.remats:
            one = self._fastest(config.replace(remat=remat), margin)
            options.append(one)
            is_largest = one.most == one.plan.bounds.max_tokens
            if len(self.remats) == 1 or (is_largest and one.fits):
                break
        chosen = options[0]
        if len(options) > 1:
            fitting = [one for one in options if one.fits]
            chosen = min(options, key=lambda one: one.needed_bytes)
            chosen = min(fitting, key=lambda one: one.seconds, default=chosen)
        return dataclasses.replace(chosen, options=tuple(options))

    def largest(self, plan: RunPlan, bounds: Bounds, limit: int | None) -> int | None:
        """Returns the largest capacity that is estimated to fit; None if none does.

        Args:
            plan: The plan.
            bounds: Bounds of its capacity.
            limit: Bytes that each device may need; None: they are not known.
        """
        if limit is None:
            return bounds.choose(max(UNCHECKED_TOKENS, bounds.smallest))
        estimate = functools.partial(
            mesh_stages.estimated_footprint, plan.stages, plan.config.block_tokens
        )
        return largest_fitting(bounds, estimate, limit)

    def _fastest(self, config: RunConfig, margin: float) -> Candidate:
        """Returns the candidate with the fastest capacity that fits, if any does."""
        plan, limit = self.laid_out(config), self.limit(config, margin)
        most = plan.bounds.fixed or self.largest(plan, plan.bounds, limit) or 0
        whole = Candidate(plan=plan, search=self, limit=limit, most=most)
        whole = whole.at(most or plan.bounds.smallest)
        # Attention is compiled for each capacity whose memory is estimated.
        others = sorted(whole.smaller(), key=lambda one: one.seconds)
        faster = (one for one in others if _GAIN * one.seconds < whole.seconds)
        return next((one for one in faster if one.fits), whole)

    def seconds(self, plan: RunPlan) -> float:
        """Predicts the time per token of the first ticks of a plan.

        They are packed as the trainer packs them.
        """
        if not self.positions:  # nothing is left to do
            return 1.0
        rules = plan.rules
        if rules not in self._packed:
            self._packed[rules] = self._first_ticks(plan)
        schedule, is_part = self._packed[rules]
        tokens = sum(s.num_tokens for m in schedule.microbatches for s in m)
        run = plan.stages, plan.lanes, schedule, plan.rates
        took = window_seconds(*run)
        if not is_part or plan.stages.sizes.stage == 1:
            return took / tokens
        # A pipeline fills and drains once in the whole run.
        steady = window_seconds(*run, is_part=True)
        left = sum(p.batch_tokens * p.num_left for p in self.positions)
        return steady / tokens + (took - steady) / max(tokens, left)

    def _first_ticks(self, plan: RunPlan) -> tuple[Schedule, bool]:
        """Packs the first ticks; also returns whether others follow."""
        lengths = lambda job, step: self.jobs[job].lengths(step)
        state, ticks, is_part = StreamState(), [], True
        for one in self.positions[: plan.num_slots]:
            state = state.with_job(one, plan.rules.pace)
        while len(ticks) < _TICKS and is_part:
            stretch = next_stretch(state, lengths, plan.rules)
            ticks, state = [*ticks, *stretch.ticks], stretch.after
            is_part = bool(stretch.ticks)
        microbatches = tuple(m for tick in ticks for m in tick)
        return Schedule(microbatches=microbatches, limits=plan.config.limits), is_part


def _hides_calls(
    spec: DecoderSpec, bounds: Bounds, machine: Machine, sizes: MeshSizes
) -> bool:
    """Returns whether a device takes longer for a layer's passes than its host.

    If not, a step of a decoder in several programs would wait for the host, which is
    taken to call the programs of its devices one after the other. A device whose rates
    are not known is taken to be slow.
    """
    speed = machine.speed
    if speed is UNKNOWN_DEVICE:
        return True
    layers = decoder_seconds(spec, speed, mean_tokens=bounds.sample_tokens)
    layer = layers[spec.config.num_layers // 2].both / sizes.tensor
    seconds = speed.layer_seconds + layer * bounds.max_tokens
    return seconds >= _CALL_MARGIN * _CALL_SECONDS * sizes.num_devices


def _pace_notes(config: RunConfig, num_jobs: int) -> list[Note]:
    """Returns a line of the log that says how jobs share microbatches."""
    if num_jobs == 1 or config.packer != "joint":
        return []
    how = {
        "equal": "running jobs get the same number of tokens",
        "together": "running jobs end at the same time",
    }[config.settled_pace]
    return [Note(f"pace: {config.settled_pace}: {how}")]


def run_bounds(config: RunConfig, jobs: Sequence[PreparedJob]) -> Bounds:
    """Returns the bounds of a run's capacity for these jobs; its mesh is not `auto`."""
    settings = [job.settings for job in jobs]
    held_out = [job.eval_data for job in jobs if job.eval_data is not None]
    has_experts = any(is_of_expert(name) for job in jobs for name in job.adapted)
    most = config.adapters_per_microbatch if has_experts else None
    data = [job.train_data for job in jobs]
    return Bounds.of(config, settings, data, held_out, most_jobs=most)


def first_positions(jobs: Sequence[PreparedJob]) -> list[Position]:
    """Returns the positions at the start of the run of the jobs that have steps.

    They are in the order in which the jobs start, and the first ones have the slots.
    """
    left = [i for i, job in enumerate(jobs) if job.first_step < job.num_steps]
    left.sort(key=lambda i: -jobs[i].settings.priority)
    return [
        Position(
            job=i,
            owner=slot,
            batch=jobs[i].first_step,
            num_batches=jobs[i].num_steps,
            batch_tokens=jobs[i].batch_tokens,
            priority=jobs[i].settings.priority,
        )
        for slot, i in enumerate(left)
    ]


def is_divided(spec: DecoderSpec, tensor: int, block_tokens: int) -> bool:
    """Whether `tensor` devices can share each layer of a decoder.

    Args:
        spec: The decoder.
        tensor: Number of devices.
        block_tokens: Tokens of a block, whose rows are divided.
    """
    if block_tokens % tensor:
        return False
    if spec.whole_copies:
        return tensor == 1
    try:
        check_divides(spec.config, tensor, spec.options.base_format)
    except ValueError:
        return False
    return True
