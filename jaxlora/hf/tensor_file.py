"""A safetensors file as memory-mapped arrays: nothing is read before it is used."""

import functools
import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors

from jaxlora.errors import ModelError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class TensorFile:
    """One safetensors file.

    `safetensors` checks the file; the arrays are views of the mapped file, which it
    does not offer for bfloat16 in NumPy without a copy.
    """

    def __init__(self, path: pathlib.Path):
        """Opens and checks a file.

        Raises:
            ModelError: The file is missing, truncated or no safetensors file.
        """
        self.path = path
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except FileNotFoundError:
            raise ModelError(f"{path}: there is no such file.") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} is damaged or incomplete: {error}. Fetch or copy it again."
            ) from error
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(size))
            self._data_start = 8 + size
        self._header.pop("__metadata__", None)

    def names(self) -> list[str]:
        """The tensors in the file."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._header[name]["shape"])

    def array(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the mapped file.

        Raises:
            ModelError: Its dtype is no float that can be trained on.
        """
        entry = self._header[name]
        if entry["dtype"] not in _DTYPES:
            raise ModelError(
                f"{self.path}: {name} has dtype {entry['dtype']}; wanted one of "
                f"{', '.join(_DTYPES)}. Quantised checkpoints are not supported."
            )
        start, end = entry["data_offsets"]
        raw = self._bytes[self._data_start + start : self._data_start + end]
        return raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def edges(self, name: str, num_bytes: int = 4096) -> bytes:
        """The first and last bytes of a tensor."""
        start, end = (
            self._data_start + at for at in self._header[name]["data_offsets"]
        )
        first = self._bytes[start : min(end, start + num_bytes)]
        return (
            first.tobytes() + self._bytes[max(start, end - num_bytes) : end].tobytes()
        )

    def description(self, name: str) -> str:
        """A tensor's dtype and shape, for fingerprints."""
        entry = self._header[name]
        return f"{entry['dtype']}{entry['shape']}"

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, mode="r")
