"""A file with the whole state of an adapter.

It has weights, moments, gradients that no optimizer step has used yet, and the number
of steps.
"""

import dataclasses
import pathlib
from typing import Annotated, Any

import numpy as np
import pydantic
import safetensors
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.parked_slot import ParkedSlot, adapter_from_rows
from jaxlora.common.atomic import new_path
from jaxlora.common.json_file import check_regular_file, cut
from jaxlora.errors import CheckpointError
from jaxlora.run.saved_fields import STRICT, Count, OneLine
from jaxlora.session.residence import PENDING, Gradients, WholeState

_KEY = "jaxlora_session"  # of our part of the file's metadata


class _Header(pydantic.BaseModel):
    """The contents of a file beside its tensors.

    Attributes:
        version: Version of the format.
        base: Fingerprint of the base model.
        num_steps: Optimizer steps behind the weights.
        adapter: The adapter, whose arrays are shapes.
        is_finite: Whether the losses behind its gradients are finite; None: the file
            has no gradients.
    """

    model_config = STRICT

    version: Annotated[int, pydantic.Field(ge=1, le=1)] = 1
    base: OneLine
    num_steps: Count
    adapter: Adapter
    is_finite: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedAdapter:
    """The contents of a file.

    Attributes:
        adapter: The adapter with its weights.
        state: Its state.
        num_steps: Optimizer steps behind it.
    """

    adapter: Adapter
    state: WholeState
    num_steps: int


def write_state(
    path: pathlib.Path, adapter: Adapter, state: WholeState, num_steps: int, base: str
) -> None:
    """Writes the state of an adapter, which replaces a file that is there.

    Args:
        path: The file.
        adapter: An adapter with the same modules and ranks.
        state: The state.
        num_steps: Optimizer steps behind it.
        base: Fingerprint of the base model.

    Raises:
        StorageError: It cannot be written; an old file is unchanged.
    """
    kinds, gradients = state.parked.by_kind(), state.gradients
    if gradients is not None:
        kinds[PENDING] = gradients.tensors
    header = _Header(
        base=base,
        num_steps=num_steps,
        adapter=adapter,
        is_finite=None if gradients is None else gradients.is_finite,
    )
    tensors = {
        f"{kind}/{name}": np.ascontiguousarray(array)
        for kind, own in kinds.items()
        for name, array in own.items()
    }
    # Other threads go on meanwhile. While safetensors makes bytes of all tensors, which
    # takes seconds for a large adapter, none of them does.
    with new_path(path) as place:
        metadata = {_KEY: header.model_dump_json()}
        safetensors.numpy.save_file(tensors, place, metadata)


def read_state(path: pathlib.Path, base: str) -> SavedAdapter:
    """Reads the state of an adapter.

    Args:
        path: The file.
        base: Fingerprint of the base model that it must be of.

    Raises:
        CheckpointError: The file is missing, damaged or none of these, or is of
            another base.
    """
    kinds: dict[str, dict[str, np.ndarray]] = {}
    try:
        check_regular_file(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            header = _Header.model_validate_json((file.metadata() or {})[_KEY])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition("/")
                kinds.setdefault(kind, {})[name] = file.get_tensor(key)
        gradients = _gradients(kinds.pop(PENDING, None), header)
        parked = ParkedSlot.of(kinds)
        parked.check_like(header.adapter)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file.") from None
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} is damaged, or no file that Session.save_state has written: "
            f"{cut(error)}."
        ) from error
    if header.base != base:
        raise CheckpointError(
            f"{path} is of another base model than that of the session. Load that one."
        )
    return SavedAdapter(
        adapter=adapter_from_rows(parked.params, header.adapter),
        state=WholeState(parked=parked, gradients=gradients),
        num_steps=header.num_steps,
    )


def _gradients(
    tensors: dict[str, np.ndarray] | None, header: _Header
) -> Gradients | None:
    """Returns the gradients of a file.

    Raises:
        ValueError: They are not like the adapter.
    """
    if (tensors is None) is not (header.is_finite is None):
        raise ValueError("gradients, or whether they are finite, are missing")
    if tensors is None or header.is_finite is None:
        return None
    shapes = {path: array.shape for path, array in header.adapter.by_path().items()}
    if {path: array.shape for path, array in tensors.items()} != shapes:
        raise ValueError("the gradients have other shapes than the adapter")
    return Gradients(tensors=tensors, is_finite=header.is_finite)


_UNREADABLE: tuple[Any, ...] = (
    OSError,
    KeyError,
    ValueError,  # of pydantic, too
    safetensors.SafetensorError,
)
