"""A safetensors file whose tensors are read one at a time, or block by block."""

import io
import math
import pathlib
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import safetensors

from jaxlora.common.json_file import check_regular_file, cut, parse_json
from jaxlora.errors import ModelError

# Dtypes by their names in the file.
FLOATS: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Also those of quantized weights.
STORED: Mapping[str, np.dtype] = {
    **FLOATS,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
# Read at a time. Between parts a thread needs the interpreter lock, for which it may
# wait 5 ms while another thread runs Python, so parts are not small.
_PART_BYTES = 2**24


class TensorFile:
    """One safetensors file.

    `safetensors` checks the file, in particular its size against its header. The
    tensors are read, not memory-mapped: if the file shrinks or the disk fails, a read
    raises an error, whereas a mapping would kill the process.
    """

    def __init__(self, path: pathlib.Path):
        """Opens and checks a file.

        Raises:
            ModelError: The file is missing, unreadable, truncated or not in the
                safetensors format.
        """
        self.path = path
        try:
            check_regular_file(path)
            with safetensors.safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._header = parse_json(file.read(size))
        except FileNotFoundError:
            raise ModelError(f"{path}: there is no such file.") from None
        except OSError as error:
            raise _unreadable(path, error) from error
        except (safetensors.SafetensorError, ValueError) as error:
            raise ModelError(
                f"{path} is damaged or incomplete: {cut(error)}. Fetch or copy it "
                "again."
            ) from error
        self._data_start = 8 + size
        self._header.pop("__metadata__", None)

    def names(self) -> list[str]:
        """Returns the names of the tensors in the file."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self._header[name]["shape"])

    def dtype_name(self, name: str) -> str:
        """Returns the name that the file gives to a tensor's dtype."""
        return self._header[name]["dtype"]

    def dtype(self, name: str, dtypes: Mapping[str, np.dtype] = FLOATS) -> np.dtype:
        """Returns the dtype of a tensor.

        Args:
            name: Name of the tensor.
            dtypes: Dtypes that it may have.

        Raises:
            ModelError: It has another dtype.
        """
        dtype = self.dtype_name(name)
        if dtype not in dtypes:
            raise ModelError(
                f"{self.path}: {name} has dtype {dtype}; wanted one of "
                f"{', '.join(dtypes)}. Only linears of the decoder layers may be "
                "quantized, and only as the quantization_config in config.json says."
            )
        return dtypes[dtype]

    def num_bytes(self, name: str) -> int:
        """Returns the number of bytes of a tensor."""
        first, end = self._header[name]["data_offsets"]
        return end - first

    def offset(self, name: str) -> int:
        """Returns the position of a tensor among the bytes of all tensors."""
        return self._header[name]["data_offsets"][0]

    def array(self, name: str, dtypes: Mapping[str, np.dtype] = FLOATS) -> np.ndarray:
        """Reads a whole tensor.

        Args:
            name: Name of the tensor.
            dtypes: Dtypes that it may have.

        Raises:
            ModelError: The tensor has another dtype, or cannot be read.
        """
        array = self.empty(name, dtypes)
        for _ in self.fill(name, array):
            pass
        return array

    def empty(self, name: str, dtypes: Mapping[str, np.dtype] = FLOATS) -> np.ndarray:
        """Returns an array for a tensor, with arbitrary contents.

        Args:
            name: Name of the tensor.
            dtypes: Dtypes that it may have.

        Raises:
            ModelError: The tensor has another dtype.
        """
        dtype, shape = self.dtype(name, dtypes), self.shape(name)
        try:
            return np.empty(shape, dtype)
        except ValueError as error:  # an empty tensor beyond NumPy's limits
            raise ModelError(
                f"{self.path}: {name} has shape {shape}: {error}"
            ) from None

    def fill(self, name: str, array: np.ndarray) -> Iterator[np.ndarray]:
        """Reads a tensor into an array from `empty`; yields each part that is there.

        Args:
            name: Name of the tensor.
            array: The array.

        Yields:
            Vectors, parts of the array; together they are the array.

        Raises:
            ModelError: The file cannot be read.
        """
        values = array.reshape(-1)
        size = _PART_BYTES // array.itemsize
        with self._at(name) as file:
            for start in range(0, values.size, size):
                part = values[start : start + size]
                self._fill(file, part)
                yield part

    def blocks(self, name: str, num_rows: int) -> Iterator[np.ndarray]:
        """Yields a tensor in blocks of rows; each block is overwritten by the next.

        Args:
            name: Name of the tensor.
            num_rows: Rows of a block; the last may have fewer.

        Raises:
            ModelError: For the same reasons as in `array`.
        """
        shape = self.shape(name) or (1,)
        if math.prod(shape) == 0:
            return
        buffer = np.empty((min(num_rows, shape[0]), *shape[1:]), self.dtype(name))
        with self._at(name) as file:
            for start in range(0, shape[0], len(buffer)):
                block = buffer[: shape[0] - start]
                self._fill(file, block)
                yield block

    def _at(self, name: str) -> io.FileIO:
        try:
            file = io.FileIO(self.path)
            file.seek(self._data_start + self._header[name]["data_offsets"][0])
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return file

    def _fill(self, file: io.FileIO, array: np.ndarray) -> None:
        rest = memoryview(array.reshape(-1).view(np.uint8))
        while rest:
            try:
                count = file.readinto(rest)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if not count:
                raise ModelError(
                    f"{self.path} became shorter while it was read. Fetch or copy it "
                    "again, and leave it alone meanwhile."
                )
            rest = rest[count:]

    def description(self, name: str) -> str:
        """Describes a tensor's dtype and shape, for fingerprints."""
        entry = self._header[name]
        return f"{entry['dtype']}{entry['shape']}"


def _unreadable(path: pathlib.Path, error: OSError) -> ModelError:
    return ModelError(
        f"{path} cannot be read: {error.strerror or error}. Check its permissions and "
        "the disk, or fetch or copy it again."
    )
