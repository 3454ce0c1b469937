"""Sends the adapter of a job as one file, which is made while it is sent."""

import pathlib
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any, Literal

from jaxlora._version import __version__
from jaxlora.adapters.files.base_name import run_base
from jaxlora.adapters.files.export_record import read_export
from jaxlora.adapters.files.model_card import model_card, write_card
from jaxlora.adapters.files.tokenizer_copy import (
    COPIED,
    TokenizerCopy,
    template_settings,
)
from jaxlora.data.templates.known import find_template
from jaxlora.hf.files import tokenizer_files
from jaxlora.hf.load import FrozenModel
from jaxlora.models.structure import linear_names, module_prefix
from jaxlora.serve.jobs.record import Job
from jaxlora.train.saved.export import card_figures

Format = Literal["zip", "tar"]

_CHUNK_BYTES = 2**20


def adapter_archive(
    folder: pathlib.Path, job: Job, model: FrozenModel, form: Format
) -> Iterator[bytes]:
    """Yields an archive of a PEFT folder, with a model card and the tokenizer.

    Args:
        folder: The folder.
        job: The job whose adapter it has; its name is that of the folder in the file.
        model: The base model.
        form: Form of the archive. Its files are not compressed, as weights hardly are.
    """
    with tempfile.TemporaryDirectory() as place:
        more = pathlib.Path(place)
        _write_beside(more, folder, job, model)
        files = [path for one in (folder, more) for path in sorted(one.iterdir())]
        named = {f"{job.name}/{path.name}": path for path in files}
        yield from _zip(named) if form == "zip" else _tar(named)


def _write_beside(
    more: pathlib.Path, folder: pathlib.Path, job: Job, model: FrozenModel
) -> None:
    """Writes the model card, and the tokenizer with the job's chat template."""
    data = job.settings.data.model_dump(mode="json")
    settings = template_settings(data)
    template = find_template(settings[0]) if settings else None
    TokenizerCopy(folder=model.folder, template=template).write(more)
    export = read_export(folder)
    step = job.progress.step if export is None else export.record.step
    card = model_card(
        name=job.name,
        base=run_base(model.source, model.revision),
        job=job.settings.model_dump(mode="json"),
        figures=card_figures(step, job.progress),
        has_tokenizer=bool(tokenizer_files(model.folder, COPIED)),
        is_part=module_prefix(linear_names(model.config)) != "model.",
        version=__version__,
    )
    write_card(more, card)


def _zip(files: dict[str, pathlib.Path]) -> Iterator[bytes]:
    made: Any = _Written()
    # `_Written` has no `seek`, so the archive is written from beginning to end.
    with zipfile.ZipFile(made, "w") as archive:
        for name, path in files.items():
            info = zipfile.ZipInfo.from_file(path, name)
            with archive.open(info, "w", force_zip64=True) as out:
                for chunk in _chunks(path):
                    out.write(chunk)
                    yield made.take()
    yield made.take()


class _Written:
    """Holds bytes that were written until they are taken."""

    def __init__(self):
        self._parts: list[bytes] = []

    def write(self, data: bytes, /) -> int:
        """Takes bytes from the archive."""
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> object:
        """Does nothing."""

    def take(self) -> bytes:
        """Returns the bytes since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _tar(files: dict[str, pathlib.Path]) -> Iterator[bytes]:
    for name, path in files.items():
        header = tarfile.TarInfo(name)
        header.size, header.mtime = path.stat().st_size, path.stat().st_mtime
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield from _chunks(path)
        yield bytes(-header.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _chunks(path: pathlib.Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
