"""Reads a tensor of a checkpoint; hashes and checks it on the way."""

from collections.abc import Callable, Mapping

import numpy as np
import xxhash

from jaxlora.errors import ModelError
from jaxlora.hf.magnitude import check_finite, largest
from jaxlora.hf.tensor_file import FLOATS, TensorFile


def read_tensor(
    file: TensorFile,
    name: str,
    *,
    dtypes: Mapping[str, np.dtype] = FLOATS,
    dtype: np.dtype | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, str]:
    """Reads a tensor, as it is stored, and hashes its bytes with XXH3 (128 bits).

    Args:
        file: The file.
        name: Name of the tensor.
        dtypes: Dtypes that it may have.
        dtype: Dtype that it will be cast to; None: it is not cast.
        check: Called about every 16 MiB; what it raises ends the reading.

    Returns:
        The tensor, and its hash in hexadecimal digits.

    Raises:
        ModelError: It cannot be read, has another dtype, or holds NaN, infinity or a
            number that `dtype` cannot hold.
    """
    array = file.empty(name, dtypes)
    digest, peaks = xxhash.xxh3_128(), []
    for part in file.fill(name, array):
        check()
        digest.update(part.view(np.uint8))
        if array.dtype.kind not in "iu":
            peaks.append(largest(part))
    if peaks:
        check_finite(peaks, f"{file.path}: {name}", ModelError, dtype)
    return array, digest.hexdigest()
