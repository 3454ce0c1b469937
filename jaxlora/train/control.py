"""Decides about the jobs of a run beside its trainer; by itself, it decides nothing."""

from collections.abc import Callable, Sequence

from jaxlora.config import LoraJob, RunConfig
from jaxlora.run.saved_run import SavedSweep
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.report.summary import Ranking, RunResult, write_report


class Control[R: Ranking]:
    """Decides about the jobs of a run, gives it further ones, and reports their ends.

    This one lets every job train to its end. A sweep overrides what it has rules for.
    The thread that trains calls all methods, between two microbatches.

    Attributes:
        live: The jobs of the run, with the requests for them; it is set first.
        version: Changes when jobs may start, end or have to wait for a new reason.
    """

    live: LiveJobs
    version: int = 0

    # ---- checkpoints ---------------------------------------------------------------

    def saved(self) -> SavedSweep | None:
        """Returns what a checkpoint keeps; None: nothing."""
        return None

    def suggested(self) -> dict[str, dict[str, float]]:
        """Returns the place on each axis of the jobs that were suggested, by name."""
        return {}

    def restore(
        self, saved: SavedSweep | None, suggested: dict[str, dict[str, float]]
    ) -> None:
        """Takes over what a checkpoint has kept.

        Raises:
            CheckpointError: It does not fit the settings of the run.
        """

    # ---- decisions -----------------------------------------------------------------

    def suggest(self, jobs: Sequence[JobState], num_slots: int) -> LoraJob | None:
        """Returns a job to add now; None if none is due.

        Args:
            jobs: All jobs of the run.
            num_slots: Number of jobs that may run at the same time.
        """
        return None

    def wants_eval(self, job: JobState) -> bool:
        """Whether a job is to be evaluated here because a rule compares it here."""
        return False

    def note(self, jobs: Sequence[JobState], evaluated: Sequence[JobState]) -> bool:
        """Decides after evaluations; returns whether anything may have been decided.

        Args:
            jobs: All jobs of the run.
            evaluated: Those that were evaluated just now, after the same microbatch.
        """
        return False

    def review(self, jobs: Sequence[JobState]) -> None:
        """Looks for what is due before jobs end, pause and start."""

    def stop_of(self, job: JobState) -> tuple[str, str] | None:
        """Returns the rule by which a job ends, and the reason; None if it goes on."""
        return None

    def waiting_reason(self, job: JobState) -> str | None:
        """Returns why a job is not to train now; None if it may."""
        return None

    def num_allowed(self, job: JobState) -> int:
        """Returns the number of optimizer steps after which a job may have to wait."""
        return job.num_steps

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint is to be written where a round ends next."""
        return False

    def wait(self, is_asked_to_end: Callable[[], bool]) -> bool:
        """Waits while no job may train; returns whether the run is to look again.

        Args:
            is_asked_to_end: Whether a signal has asked for the run's end meanwhile.
        """
        return False

    # ---- the end -------------------------------------------------------------------

    def report(
        self, result: RunResult[R], jobs: Sequence[JobState], config: RunConfig
    ) -> RunResult[R]:
        """Writes the report of a run that has ended, and returns its result.

        Args:
            result: The result.
            jobs: The jobs of the run.
            config: The run; none of its settings is `auto`.
        """
        write_report(result)
        return result
