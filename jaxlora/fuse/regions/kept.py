"""Measured times of regions, which are kept for each kind of device.

There is one file for each kind of device in the user's cache. It holds the times of the
plans of regions, by a digest of the region's normal form. A file that is damaged, or
that another user may have written, counts as missing, and so do times of other versions
of JAX or jaxlora.

The package has such files too, in `shipped`. They are copies of files of the cache,
and hold for all versions of JAX with the same first two numbers. A region whose kernels
or predictions change so that it has another form or other plans is not found in them;
a test compares them with the benchmark's programs.
"""

import datetime
import json
import logging
import pathlib
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Literal

import pydantic

from jaxlora._version import __version__
from jaxlora.common.atomic import write_bytes
from jaxlora.common.cache_home import (
    DeviceFile,
    device_path,
    file_name,
    make_private,
    read_private,
    validated,
)

logger = logging.getLogger(__name__)

_FOLDER = "regions"
_SHIPPED = pathlib.Path(__file__).with_name("shipped")
_MOST_REGIONS = 1024  # of a device; the oldest goes first
_Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class Measured(pydantic.BaseModel):
    """The times of a region on a device.

    Attributes:
        region: Digest of its normal form.
        seconds: Time of both passes, by the name of the plan.
        jax_version: Version of jax.
        jaxlora_version: Version of jaxlora.
        day: Day of the measurement, in ISO format.
    """

    model_config = DeviceFile.model_config

    region: str
    seconds: dict[str, _Seconds]
    jax_version: str
    jaxlora_version: str
    day: str

    @staticmethod
    def now(region: str, seconds: dict[str, float]) -> "Measured":
        """Returns what has been measured now."""
        return Measured(
            region=region,
            seconds=seconds,
            day=datetime.date.today().isoformat(),
            **_versions(),
        )

    def of(self, plans: Sequence[str]) -> dict[str, float]:
        """Returns the times of plans, by name; none if one of them has no time."""
        if not set(plans) <= self.seconds.keys():
            return {}
        return {name: self.seconds[name] for name in plans}


class _File(DeviceFile):
    version: Literal[1]
    regions: Annotated[tuple[Measured, ...], pydantic.Field(max_length=_MOST_REGIONS)]


def _versions() -> dict[str, str]:
    return {"jax_version": metadata.version("jax"), "jaxlora_version": __version__}


def parse(text: str, device_kind: str) -> tuple[Measured, ...]:
    """Reads the regions in the text of a file.

    Raises:
        ValueError: The text is damaged, of another version or of another device.
    """
    return validated(_File, text, device_kind).regions


def read(device_kind: str) -> dict[str, Measured]:
    """Returns what is kept for a device with the installed versions, by region."""
    return {
        one.region: one
        for one in _read_all(device_kind)
        if (one.jax_version, one.jaxlora_version) == tuple(_versions().values())
    }


def shipped(device_kind: str) -> dict[str, Measured]:
    """Returns what the package has for a device and the installed JAX, by region."""
    path = _SHIPPED / file_name(device_kind)
    if not path.exists():
        return {}
    series = lambda version: version.split(".")[:2]
    installed = series(metadata.version("jax"))
    measured = parse(path.read_text(), device_kind)
    return {m.region: m for m in measured if series(m.jax_version) == installed}


def _read_all(device_kind: str) -> tuple[Measured, ...]:
    parsed = lambda text: parse(text, device_kind)
    return read_private(_FOLDER, device_kind, parsed) or ()


def write(device_kind: str, measured: Measured) -> None:
    """Adds the times of a region to the file of a device.

    If the file cannot be written, a line in the log says so: the times hold for this
    process.
    """
    others = [m for m in _read_all(device_kind) if m.region != measured.region]
    kept = (*others[-_MOST_REGIONS + 1 :], measured)
    file = _File(version=1, device=device_kind, regions=kept)
    data = json.dumps(file.model_dump(), indent=1).encode() + b"\n"
    try:
        path = device_path(_FOLDER, device_kind)
        make_private(path.parent)
        write_bytes(path, data, mode=0o600)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        logger.warning("regions: measured times are not kept: %s", why)
