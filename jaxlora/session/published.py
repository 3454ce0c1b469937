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
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.parked_slot import without_values
from jaxlora.adapters.settings_table import SettingsTable
from jaxlora.adapters.slot_state import padded_rows, zero_tables
from jaxlora.common.job_name import BASE
from jaxlora.errors import ConfigError, StorageError
from jaxlora.generate.loaded import NO_ADAPTER, LoadedDecoder, LoadedStage
from jaxlora.generate.programs import Programs, Tables, programs_of
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_shapes
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.session.engine import Engine, OpenAdapter


@dataclasses.dataclass(kw_only=True, eq=False)
class Version:
    """A published version.

    Attributes:
        like: An adapter with the same modules, ranks and scalings, without values.
        source: What has published it.
        slot: Its slot; None: it is not on the device.
        file: The file with its weights; None: they were only on the device so far.
        num_held: Calls that need it.
        num_pinned: Sequences that run with it, so that it must stay on the device.
        last_use: Seconds of the clock at its last use.
        is_released: Whether its name is gone, so that it ends with the last call.
    """

    like: Adapter
    source: str = ""
    slot: int | None = None
    file: pathlib.Path | None = None
    num_held: int = 0
    num_pinned: int = 0
    last_use: float = dataclasses.field(default_factory=time.monotonic)
    is_released: bool = False

    def use(self) -> None:
        """Notes a use."""
        self.last_use = time.monotonic()


