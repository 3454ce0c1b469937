"""Numbers of a hub: those of each model, and those of the engine that they share."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """Numbers of a model that is not unloaded.

    Attributes:
        id: Its id.
        tenant: The tenant that owns it.
        next_seq: Number of the operation that starts next.
        pending_datums: Datums that were accepted and whose results are not there.
        pending_tokens: Tokens of these datums.
        steps: Optimizer steps behind its weights.
        loss_per_token: Loss of the last training pass divided by the number of
            positions that count; None: there was none, or no position counted.
        tokens_per_second: Tokens that it had trained or evaluated in each second of
            the last minute.
        failure: Why it cannot be used any more; None: it can.
    """

    id: str
    tenant: str
    next_seq: int
    pending_datums: int
    pending_tokens: int
    steps: int
    loss_per_token: float | None
    tokens_per_second: float
    failure: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubStatus:
    """Numbers of a hub. Counts begin when the process does.

    Attributes:
        health: `starting`: it replays what the snapshots lack, and accepts; `running`;
            `paused`: the database or its disk fails, so nothing new is accepted until
            it works again; `stopping`; `failed`: the engine cannot be made anew, so
            the process has to be restarted, and nothing that was accepted is lost.
        reason: Why it is paused or has failed; None: it is not.
        models: The models that are not unloaded, in the order of their creation.
        queued_datums: Datums that wait for a microbatch.
        queued_tokens: Tokens of these datums.
        tokens_per_second: Tokens, without padding, in each second of the last minute.
        fill: Tokens, without padding, of each row of the last minute's microbatches;
            None: there were none.
        microbatch_seconds: Mean time between the results of successive microbatches
            while the engine was busy, in the last minute; None: there were none.
        tokens: Tokens that were trained or evaluated.
        microbatches: Microbatches that have run.
        steps: Optimizer steps that were taken, without those that were skipped.
        restarts: How often the engine was made anew after an error.
        replayed_microbatches: Microbatches that ran again after a crash or an error.
        snapshots: Snapshots of models that were written.
        log_bytes: Bytes of operations that the log holds as no snapshot covers them.
    """

    health: Literal["starting", "running", "paused", "stopping", "failed"]
    reason: str | None
    models: tuple[ModelStatus, ...]
    queued_datums: int
    queued_tokens: int
    tokens_per_second: float
    fill: float | None
    microbatch_seconds: float | None
    tokens: int
    microbatches: int
    steps: int
    restarts: int
    replayed_microbatches: int
    snapshots: int
    log_bytes: int

    @property
    def is_healthy(self) -> bool:
        """Whether operations are accepted and run."""
        return self.health in ("starting", "running")
