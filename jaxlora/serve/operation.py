"""Operations on a model that is trained by requests, and what becomes of them.

They are kept in a log, so each has an encoding: JSON text, and bytes for the arrays.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pydantic
import safetensors.numpy

from jaxlora.config.session_config import AdamParams
from jaxlora.errors import ConfigError, DeviceError, JaxloraError, StorageError
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import PassResult, StepResult

logger = logging.getLogger(__name__)


class CannotReplay(ConfigError):
    """The work that was done before a restart cannot be done again."""


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

    @staticmethod
    def of(error: Exception, what: str) -> "Failed":
        """Returns what a client is told of an error, which may be ours."""
        if not isinstance(error, JaxloraError):
            logger.error("%s has failed", what, exc_info=error)
            message = "the server has made an error, which its log tells."
            return Failed(message=message, category="server")
        is_ours = isinstance(error, StorageError | DeviceError | CannotReplay)
        return Failed(message=str(error), category="server" if is_ours else "user")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """An operation is not done yet.

    Attributes:
        state: Why: it is in the queue, the server has no room, or the tenant has used
            its share.
    """

    state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"


Outcome = Done | Failed | Waiting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """The encoding of an operation.

    Attributes:
        kind: Name of its class.
        text: All but the arrays of datums, as JSON.
        data: The datums: 4 bytes for each token and target, and for each weight,
            log-probability and advantage that was given; None: it has none.
    """

    kind: str
    text: str
    data: bytes | None

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of kind, text and data."""
        found = hashlib.sha256(f"{self.kind}\0{self.text}\0".encode())
        found.update(self.data or b"")
        return found.digest()


_KINDS: dict[str, pydantic.TypeAdapter[Any]] = {
    kind.__name__: pydantic.TypeAdapter(kind)
    for kind in (Create, Load, Step, Save, Publish, Unload, Refused)
}
_ARRAYS = "tokens", "target_tokens", "weights", "logprobs", "advantages"
_LENGTHS, _LOGPROBS = "lengths", "logprobs"


def encode(operation: Operation) -> Encoded:
    """Returns the encoding of an operation: equal ones have equal encodings."""
    kind = type(operation).__name__
    if not isinstance(operation, Pass):
        text = _KINDS[kind].dump_json(operation).decode()
        return Encoded(kind=kind, text=text, data=None)
    loss = {"name": operation.loss.name, "settings": dict(operation.loss.settings)}
    text = json.dumps(
        {"loss": loss, "is_training": operation.is_training}, sort_keys=True
    )
    return Encoded(kind=kind, text=text, data=_encode_data(operation.data))


def decode(encoded: Encoded) -> Operation:
    """Returns the operation that `encode` was given; without data, it has no datums."""
    if encoded.kind != Pass.__name__:
        return _KINDS[encoded.kind].validate_json(encoded.text)
    fields = json.loads(encoded.text)
    return Pass(
        data=() if encoded.data is None else _decode_data(encoded.data),
        loss=ChosenLoss(**fields["loss"]),
        is_training=fields["is_training"],
    )


def _encode_data(data: Sequence[Datum]) -> bytes:
    """Joins the arrays of all datums; those that some lack are split by a length of 0.

    A datum has one position at least, so a length of 0 says that it has no such array.
    """
    tensors = {}
    for name in _ARRAYS:
        given = [getattr(datum, name) for datum in data]
        lengths = [0 if array is None else len(array) for array in given]
        tensors[f"{name}.{_LENGTHS}"] = np.array(lengths, np.int32)
        if arrays := [array for array in given if array is not None]:
            tensors[name] = np.concatenate(arrays)
    return safetensors.numpy.save(tensors)


def _decode_data(data: bytes) -> tuple[Datum, ...]:
    tensors = safetensors.numpy.load(data)
    columns = {}
    for name in _ARRAYS:
        lengths = tensors[f"{name}.{_LENGTHS}"]
        joined = tensors.get(name, np.zeros(0, np.float32))
        parts = np.split(joined, np.cumsum(lengths))[:-1]
        columns[name] = [part if len(part) else None for part in parts]
    return tuple(
        Datum(**dict(zip(_ARRAYS, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    )


def encode_outcome(outcome: Done | Failed) -> bytes:
    """Returns the encoding of an outcome."""
    tensors: dict[str, np.ndarray] = {}
    match outcome:
        case Failed():
            fields: Mapping[str, Any] = dataclasses.asdict(outcome)
        case Done(result=PassResult() as result):
            fields = {"metrics": dict(result.metrics)}
            lengths = [len(array) for array in result.logprobs]
            tensors = {
                _LENGTHS: np.array(lengths, np.int32),
                _LOGPROBS: np.concatenate(result.logprobs),
            }
        case Done(result=StepResult() as result):
            fields = dataclasses.asdict(result)
        case Done():
            fields = {}
    return safetensors.numpy.save(tensors, {"outcome": json.dumps(fields)})


def decode_outcome(encoded: bytes) -> Done | Failed:
    """Returns the outcome that `encode_outcome` was given."""
    # The library has no function that reads the metadata of bytes.
    size = int.from_bytes(encoded[:8], "little")
    header = json.loads(encoded[8 : 8 + size])
    fields = json.loads(header["__metadata__"]["outcome"])
    if "message" in fields:
        return Failed(**fields)
    if "metrics" in fields:
        tensors = safetensors.numpy.load(encoded)
        ends = np.cumsum(tensors[_LENGTHS])[:-1]
        logprobs = tuple(np.split(tensors[_LOGPROBS], ends))
        return Done(result=PassResult(logprobs=logprobs, metrics=fields["metrics"]))
    return Done(result=StepResult(**fields) if fields else None)
