"""The sizes of a device mesh, written as words such as `stage=2,fsdp=2`; no JAX."""

import dataclasses
import math
import re

AXES = ("data", "stage", "fsdp", "expert", "tensor")
ONE_DEVICE = "fsdp=1"

_EXAMPLES = "fsdp=4, or stage=2,tensor=2; one device is fsdp=1"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    """The number of devices along each axis of a mesh; the default is one device.

    Attributes:
        data: Replicas of the whole pipeline.
        stage: Pipeline stages; each holds a range of the layers.
        fsdp: Devices that share the base weights of one stage of one replica, and have
            microbatches of their own.
        expert: Devices that share the experts of each layer, and have microbatches of
            their own.
        tensor: Devices that share the heads, the features of the MLP and the vocabulary
            of one microbatch.

    Raises:
        ValueError: A size is not positive.
    """

    data: int = 1
    stage: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(
                    f"{axis}={size} is not a positive whole number. Give the number "
                    f"of devices along the axis {axis}, such as {axis}=2."
                )

    @classmethod
    def parse(cls, words: str) -> "MeshSizes":
        """Reads sizes such as `stage=2,fsdp=2`, in any order; absent axes have size 1.

        Raises:
            ValueError: There is no word, a word is not `axis=number`, its axis does not
                exist or is given twice, or its number is not positive.
        """
        if not words.strip():
            raise ValueError(f"the mesh is empty. Give its sizes, such as {_EXAMPLES}.")
        sizes: dict[str, int] = {}
        for word in words.split(","):
            axis, size = _parse_word(word.strip())
            if axis in sizes:
                raise ValueError(
                    f"the mesh {words!r} gives a size for {axis} twice. Keep one of "
                    "the two words."
                )
            sizes[axis] = size
        return cls(**sizes)

    def __str__(self) -> str:
        """Returns the words for these sizes, which `parse` reads."""
        sizes = ((axis, getattr(self, axis)) for axis in AXES)
        return ",".join(f"{axis}={n}" for axis, n in sizes if n > 1) or ONE_DEVICE

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole mesh."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def num_lanes(self) -> int:
        """Number of microbatches that each pipeline stage runs at the same time."""
        return self.data * self.fsdp * self.expert

    def check_fits(self, num_devices: int) -> None:
        """Checks that a machine has enough devices.

        Raises:
            ValueError: It has fewer than the mesh needs.
        """
        if self.num_devices <= num_devices:
            return
        sizes = [n for n in (getattr(self, axis) for axis in AXES) if n > 1]
        product = " x ".join(map(str, sizes))
        if len(sizes) > 1:
            product += f" = {self.num_devices}"
        raise ValueError(
            f"the mesh {self} needs {product} devices and this machine has "
            f"{num_devices}: make one of its sizes smaller, or run it where there are "
            "more devices."
        )


def _parse_word(word: str) -> tuple[str, int]:
    axis, equals, number = (part.strip() for part in word.partition("="))
    if not equals:
        raise ValueError(
            f"the mesh has the word {word!r}, which is not axis=number. Give sizes "
            f"such as {_EXAMPLES}."
        )
    if axis not in AXES:
        raise ValueError(
            f"the mesh has the word {word!r}, but there is no axis {axis!r}. The axes "
            f"are {', '.join(AXES)}."
        )
    if not re.fullmatch("0*[1-9][0-9]{0,8}", number):
        raise ValueError(
            f"the mesh has the word {word!r:.80}, but {number!r:.20} is not a positive "
            "whole number of devices of a machine. Give the number along the axis "
            f"{axis}, such as {axis}=2."
        )
    return axis, int(number)
