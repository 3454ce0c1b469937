"""The quantized linears of a checkpoint: finds, checks and reads them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from jaxlora.errors import ModelError
from jaxlora.hf.quantized.stored import StorageLayout, StoredTensor, StoredWeight
from jaxlora.hf.tensor_file import FLOATS, STORED, TensorFile
from jaxlora.models.structure import TensorSpec
from jaxlora.pallas_kernels import OPTIONS, WeightOptions

# Scales of activations and of the cache of keys and values. Here, the scales of
# activations follow from each row.
ACTIVATION_SCALES = (
    *("activation_scale", "input_scale", "output_scale"),
    *("q_scale", "k_scale", "v_scale"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLinear:
    """A quantized linear of a checkpoint.

    Attributes:
        name: Hugging Face's name of the module.
        shape: N and K.
        layout: How it is stored.
        tensors: The tensors that it consists of.
        files: The file of each tensor of the checkpoint, by Hugging Face's name.
    """

    name: str
    shape: tuple[int, int]
    layout: StorageLayout
    tensors: tuple[StoredTensor, ...]
    files: Mapping[str, TensorFile]

    @property
    def tensor_names(self) -> list[str]:
        """Hugging Face's names of its tensors."""
        return [f"{self.name}.{tensor.name}" for tensor in self.tensors]

    @property
    def options(self) -> WeightOptions:
        """Options of the weight's format, with those that its tensors show."""
        names = [tensor.name for tensor in self.tensors]
        return OPTIONS[self.layout.format](**self.layout.options(names))

    def check(self) -> None:
        """Checks the names, shapes and dtypes of the tensors.

        Raises:
            ModelError: One is missing, or has another shape or dtype than the layout
                calls for.
        """
        for tensor in self.tensors:
            name = f"{self.name}.{tensor.name}"
            wanted = f"{self.layout.kind} with N, K = {list(self.shape)}"
            file = self.files.get(name)
            if file is None:
                raise ModelError(
                    f"{self.files[f'{self.name}.weight'].path}: {self.name} is "
                    f"quantized, but the checkpoint lacks {name}, which {wanted} calls "
                    "for. Fetch or copy all files again."
                )
            if (found := file.dtype_name(name)) not in tensor.dtypes:
                raise ModelError(
                    f"{file.path}: {name} has dtype {found}; {wanted} calls for "
                    f"{' or '.join(tensor.dtypes)}. Does quantization_config in "
                    "config.json belong to these weights?"
                )
            if not tensor.allows(file.shape(name)):
                shapes = " or ".join(str(list(s)) for s in tensor.shapes) or "a vector"
                raise ModelError(
                    f"{file.path}: {name} has shape {list(file.shape(name))}; {wanted} "
                    f"calls for {shapes}. Does config.json belong to these weights?"
                )

    def read(
        self, check: Callable[[], None] = lambda: None
    ) -> tuple[StoredWeight, dict[str, str]]:
        """Reads the weight, into arrays of the host, and hashes each of its tensors.

        Args:
            check: Called about every 16 MiB; what it raises ends the reading.

        Returns:
            The weight, and the hash of each tensor by Hugging Face's name.

        Raises:
            ModelError: A tensor cannot be read, is not finite, or is not consistent
                with the others.
        """
        arrays, hashes = {}, {}
        for tensor, name in zip(self.tensors, self.tensor_names, strict=True):
            arrays[tensor.name], hashes[name] = self.files[name].read(
                name, dtypes=STORED, check=check
            )
        where = f"{self.files[f'{self.name}.weight'].path}: {self.name}"
        return self.layout.weight(self.shape, arrays, where), hashes


def find_stored_linears(
    layout: StorageLayout | None,
    specs: Iterable[TensorSpec],
    files: Mapping[str, TensorFile],
) -> dict[str, StoredLinear]:
    """Returns the quantized linears of a checkpoint, by our path of the kernel.

    Args:
        layout: How config.json says that they are stored.
        specs: The weights of the linears of the decoder layers.
        files: The file of each tensor, by Hugging Face's name.
    """
    if layout is None:
        return {}
    found = {}
    for spec in specs:
        file = files.get(spec.hf_name)
        if file is None or file.dtype_name(spec.hf_name) in FLOATS:
            continue
        name, (k, n) = spec.hf_name.removesuffix(".weight"), spec.shape
        tensors = layout.tensors((n, k), lambda t, name=name: f"{name}.{t}" in files)
        found[spec.path] = StoredLinear(
            name=name, shape=(n, k), layout=layout, tensors=tensors, files=files
        )
    return found
