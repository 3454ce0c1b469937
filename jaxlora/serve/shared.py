"""The parts of a hub that all of it uses, and its settings."""

import dataclasses

from jaxlora.config.serve_config import Retention, Snapshots
from jaxlora.serve.ledger import Ledger
from jaxlora.serve.promises import Promises
from jaxlora.serve.status import Meter
from jaxlora.serve.storage import Storage
from jaxlora.serve.tasks import Tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubSettings:
    """Settings of a hub.

    Attributes:
        snapshot_steps: A model gets a snapshot after so many optimizer steps ...
        snapshot_seconds: ... or so many seconds after its first change since the last.
            What came after a snapshot is computed again after a crash.
        gap_seconds: A missing number of an operation is waited for so long.
        keep_seconds: Outcomes are kept so long.
        sampler_seconds: Published versions are kept so long after their last use. Those
            that are in the storage, too, are opened again.
    """

    snapshot_steps: int = Snapshots().steps
    snapshot_seconds: float = Snapshots().seconds
    gap_seconds: float = 600.0
    keep_seconds: float = Retention().promise_seconds
    sampler_seconds: float = Retention().sampler_seconds


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """What outlives an engine.

    Attributes:
        settings: The settings.
        storage: Where checkpoints and snapshots are.
        ledger: The log of operations and of what the device has done.
        promises: The promises, and the models that they are of.
        tasks: The threads that work for the engine's.
        meter: Counts what is done, and has the clock.
    """

    settings: HubSettings
    storage: Storage
    ledger: Ledger
    promises: Promises
    tasks: Tasks
    meter: Meter
