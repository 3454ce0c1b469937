"""The files of a sweep's groups: the checkpoints of all, and the adapters that stay."""

import pathlib
import shutil

from jaxlora.common.atomic import make_folder
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS
from jaxlora.sweeps.engine.state import SweepState

GROUPS = "groups"  # folder of the runs of all groups, in that of the sweep


def keep_adapter(sweep: pathlib.Path, name: str, folder: pathlib.Path) -> str:
    """Moves a PEFT folder to its place, where an earlier attempt may have been.

    Args:
        sweep: Folder of the sweep.
        name: The configuration.
        folder: Its PEFT folder in the run of a group; missing if it was moved before.

    Returns:
        Its place, within the folder of the sweep.
    """
    kept = f"{ADAPTERS}/{name}"
    if folder.is_dir():
        make_folder(sweep / ADAPTERS)
        if (sweep / kept).exists():
            shutil.rmtree(sweep / kept)
        folder.rename(sweep / kept)
    return kept


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