class Published:
    """The published versions of an engine's adapters, and a decoder with them.

    One thread uses it, but for `read_folder`.
    """

    def __init__(
        self,
        engine: Engine,
        num_slots: int,
        num_files: int | None = None,
        folder: pathlib.Path | None = None,
    ):
        """Makes the object; slots take memory when they are used first.

        Args:
            engine: The engine.
            num_slots: Number of versions that are on the device at the same time.
            num_files: Most others, beyond which those end that were used least recently
                and that no call needs; None: there is no bound.
            folder: Folder for files of the others; None: the system's for temporary
                ones.
        """
        self._engine, self._spec = engine, _sampling_spec(engine.spec, num_slots)
        self._shapes = _shapes(self._spec)
        self._num_files = num_files
        self._slots: list[Version | None] = [None] * num_slots
        self._versions: dict[str, Version] = {}
        self._numbers = itertools.count()
        self._parent = folder
        self._made_folder: pathlib.Path | None = None
        self._making_folder = threading.Lock()  # threads that read folders may need it

    @functools.cached_property
    def _settings(self) -> SettingsTable:
        return SettingsTable(self._spec)

    @functools.cached_property
    def _tables(self) -> Tables:
        return self._empty_tables()

    @property
    def _folder(self) -> pathlib.Path:
        """The folder of files, which is made when it is needed."""
        with self._making_folder:
            if self._made_folder is None:
                made = tempfile.mkdtemp(prefix="versions-", dir=self._parent)
                self._made_folder = pathlib.Path(made)
                weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
            return self._made_folder

    def _empty_tables(self) -> Tables:
        """Returns tables of zeros on the engine's device.

        JAX would compile programs for arrays that are not bound to a device, and again
        for their results, which are.
        """
        place = jax.tree.leaves(self._engine.table.weights)[0].sharding
        return jax.device_put(zero_tables(self._shapes), place)

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

    @property
    def programs(self) -> Programs:
        """The functions of the decoder."""
        place = next(iter(self._engine.model.params.values())).sharding
        return programs_of(((self._spec, place),))

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return num_bytes(self._shapes)

    def prepare(self) -> None:
        """Compiles, or loads, what publishing needs."""
        self.publish("", self._engine.base)
        self.release("")

    def renew(self, engine: Engine) -> None:
        """Goes on after an error of the device, with an engine that may be another.

        No sequences run any more. Versions that were only on the device are lost if the
        error has taken the slots.
        """
        self._engine = engine
        for version in self._slots:
            if version is not None:
                version.num_pinned = 0
        if not any(table.is_deleted() for table in self._tables.values()):
            return
        self._tables = self._empty_tables()
        for name, version in list(self._versions.items()):
            if version.slot is not None:
                self._empty(version)
            if version.file is None:
                del self._versions[name]

    # ---- names -----------------------------------------------------------------------

    def publish(self, name: str, one: OpenAdapter, source: str = "") -> None:
        """Copies an adapter's weights on the device.

        Matrices are rounded to the model's dtype, as training does for its products.

        Args:
            name: Name of the version.
            one: The adapter, without calls that wait.
            source: What publishes it. If this has done it before, it was broken off.

        Raises:
            ConfigError: There is a version of this name, of another source.
            StorageError: A version has to go to a file, which cannot be written.
        """
        if source and name in self._versions and self.version(name).source == source:
            self.release(name)
        self._check_new(name)
        engine, version = self._engine, Version(like=one.like, source=source)
        number = np.int32(0 if one is engine.base else engine.bring(one))
        if (slot := self._free_slot()) is None:  # samples run with all that are there
            rows = _read(engine.table.weights, number, self._tables)
            version.file = self._new_file(jax.device_get(rows))
        else:
            given = self._tables, engine.table.weights, number, np.int32(slot)
            self._tables = _copy(*given)
            self._put(version, slot)
        self.add(name, version)

    def open_folder(self, name: str, path: str | os.PathLike) -> None:
        """Makes a version of a folder of PEFT.

        Args:
            name: Name of the version.
            path: The folder.

        Raises:
            JaxloraError: There is a version of this name, or as for `read_folder`.
        """
        self.add(name, self.read_folder(path))

    def read_folder(self, path: str | os.PathLike) -> Version:
        """Reads a folder of PEFT as a version without a name; any thread may call this.

        Raises:
            JaxloraError: The folder cannot be read or does not fit the model and its
                slots, or a file cannot be written.
        """
        config, path = self._engine.model.config, pathlib.Path(path)
        adapter = import_peft(path, linear_shapes(config))
        adapter.check_base(config)
        adapter = adapter.as_lora(linear_shapes(config))
        self._engine.check_fits(path.name, adapter)
        rows = padded_rows(self._spec.stacks, self._shapes, adapter.by_path())
        return Version(like=without_values(adapter), file=self._new_file(rows))

    def add(self, name: str, version: Version) -> None:
        """Names a version that `read_folder` has read.

        Raises:
            ConfigError: There is a version of this name.
        """
        self._check_new(name)
        self._versions[name] = version
        self._end_oldest()

    def _check_new(self, name: str) -> None:
        if name == BASE or name in self._versions:
            raise ConfigError(
                f"there is a version {name!r} already. Choose another name."
            )

    def _end_oldest(self) -> None:
        """Ends the versions that are too many beside those on the device."""
        if self._num_files is None:
            return
        others = [
            (version.last_use, name)
            for name, version in self._versions.items()
            if version.slot is None and not version.num_held
        ]
        for _, name in sorted(others)[: -self._num_files]:
            self.release(name)

    def release_unused(self, seconds: float) -> None:
        """Ends the versions that were not used for so long."""
        before = time.monotonic() - seconds
        for name, version in list(self._versions.items()):
            if version.last_use < before and not version.num_held:
                self.release(name)

    def release(self, name: str) -> None:
        """Ends a version; calls that need it still get their results.

        Raises:
            ConfigError: There is no such version.
        """
        version = self.version(name)
        del self._versions[name]
        self.drop(version)

    def drop(self, version: Version) -> None:
        """Ends a version that has no name."""
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

    def knows(self, name: str) -> bool:
        """Whether there is a version of this name."""
        return name in self._versions

    # ---- uses ------------------------------------------------------------------------

    def hold(self, version: Version) -> None:
        """Keeps a version until it is let go as often."""
        version.num_held += 1
        version.use()

    def let_go(self, version: Version) -> None:
        """Ends a use that `hold` began."""
        version.num_held -= 1
        version.use()
        self._end_if_unused(version)

    def pin(self, version: Version) -> int | None:
        """Brings a version to the device, where it stays until it is unpinned.

        Returns:
            Its slot; None: all slots have versions that are pinned.

        Raises:
            StorageError: Its file cannot be read, or that of one that leaves for it
                cannot be written.
        """
        if version.slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            assert version.file is not None
            try:
                rows = safetensors.numpy.load_file(version.file)
            except (OSError, safetensors.SafetensorError) as error:
                raise StorageError(
                    f"a published version cannot be read from {version.file}: {error}. "
                    "Publish the adapter again."
                ) from error
            self._tables = _write(self._tables, rows, np.int32(slot))
            self._put(version, slot)
        version.num_pinned += 1
        return version.slot

    def unpin(self, version: Version) -> None:
        """Ends a use that `pin` began."""
        version.num_pinned -= 1

    # ---- slots -----------------------------------------------------------------------

    def _put(self, version: Version, slot: int) -> None:
        version.slot = slot
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
            rows = _read(self._tables, np.int32(version.slot), self._tables)
            version.file = self._new_file(jax.device_get(rows))

    def _new_file(self, rows: dict[str, np.ndarray]) -> pathlib.Path:
        path = self._folder / f"{next(self._numbers)}.safetensors"
        given = {name: np.ascontiguousarray(x) for name, x in rows.items()}
        try:
            safetensors.numpy.save_file(given, path)
        except (OSError, safetensors.SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise StorageError(
                f"a published version cannot be written to {path}: {error}. Free space "
                "there, then try again."
            ) from error
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


def _shapes(spec: DecoderSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the tables, with matrices in the model's dtype."""

    def shape(name: str, table: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = spec.options.dtype if tensor_of(name).is_matrix else table.dtype
        return jax.ShapeDtypeStruct(table.shape, dtype)

    return {name: shape(name, x) for name, x in spec.adapter_shapes().items()}


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
def _read(weights: Any, slot: Any, tables: Any) -> Any:
    """Reads a slot of weights, in the dtypes of tables."""
    return {n: weights[n][slot].astype(table.dtype) for n, table in tables.items()}


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
