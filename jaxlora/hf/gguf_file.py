"""Reads a GGUF file: its fields as plain values, and its tensors one at a time."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from jaxlora.common.json_file import cut
from jaxlora.errors import ModelError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """One GGUF file.

    Attributes:
        path: Path of the file.
        fields: Metadata, by key.
        tensors: Tensors as the `gguf` package reads them, by name.
    """

    path: pathlib.Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, rows first."""
        return tuple(int(size) for size in self.tensors[name].shape[::-1])

    def array(self, name: str) -> np.ndarray:
        """Returns a tensor in float32, dequantised if necessary.

        Raises:
            ModelError: The kind of quantization is not supported.
        """
        import gguf

        tensor = self.tensors[name]
        try:
            with np.errstate(all="ignore"):
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
                return values.astype(np.float32).reshape(self.shape(name))
        # The package passes on any error of NumPy and of its own tables.
        except Exception as error:
            raise ModelError(
                f"{self.path}: {name} cannot be expanded from "
                f"{tensor.tensor_type.name}: {error}."
            ) from error


def open_gguf(path: str | pathlib.Path) -> GgufFile:
    """Opens a GGUF file.

    Raises:
        ModelError: The `gguf` package is missing, or the file is damaged.
    """
    path = pathlib.Path(path)
    try:
        reader_class = _reader_class()
    except ImportError:
        raise ModelError(
            "reading GGUF files needs the gguf package: pip install 'jaxlora[gguf]'."
        ) from None
    try:
        if not path.is_file():
            raise ModelError(f"{path}: there is no such file.")
        reader = reader_class(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except ModelError:
        raise
    # The package may raise any error on a damaged file.
    except Exception as error:
        raise ModelError(
            f"{path} is not a readable GGUF file: {cut(error)}. Fetch or copy it again."
        ) from error
    return GgufFile(
        path=path, fields=fields, tensors={t.name: t for t in reader.tensors}
    )


@functools.cache
def _reader_class() -> type:
    import gguf

    class Reader(gguf.GGUFReader):
        """The package's reader, with a check for the end of the file.

        The package reads nothing beyond the end of a file without noticing it, so a
        damaged count would let its lists grow without bound.
        """

        def _get(self, offset, dtype, count=1, override_order=None):
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(
                    f"it has {len(self.data)} bytes, and says to have {end} or more"
                )
            return super()._get(offset, dtype, count, override_order)

    return Reader
