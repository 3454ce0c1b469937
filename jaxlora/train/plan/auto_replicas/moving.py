"""Whether a run with `replicas: auto` should move to other replicas, and to which.

The replicas were chosen for the jobs with which the run began. When jobs join or leave,
they are compared with those that would be chosen now. A move pays if what it is
predicted to save until the end of these jobs is more than what it is predicted to take.
The trainer and `jaxlora plan` decide it here.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.memory.footprint import num_bytes
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.train.plan.auto_mesh.machine import Machine
from jaxlora.train.plan.auto_mesh.predict import SLOT_SECONDS
from jaxlora.train.plan.auto_replicas.choose import ReplicaLists, Timed
from jaxlora.train.plan.job_slots import JobPosition
from jaxlora.train.plan.planned_model import PlannedModel
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.resolve import resolve, run_bounds
from jaxlora.train.plan.run_plan import RunPlan
from jaxlora.train.plan.slot_spec import decoder_spec

# Bytes per second of a checkpoint's way to the disk; an assumption.
_DISK_BYTES = 1e9
_STATES = 3  # weights and both moments of AdamW


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeighedMove:
    """The replicas that run, and those that would be chosen now.

    Attributes:
        now: The replicas that run.
        then: Those that would be chosen.
        config: The run with the latter, as it is resumed on them.
        ended: Jobs that have ended, which the latter need not hold.
        is_same: Whether they are those that run.
        gain_seconds: What they save until the end of the jobs.
        cost_seconds: What moving takes.
    """

    now: str
    then: str
    config: RunConfig
    ended: tuple[str, ...]
    is_same: bool
    gain_seconds: float
    cost_seconds: float

    @property
    def pays(self) -> bool:
        """Whether to move."""
        return not self.is_same and self.gain_seconds > self.cost_seconds

    def note(self, why: str) -> Note:
        """Says what was compared and decided.

        Args:
            why: Which jobs have joined or left.
        """
        if self.is_same:
            return Note(f"replicas: auto: {why}: {self.now} is still the fastest")
        verdict = "moving" if self.pays else "not moving"
        text = (
            f"replicas: auto: {why}: {verdict} from {self.now} to {self.then}, which "
            f"is predicted to save {self.gain_seconds:,.1f} s of the rest of the run; "
            f"moving takes {self.cost_seconds:,.1f} s"
        )
        return Note(text)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaChoice:
    """The setting `replicas: auto` of a run, by which replicas may be chosen again.

    Attributes:
        asked: The run with `replicas: auto`, and with the number of its slots, which
            stays. Their rank is chosen again, unless the user gave it.
        model: The base model.
        machine: The machine.
    """

    asked: RunConfig
    model: PlannedModel
    machine: Machine

    @staticmethod
    def of(
        given: RunConfig, begun: RunConfig, plan: RunPlan, machine: Machine
    ) -> "ReplicaChoice | None":
        """Returns the choice of a run; None: its replicas stay.

        They stay unless the user has left them to `auto`. Without the rates of the
        devices, a gain cannot be compared with the time of moving.

        Args:
            given: The run as the user gave it.
            begun: The run as it began, with the jobs that have joined it.
            plan: Its plan.
            machine: The machine.
        """
        is_open = given.replicas == "auto" and machine.num_devices > 1
        if not is_open or machine.num_processes > 1 or not plan.rates.are_known:
            return None
        asked = begun.replace(
            replicas="auto",
            mesh=ONE_DEVICE,
            microbatch_tokens="auto",
            remat=given.remat,
            max_concurrent_jobs=begun.max_concurrent_jobs or len(begun.jobs),
            slot_rank=given.slot_rank,
        )
        return ReplicaChoice(asked=asked, model=plan.model, machine=machine)

    def weigh(
        self,
        plan: RunPlan,
        jobs: Sequence[PreparedJob],
        positions: Sequence[JobPosition],
        ended: Collection[str] = (),
    ) -> WeighedMove:
        """Compares the replicas that run with those that would be chosen now.

        The choice is that of a run that never had the jobs that have ended, with the
        number of slots of this one.

        Args:
            plan: The plan of the run.
            jobs: All of its jobs, also those that have ended.
            positions: Positions of those that may train now, by their number in `jobs`.
            ended: Names of those that have ended. All others are held, also those that
                have no position: they are paused, or wait for the job that they copy.

        Raises:
            DoesNotFitError: No replica has the memory for the longest sample.
        """
        config = self._of(jobs)
        held = [job.foreseen for job in jobs if job.name not in ended]
        alone = config.replace(replicas=None)
        bounds = run_bounds(alone, held)
        spec, _ = decoder_spec(alone, self.model, held, bounds.max_tokens)

        def lists(own: Sequence[PreparedJob]) -> ReplicaLists:
            there = _renumbered(positions, jobs, own)
            return ReplicaLists(self.model, spec, own, there, bounds, self.machine)

        then, _ = lists(held).best(alone)
        # Whether replicas share jobs was decided for the jobs that there were.
        planned = [job.foreseen for job in jobs if job.name not in plan.ended]
        now = lists(planned).timed(plan.config)
        shown = {"with_remat": config.remat == "auto"}
        chosen = _settings(config, then)
        return WeighedMove(
            now=now.describe(**shown),
            then=then.describe(**shown),
            config=chosen,
            ended=tuple(job.name for job in jobs if job.name in ended),
            is_same=_deployed(then.config) == _deployed(plan.config),
            gain_seconds=_tokens_left(plan, positions) * (now.seconds - then.seconds),
            cost_seconds=_moving_seconds(plan, then.config, positions, now.seconds),
        )

    def plan(self, move: WeighedMove, jobs: Sequence[PreparedJob]) -> RunPlan:
        """Plans a run on the replicas of a weighed move, as it is when it is resumed.

        Args:
            move: The move.
            jobs: All jobs of the run.

        Raises:
            ConfigError: It does not fit.
        """
        args = move.config, self.model, jobs, self.machine
        return resolve(*args, ended=move.ended)

    def _of(self, jobs: Sequence[PreparedJob]) -> RunConfig:
        return self.asked.replace(jobs=tuple(job.settings for job in jobs))


def _renumbered(
    positions: Iterable[JobPosition],
    jobs: Sequence[PreparedJob],
    own: Sequence[PreparedJob],
) -> list[JobPosition]:
    """Returns positions of jobs by their number among some of them."""
    numbers = {job.name: number for number, job in enumerate(own)}
    return [
        dataclasses.replace(one, job=numbers[jobs[one.job].name]) for one in positions
    ]


def _settings(config: RunConfig, then: Timed) -> RunConfig:
    """Returns the run with the settings of a list of replicas, or of a mesh."""
    own = then.config
    return config.replace(
        replicas=own.replicas,
        remat=own.remat,
        mesh=ONE_DEVICE if then.has_list else own.mesh,
        microbatch_tokens="auto" if then.has_list else own.microbatch_tokens,
    )


def _deployed(config: RunConfig) -> tuple[object, ...]:
    """Returns what makes two deployments the same."""
    shapes = config.replica_shapes
    return shapes or (config.mesh_sizes, config.limits.capacity), config.remat


def has_rest(plan: RunPlan, positions: Iterable[JobPosition]) -> bool:
    """Whether anything is left of a run after a move, which follows a window."""
    return _tokens_left(plan, positions) > 0


def _tokens_left(plan: RunPlan, positions: Iterable[JobPosition]) -> float:
    """Returns the tokens that follow the next window of the running jobs."""
    left = 0.0
    for one in positions:
        until = 0 if one.slot is None else plan.config.window_steps
        left += max(0, one.num_steps - one.step - until) * one.batch_tokens
    return left


def _moving_seconds(
    plan: RunPlan,
    then: RunConfig,
    positions: Sequence[JobPosition],
    token_seconds: float,
) -> float:
    """Predicts the time of a move; programs are compiled before, beside training.

    Each running job repeats half of a global batch, on average. Its state is written to
    a checkpoint, read from its slot and put into the new one. The base goes to those
    devices that lack their part of it, one after the other, from one that has it.

    Args:
        plan: The plan of the run.
        then: The run with other replicas.
        positions: Positions of the jobs.
        token_seconds: Time of a token on the replicas that run.
    """
    spec, slots = plan.spec, plan.spec.slots
    assert slots is not None
    running = [p for p in positions if p.slot is not None]
    repeated = sum(p.batch_tokens for p in running) / 2 * token_seconds
    state = _STATES * num_bytes(spec.adapter_shapes()) / slots.num_slots
    states = len(running) * (state / _DISK_BYTES + 2 * SLOT_SECONDS)
    parts = zip(_parts(then), _parts(plan.config), strict=False)
    lacking = [new[0] for new, old in parts if new != old]
    lacking += [tensor for tensor, _ in _parts(then)[len(_parts(plan.config)) :]]
    sent = sum(num_bytes(spec.part_shapes(tensor)[0]) for tensor in lacking)
    return repeated + states + plan.rates.links.speed.transfer_seconds(sent)


def _parts(config: RunConfig) -> list[tuple[int, int]]:
    """Returns which part of the base each device has: of how many, and its number."""
    sizes = config.mesh_sizes
    degrees = [one.tensor for one in config.replica_shapes]
    degrees = degrees or [sizes.tensor] * sizes.data
    return [(tensor, rank) for tensor in degrees for rank in range(tensor)]
