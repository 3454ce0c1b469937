"""The data that tenants upload, and the settings of their jobs that name files.

A job of a tenant names data by the name of an upload, or of a data set that the
operator allows to all, and adapters by the name of another job. No setting of it can
name a file of the server's machine or a place on the hub.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.records.files import READERS
from jaxlora.data.templates.known import KNOWN
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.show import find_samples
from jaxlora.data.tokens.tokenize import with_kind
from jaxlora.errors import ConfigError, DataError, JaxloraError
from jaxlora.serve.limits import Limits
from jaxlora.serve.registry import Entry, NotFound, Registry, Taken
from jaxlora.serve.storage import Storage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_IS_TEMPLATE = re.compile(r"{{|{%")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LocalJob:
    """Settings with paths of this machine in place of a tenant's names.

    Attributes:
        settings: The settings.
        names: The tenant's name of each path.
    """

    settings: LoraJob
    names: Mapping[str, str]

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Puts the tenant's names in place of paths into the text of an error."""
        try:
            yield
        except JaxloraError as error:
            text = str(error)
            for path, name in self.names.items():
                text = text.replace(path, name)
            raise type(error)(text) from None


class TenantData:
    """The uploads of tenants, and the data sets that they share."""

    def __init__(
        self,
        storage: Storage,
        registry: Registry,
        limits: Limits,
        shared: Mapping[str, str],
    ):
        """Makes the object.

        Args:
            storage: Has the files.
            registry: Has an entry for each upload.
            limits: Limits the size of an upload and of all files of a tenant.
            shared: The paths of the data sets that all tenants may name.
        """
        self._storage, self._registry, self._limits = storage, registry, limits
        self.shared = dict(shared)
        self._uploading: set[str] = set()  # keys; the thread of the server's alone

    # ---- uploads ---------------------------------------------------------------------

    async def upload(
        self, tenant: str, name: str, chunks: AsyncIterator[bytes]
    ) -> Entry:
        """Stores a file of records under a name; returns its entry.

        Raises:
            JaxloraError: The name cannot be used or is taken, or the file is empty or
                too large.
        """
        _check_name(name)
        key = _key(tenant, name)
        if key in self._uploading:
            raise Taken(f"{name} is being uploaded already. Wait for its end.")
        self._uploading.add(key)
        try:
            await self._store(tenant, name, chunks)
        finally:
            self._uploading.remove(key)
        return self.find(tenant, name)

    async def _store(
        self, tenant: str, name: str, chunks: AsyncIterator[bytes]
    ) -> None:
        key = _key(tenant, name)
        self._limits.check_storage(tenant)
        with contextlib.suppress(NotFound):
            self.find(tenant, name)
            raise Taken(
                f"you have uploaded {name} already. Choose another name, or delete it "
                "first."
            )
        # An upload or a deletion that failed may have left a file without an entry.
        await asyncio.to_thread(self._storage.delete, key)
        most, size = self._limits.config.limits.upload_bytes, 0
        async with _in_threads(self._storage.writing(key)) as path:
            with path.open("wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > most:
                        raise DataError(
                            f"{name} has more than {most:,} bytes, and a file may have "
                            "as many. Split it, and list the parts in data.datasets."
                        )
                    file.write(chunk)
            if not size:
                raise DataError(f"{name} is empty. Send the file as the body.")
            self._limits.check_storage(tenant, size)
        self._registry.add("upload", tenant, key, num_bytes=size, key=key)

    def uploads(self, tenant: str, limit: int, offset: int) -> Sequence[Entry]:
        """Returns a tenant's uploads, the newest first."""
        return self._registry.list(tenant, "upload", limit=limit, offset=offset)

    def find(self, tenant: str, name: str) -> Entry:
        """Returns the entry of an upload.

        Raises:
            NotFound: The tenant has no such upload.
        """
        return self._registry.owned(tenant, "upload", _key(tenant, name))

    def delete(self, tenant: str, name: str) -> None:
        """Deletes an upload. Jobs that are running have read it already.

        Raises:
            NotFound: The tenant has no such upload.
        """
        self._registry.delete(tenant, "upload", _key(tenant, name))
        self._storage.delete(_key(tenant, name))

    # ---- settings --------------------------------------------------------------------

    def local(self, tenant: str, job: LoraJob, adapters: Mapping[str, str]) -> LocalJob:
        """Returns the settings of a job with paths in place of names.

        Args:
            tenant: The tenant.
            job: The settings.
            adapters: Keys in the storage of the tenant's adapters, by name.

        Raises:
            ConfigError: A setting names what the tenant does not have.
        """
        names: dict[str, str] = {}

        def path_of(name: str) -> str:
            path = self._path(tenant, name)
            names[path] = name
            return path

        def adapter(setting: str, name: str) -> str:
            if (key := adapters.get(name.lower())) is None:
                known = ", ".join(adapters) or "none"
                raise ConfigError(
                    f"{setting}={name!r:.100} is no job of yours that has an adapter; "
                    f"these have: {known}."
                )
            path = str(self._storage.fetch(key))
            names[path] = name
            return path

        changes: dict[str, Any] = {"data": _local_data(job.data, path_of)}
        if job.eval_data is not None:
            changes["eval_data"] = _local_data(job.eval_data, path_of)
        if job.init_from is not None:
            changes["init_from"] = adapter("init_from", job.init_from)
        reference = job.objective_args.get("reference", "base")
        if isinstance(reference, str) and reference not in ("base", "start"):
            path = adapter("objective_args.reference", reference)
            changes["objective_args"] = job.objective_args | {"reference": path}
        return LocalJob(settings=job.replace(**changes), names=names)

    def _path(self, tenant: str, name: str) -> str:
        with contextlib.suppress(NotFound):
            return str(self._storage.fetch(self.find(tenant, name).id))
        if name in self.shared:
            return self.shared[name]
        shared = ", ".join(self.shared) or "none"
        raise ConfigError(
            f"data.path={name!r:.100} is neither a file that you have uploaded nor a "
            f"data set of this server; its data sets are: {shared}. Upload the file "
            "first: PUT it at uploads/NAME."
        )

    def preview(
        self, job: LocalJob, tokenizer: Tokenizer, num_samples: int
    ) -> list[dict[str, Any]]:
        """Returns the first samples of each data set of a job, as they are trained on.

        Raises:
            JaxloraError: The data cannot be read, or a record cannot be used.
        """
        found, settings = [], job.settings
        with job.named_errors():
            for data in settings.data.sets:
                samples = find_samples(
                    with_kind(data, settings),
                    tokenizer,
                    max_length=settings.max_length,
                    num_samples=num_samples,
                )
                values = [dataclasses.asdict(sample) for sample in samples]
                found.append({"path": job.names[data.path], "samples": values})
        return found


def described(entry: Entry) -> dict[str, Any]:
    """Returns the JSON values that describe an upload."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.created_at))
    name = pathlib.PurePosixPath(entry.id).name
    return {"name": name, "bytes": entry.num_bytes, "created_at": created}


@contextlib.asynccontextmanager
async def _in_threads[T](
    manager: contextlib.AbstractContextManager[T],
) -> AsyncGenerator[T]:
    """Enters and leaves a context in threads, as storing a large file takes long."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        await asyncio.to_thread(
            manager.__exit__, type(error), error, error.__traceback__
        )
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)


def _key(tenant: str, name: str) -> str:
    return f"{tenant}/uploads/{name}"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.120} cannot name an upload. Use letters, digits, '.', '_' and "
            "'-', at most 100, and begin with a letter or digit."
        )
    if (suffix := pathlib.PurePath(name).suffix) not in READERS:
        raise ConfigError(
            f"{name!r} ends with {suffix!r}, by which the form of its records is not "
            f"known. Use one of {', '.join(READERS)}."
        )


def _local_data(data: DataConfig, path_of: Any) -> DataConfig:
    """Returns the settings of data with the paths of named data sets."""
    if data.datasets:
        parts = tuple(_local_data(one, path_of) for one in data.datasets)
        return data.replace(datasets=parts)
    template = data.chat_template
    is_safe = template is None or template in KNOWN or _IS_TEMPLATE.search(template)
    if not is_safe:
        raise ConfigError(
            f"data.chat_template={template!r:.100} must be one of {', '.join(KNOWN)}, "
            "or the text of a template."
        )
    return data.replace(path=path_of(data.path))
