"""Operations on a model that is trained by requests, and what becomes of them."""

import dataclasses
from typing import Literal

from jaxlora.config.session_config import AdamParams
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import PassResult, StepResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Create:
    """Makes the adapter of a model, with fresh weights.

    Attributes:
        rank: Its rank.
        lora_alpha: Its update is scaled by lora_alpha / rank.
        target_modules: The linears that it adapts; None: all that the server adapts.
        seed: Random seed of its first weights.
    """

    rank: int
    lora_alpha: float
    target_modules: str | tuple[str, ...] | None
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Makes the adapter of a model, or replaces it, by one that was saved.

    Attributes:
        checkpoint: Key of the saved state in the storage.
        with_optimizer: Whether moments and step go on; else they start at zero.
    """

    checkpoint: str
    with_optimizer: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """A pass over datums, as `Session.forward` and `Session.forward_backward`.

    Attributes:
        data: The datums.
        loss: The loss.
        is_training: Whether it adds to the gradients.
    """

    data: tuple[Datum, ...]
    loss: ChosenLoss
    is_training: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step.

    Attributes:
        params: Its settings.
    """

    params: AdamParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """Writes a checkpoint into the storage, which is immutable once it is there.

    Attributes:
        checkpoint: Its key in the storage.
        kind: `state`: weights, moments and step in one file; `adapter`: a PEFT folder.
    """

    checkpoint: str
    kind: Literal["state", "adapter"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publish:
    """Copies the adapter for sampling.

    Attributes:
        sampler: Id of the copy.
        checkpoint: Key in the storage where its PEFT folder is written afterwards;
            None: it is not written, and gone when the server ends.
    """

    sampler: str
    checkpoint: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unload:
    """Ends a model; its slot is free, and its checkpoints stay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """Takes the number of a request that cannot be done, so that no gap is left.

    Attributes:
        message: What is wrong with it; its promise fails with this.
    """

    message: str


Operation = Create | Load | Pass | Step | Save | Publish | Unload | Refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """An operation was done.

    Attributes:
        result: The result of a pass or step; None: of others, which have none.
    """

    result: PassResult | StepResult | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
    """An operation has failed for good, and those after it go on.

    Attributes:
        message: What was wrong, the rule, and the cure.
        category: Whose fault it is.
    """

    message: str
    category: Literal["user", "server"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """An operation is not done yet.

    Attributes:
        state: Why: it is in the queue, the server has no room, or the tenant has used
            its share.
    """

    state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"


Outcome = Done | Failed | Waiting
