"""A safetensors file whose tensors are read one at a time, hashed and checked."""

import io
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
import safetensors
import xxhash

from jaxlora.common.json_file import check_regular_file, cut, parse_json
from jaxlora.errors import JaxloraError, ModelError

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

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors other names than in the file, from now on."""
        self._header = {names.get(name, name): x for name, x in self._header.items()}

    def split(self, name: str, parts: Sequence[str]) -> None:
        """Divides a tensor X N K into matrices with names of their own, from now on.

        Args:
            name: Name of the tensor, which is forgotten. If it has more dimensions, the
                last ones are one here.
            parts: Names of the matrices, in the order of the tensor's rows; their
                number is a multiple of X.
        """
        entry = self._header.pop(name)
        (x, n, *others), (first, end) = entry["shape"], entry["data_offsets"]
        rows, size = n * x // len(parts), (end - first) // len(parts)
        for i, part in enumerate(parts):
            start = first + i * size
            place = {
                "shape": [rows, math.prod(others)],
                "data_offsets": [start, start + size],
            }
            self._header[part] = entry | place

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

    def array(self, name: str) -> np.ndarray:
        """Reads a whole tensor of floats, without a check for NaN and infinity.

        Raises:
            ModelError: The tensor has another dtype, or cannot be read.
        """
        array = self._empty(name, FLOATS)
        for _ in self._parts(name, array):
            pass
        return array

    def read(
        self,
        name: str,
        *,
        dtypes: Mapping[str, np.dtype] = FLOATS,
        dtype: np.dtype | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[np.ndarray, str]:
        """Reads a tensor, as it is stored, and hashes its bytes with XXH3 (128 bits).

        Args:
            name: Name of the tensor.
            dtypes: Dtypes that it may have.
            dtype: Dtype that it will be cast to; None: it is not cast.
            check: Called about every 16 MiB; what it raises ends the reading.

        Returns:
            The tensor, and its hash in hexadecimal digits.

        Raises:
            ModelError: It cannot be read, has another dtype, or holds NaN, infinity or
                a number that `dtype` cannot hold.
        """
        array = self._empty(name, dtypes)
        digest, peaks = xxhash.xxh3_128(), []
        for part in self._parts(name, array):
            check()
            digest.update(part.view(np.uint8))
            if array.dtype.kind not in "iu":
                peaks.append(largest(part))
        if peaks:
            check_finite(peaks, f"{self.path}: {name}", ModelError, dtype)
        return array, digest.hexdigest()

    def _empty(self, name: str, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
        dtype, shape = self.dtype(name, dtypes), self.shape(name)
        try:
            return np.empty(shape, dtype)
        except ValueError as error:  # an empty tensor beyond NumPy's limits
            raise ModelError(
                f"{self.path}: {name} has shape {shape}: {error}"
            ) from None

    def _parts(self, name: str, array: np.ndarray) -> Iterator[np.ndarray]:
        """Reads a tensor into an array; yields each part of it that is there."""
        values = array.reshape(-1)
        size = _PART_BYTES // array.itemsize
        try:
            file = io.FileIO(self.path)
            file.seek(self._data_start + self.offset(name))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        with file:
            for start in range(0, values.size, size):
                part = values[start : start + size]
                self._fill(file, part)
                yield part

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


# ---- NaN, infinity and overflow ------------------------------------------------------


def largest(array: np.ndarray) -> np.ndarray:
    """Returns the element of largest magnitude; NaN ranks above infinity.

    The bits of floats, read as integers, are ordered like the floats' magnitudes:
    signed integers for positive floats, unsigned ones for negative floats. Comparing
    integers is many times faster than classifying floats, especially bfloat16.
    """
    signed, unsigned = (np.dtype(f"{k}{array.dtype.itemsize}") for k in "iu")
    sign = 2 ** (8 * unsigned.itemsize - 1)
    positive = int(array.view(signed).max(initial=0))
    negative = int(array.view(unsigned).max(initial=0)) & (sign - 1)
    return np.asarray(max(positive, negative), unsigned).view(array.dtype)


def check_finite(
    peaks: np.ndarray | Iterable[np.ndarray],
    where: str,
    kind: type[JaxloraError],
    dtype: np.dtype | None = None,
) -> None:
    """Refuses a tensor that holds NaN or infinity, or would hold them after a cast.

    Args:
        peaks: The tensor itself, or the results of `largest` for its parts.
        where: File and name of the tensor, for the error.
        kind: Class of the error.
        dtype: Dtype that the tensor will be cast to; None: it is not cast.

    Raises:
        JaxloraError: A value is not finite; the error is of class `kind`.
    """
    peak = largest(peaks if isinstance(peaks, np.ndarray) else np.array([*peaks]))
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(peak.astype(np.float64))
        is_kept = dtype is None or np.isfinite(peak.astype(dtype).astype(np.float64))
    if not np.isfinite(value):
        what = "NaN" if np.isnan(value) else "infinity"
        raise kind(
            f"{where} holds {what}, so nothing can be computed with it. The file is "
            "damaged, or what wrote it had diverged: use another copy or checkpoint."
        )
    if not is_kept:
        raise kind(
            f"{where} holds a value of magnitude {value:.4g}, which overflows "
            f"{np.dtype(dtype).name}. Choose a dtype of a wider range."
        )
