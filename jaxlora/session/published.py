"""Published versions: immutable copies of adapters, from which samples are drawn.

A version is in a slot of its own on the device, or else in a file, which the system
keeps in memory while there is room. Nothing that is published changes the slots in
which adapters are trained, nor do later optimizer steps change a version.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
import tempfile
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.settings_table import SettingsTable
from jaxlora.adapters.slot_state import padded_rows
from jaxlora.common.job_name import BASE
from jaxlora.errors import ConfigError
from jaxlora.generate.loaded import NO_ADAPTER, LoadedDecoder, LoadedStage
from jaxlora.generate.programs import Tables
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_shapes
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.session.engine import Engine, OpenAdapter, check_fits


@dataclasses.dataclass(kw_only=True, eq=False)
class Version:
    """A published version.

    Attributes:
        like: An adapter with the same modules, ranks and scalings.
        slot: Its slot; None: it is on no device.
        file: The file with its weights; None: they were only on the device so far.
        num_held: Calls that need it.
        num_pinned: Sequences that run with it, so that it must stay on the device.
        last_use: Number of the last use, among those of all versions.
        is_released: Whether its name is gone, so that it ends with the last call.
    """

    like: Adapter
    slot: int | None = None
    file: pathlib.Path | None = None
    num_held: int = 0
    num_pinned: int = 0
    last_use: int = 0
    is_released: bool = False


class Published:
    """The published versions of an engine's adapters, and a decoder with them."""

    def __init__(self, engine: Engine, num_slots: int):
        """Makes empty slots.

        Args:
            engine: The engine.
            num_slots: Number of versions that are on the device at the same time.
        """
        self._engine, self._spec = engine, _sampling_spec(engine.spec, num_slots)
        self._settings = SettingsTable(self._spec)
        self._tables = _zeros(self._spec)
        self._slots: list[Version | None] = [None] * num_slots
        self._versions: dict[str, Version] = {}
        self._uses, self._files = itertools.count(1), itertools.count()
        self._folder: pathlib.Path | None = None

    @property
    def decoder(self) -> LoadedDecoder:
        """A decoder with the versions in their slots."""
        stage = LoadedStage(
            spec=self._spec,
            base=self._engine.model.params,
            adapters=self._tables,
            settings=self._settings.settings,
        )
        return LoadedDecoder(stages=(stage,))

    def prepare(self) -> None:
        """Compiles, or loads, what publishing needs."""
        self.publish("", self._engine.base)
        self.release("")

    # ---- names -----------------------------------------------------------------------

    def publish(self, name: str, one: OpenAdapter) -> None:
        """Copies an adapter's weights on the device.

        Matrices are rounded to the model's dtype, as training does for its products.

        Args:
            name: Name of the version.
            one: The adapter, without calls that wait.

        Raises:
            ConfigError: There is a version of this name, or sequences run with the
                versions in all slots.
        """
        self._check_new(name)
        if (slot := self._free_slot()) is None:
            raise ConfigError(
                f"version {name!r}: samples are being drawn from all "
                f"{len(self._slots)} versions on the device. Publish again when some "
                "are done, or set more versions when the server starts."
            )
        version = Version(like=one.like)
        weights = self._engine.table.weights
        numbers = np.int32(one.slot), np.int32(slot)
        self._tables = _copy(self._tables, weights, *numbers)
        self._put(version, slot)
        self._versions[name] = version

    def open_folder(self, name: str, path: str | os.PathLike) -> None:
        """Makes a version of a folder of PEFT.

        Args:
            name: Name of the version.
            path: The folder.

        Raises:
            JaxloraError: There is a version of this name, or the folder cannot be read
                or does not fit the model and its slots.
        """
        self._check_new(name)
        config = self._engine.model.config
        adapter = import_peft(pathlib.Path(path), linear_shapes(config))
        adapter.check_base(config)
        adapter = adapter.as_lora(linear_shapes(config))
        check_fits(name, adapter, self._engine.spec)
        rows = padded_rows(self._spec.stacks, self._tables, adapter.by_path())
        self._versions[name] = Version(like=adapter, file=self._new_file(rows))

    def release(self, name: str) -> None:
        """Ends a version; calls that need it still get their results.

        Raises:
            ConfigError: There is no such version.
        """
        version = self.version(name)
        del self._versions[name]
        version.is_released = True
        self._end_if_unused(version)

    def version(self, name: str) -> Version:
        """Returns a version.

        Raises:
            ConfigError: There is none of this name.
        """
        if name not in self._versions:
            raise ConfigError(
                f"there is no published version {name!r}. It was never published, or "
                "was released. Publish the adapter again, or open a saved folder."
            )
        return self._versions[name]

    def _check_new(self, name: str) -> None:
        if name == BASE or name in self._versions:
            raise ConfigError(
                f"there is a version {name!r} already. Choose another name."
            )

    # ---- uses ------------------------------------------------------------------------

    def hold(self, version: Version) -> None:
        """Keeps a version until it is let go as often."""
        version.num_held += 1

    def let_go(self, version: Version) -> None:
        """Ends a use that `hold` began."""
        version.num_held -= 1
        self._end_if_unused(version)

    def pin(self, version: Version) -> int | None:
        """Brings a version to the device, where it stays until it is unpinned.

        Returns:
            Its slot; None: all slots have versions that are pinned.
        """
        if version.slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            assert version.file is not None
            rows = safetensors.numpy.load_file(version.file)
            self._tables = _write(self._tables, rows, np.int32(slot))
            self._put(version, slot)
        version.num_pinned += 1
        version.last_use = next(self._uses)
        return version.slot

    def unpin(self, version: Version) -> None:
        """Ends a use that `pin` began."""
        version.num_pinned -= 1

    # ---- slots -----------------------------------------------------------------------

    def _put(self, version: Version, slot: int) -> None:
        version.slot, version.last_use = slot, next(self._uses)
        self._slots[slot - NO_ADAPTER - 1] = version
        self._settings.set({slot: version.like})

    def _free_slot(self) -> int | None:
        """Returns an empty slot, or empties that of the least recently used version."""
        idle = [one for one in self._slots if one is not None and not one.num_pinned]
        if None not in self._slots and idle:
            oldest = min(idle, key=lambda one: one.last_use)
            self._keep(oldest)
            self._empty(oldest)
        if None not in self._slots:
            return None
        return self._slots.index(None) + NO_ADAPTER + 1

    def _keep(self, version: Version) -> None:
        """Writes the weights of a version into a file, where they stay."""
        if version.file is None:
            assert version.slot is not None
            rows = jax.device_get(_read(self._tables, np.int32(version.slot)))
            version.file = self._new_file(rows)

    def _new_file(self, rows: dict[str, np.ndarray]) -> pathlib.Path:
        if self._folder is None:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxlora-versions-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"{next(self._files)}.safetensors"
        safetensors.numpy.save_file(
            {name: np.ascontiguousarray(x) for name, x in rows.items()}, path
        )
        return path

    def _empty(self, version: Version) -> None:
        assert version.slot is not None
        self._slots[version.slot - NO_ADAPTER - 1] = None
        version.slot = None

    def _end_if_unused(self, version: Version) -> None:
        if version.num_held or not version.is_released:
            return
        if version.slot is not None:
            self._empty(version)
        if version.file is not None:
            version.file.unlink()


