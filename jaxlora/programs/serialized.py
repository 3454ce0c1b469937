"""Compiled programs as bytes, which another process can load."""

import dataclasses
import logging
import pickle
from typing import Any

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """The parts of a program that are kept on disk.

    Attributes:
        executable: What JAX serializes.
        out_tree: Structure of the results.
        devices: Numbers of the devices, in the order of the program.
    """

    executable: bytes
    out_tree: Any
    devices: tuple[int, ...]


def serialize(compiled: jax.stages.Compiled, what: str) -> bytes | None:
    """Returns a program as bytes; None if another process could not run it."""
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if unloaded is None or unloaded.host_callbacks or unloaded.keepalive:
        logger.debug("%s is not kept, as it calls Python", what)
        return None
    try:
        executable, _, out_tree = serialize_executable.serialize(compiled)
        devices = tuple(device.id for device in unloaded.device_list)
        return pickle.dumps(
            _Entry(executable=executable, out_tree=out_tree, devices=devices)
        )
    except Exception as error:  # a back end or a structure that has no such form
        logger.info("%s is not kept: %s", what, error)
        return None


def deserialize(entry: bytes, args: tuple[Any, ...]) -> jax.stages.Compiled:
    """Loads a program on its devices.

    Args:
        entry: What `serialize` returned. It must come from this user.
        args: Arguments that the program was compiled for, or their shapes.
    """
    found: _Entry = pickle.loads(entry)
    by_id = {device.id: device for device in jax.devices()}
    return serialize_executable.deserialize_and_load(
        found.executable,
        jax.tree.structure((args, {})),
        found.out_tree,
        execution_devices=[by_id[number] for number in found.devices],
    )
