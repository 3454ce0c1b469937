"""Errors that end a run early: of failing devices, or of a removed folder."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax

from jaxlora.errors import CheckpointError, DeviceError, JaxloraError
from jaxlora.run.folder import CHECKPOINTS
from jaxlora.run.lock import RunLock
from jaxlora.train.saved.read_checkpoint import newest_checkpoint

_NO_MEMORY = "RESOURCE_EXHAUSTED"


@contextlib.contextmanager
def explained(output_dir: pathlib.Path, lock: RunLock) -> Iterator[None]:
    """Raises errors of devices as `DeviceError`, which says what to do.

    An error of the system or of the run's files, if the folder was removed meanwhile,
    becomes one that says so.

    Args:
        output_dir: Folder of the run.
        lock: Lock of that folder.
    """
    try:
        yield
    except (OSError, JaxloraError) as error:
        try:
            lock.check_folder()
        except CheckpointError as removed:
            raise removed from error
        raise
    except jax.errors.JaxRuntimeError as error:
        where = ", ".join(getattr(error, "__notes__", ()))
        what, cure = "a device failed", "See whether all devices work (nvidia-smi)."
        if _NO_MEMORY in str(error):
            what = "a device is out of memory"
            cure = (
                "Lower microbatch_tokens, set remat: elementwise, mlp or layer, or "
                "choose a mesh with more stages or a larger fsdp."
            )
        number = newest_checkpoint(output_dir / CHECKPOINTS)
        kept = (
            "Nothing was saved yet, so the run starts anew"
            if number is None
            else f"The checkpoint after round {number} is whole; continue with --resume"
        )
        reason = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
        raise DeviceError(
            f"{what}{' (' + where + ')' if where else ''}: {reason}. {cure} {kept}."
        ) from error