def _zeros(spec: DecoderSpec) -> Tables:
    """Makes the tables of empty slots, with matrices in the model's dtype."""

    def zeros(name: str, table: jax.ShapeDtypeStruct) -> jax.Array:
        dtype = spec.options.dtype if tensor_of(name).is_matrix else table.dtype
        return jnp.zeros(table.shape, dtype)

    return {name: zeros(name, x) for name, x in spec.adapter_shapes().items()}


@functools.partial(jax.jit, donate_argnums=0)
def _copy(tables: Any, weights: Any, source: Any, slot: Any) -> Any:
    """Copies a slot of the weights that are trained into a slot of tables."""
    return {
        name: table.at[slot].set(weights[name][source].astype(table.dtype))
        for name, table in tables.items()
    }


@functools.partial(jax.jit, donate_argnums=0)
def _write(tables: Any, rows: Any, slot: Any) -> Any:
    """Writes rows of the host into a slot of tables."""
    return {name: table.at[slot].set(rows[name]) for name, table in tables.items()}


@jax.jit
def _read(tables: Any, slot: Any) -> Any:
    return {name: table[slot] for name, table in tables.items()}


def _sampling_spec(spec: DecoderSpec, num_slots: int) -> DecoderSpec:
    """Returns the decoder that generates, for all adapters of a session.

    Args:
        spec: The decoder that trains.
        num_slots: Number of slots beside the empty one of the base.
    """
    assert spec.slots is not None
    options = DecoderOptions(
        dtype=spec.options.dtype,
        base_format=spec.options.base_format,
        max_segment_tokens=1,
    )
    slots = dataclasses.replace(spec.slots, num_slots=NO_ADAPTER + 1 + num_slots)
    return dataclasses.replace(spec, options=options, slots=slots)
