"""The files of a sweep's groups: the checkpoints of all, and the adapters that stay."""

import pathlib
import shutil

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS
from jaxlora.sweeps.engine.state import SweepState

GROUPS = "groups"  # folder of the runs of all groups, in that of the sweep


def keep_adapter(sweep: pathlib.Path, name: str, folder: pathlib.Path) -> str | None:
    """Moves a PEFT folder to its place, where an earlier attempt may have been.

    The move is on the disk when this returns, so that a record may name the place.

    Args:
        sweep: Folder of the sweep.
        name: The configuration.
        folder: Its PEFT folder in the run of a group; missing if it was moved before.

    Returns:
        Its place, within the folder of the sweep; None if there is no such folder.

    Raises:
        StorageError: It cannot be moved.
    """
    kept = f"{ADAPTERS}/{name}"
    if folder.is_dir():
        with wrap_os_errors(sweep / kept):
            make_folder(sweep / ADAPTERS)
            if (sweep / kept).exists():
                shutil.rmtree(sweep / kept)
            folder.rename(sweep / kept)
            sync_folder(sweep / ADAPTERS)
    return kept if (sweep / kept).is_dir() else None


def remove_unused(sweep: pathlib.Path, state: SweepState) -> None:
    """Removes checkpoints of ended workers that no configuration needs.

    Args:
        sweep: Folder of the sweep.
        state: The sweep.
    """
    names = [f"{GROUPS}/{path.name}" for path in (sweep / GROUPS).glob("*")]
    with_states = [name for name in names if (sweep / name / CHECKPOINTS).is_dir()]
    for name in state.unused_folders(with_states):
        shutil.rmtree(sweep / name / CHECKPOINTS, ignore_errors=True)
