"""The files of a sweep's groups: the checkpoints of all, and the adapters that stay."""

import pathlib
import shutil

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.errors import StorageError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, is_own
from jaxlora.sweeps.engine.state import GROUPS, SweepState


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
        StorageError: It cannot be moved, or a link leads out of the sweep's folder.
    """
    kept = f"{ADAPTERS}/{name}"
    if folder.is_dir():
        is_inside = folder.resolve().is_relative_to(sweep.resolve())
        if not (is_inside and is_own(sweep, kept)):
            raise StorageError(
                f"{folder} is not moved to {sweep / kept}: a link leads out of the "
                "folder of the sweep. Replace it by a folder."
            )
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
    with_states = [
        name
        for name in names
        if (sweep / name / CHECKPOINTS).is_dir()
        and is_own(sweep, f"{name}/{CHECKPOINTS}")
    ]
    for name in state.unused_folders(with_states):
        shutil.rmtree(sweep / name / CHECKPOINTS, ignore_errors=True)
