"""The table of kernel back ends. A new back end is one entry here and one folder.

Nothing outside this file and the back ends' own folders compares with a back end's
name. Callers look an entry up and read its fields.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.mosaic import layer as mosaic
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction
from jaxlora.pallas_kernels.triton import layer as triton
from jaxlora.pallas_kernels.triton.target import present_target, slow_device
from jaxlora.pallas_kernels.xla import layer as xla


@runtime_checkable
class Forward(Protocol):
    """Computes y [T, N] of each projection, and what its backward pass keeps."""

    def __call__(
        self,
        x: Float[Array, "T K"],
        projections: tuple[Projection, ...],
        layer: Int[Array, " 1"],
        block_adapter: Int[Array, " NB"],
        *,
        w_transposed: bool,
    ) -> tuple[list[jax.Array], Any]:
        """Returns the outputs and any pytree of arrays, which `Backward` gets as s."""
        ...


@runtime_checkable
class Backward(Protocol):
    """Computes the gradients of x and of every projection's trained tensors."""

    def __call__(
        self,
        dy: list[jax.Array],
        x: Float[Array, "T K"],
        projections: tuple[Projection, ...],
        s: Any,
        layer: Int[Array, " 1"],
        block_adapter: Int[Array, " NB"],
        *,
        w_transposed: bool,
    ) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
        """Returns dx [T, K] in x's dtype, and the gradients of each projection.

        These are `a` [G, K, R] and `b` [G, R, N], in float32.
        """
        ...


@runtime_checkable
class Produce(Protocol):
    """Computes a row-wise function, with side products of its results.

    Forward, all projections take its first result x, and their side products are
    `s = factor * dropout(x) A`. With `is_gradient`, result i is the gradient of
    projection i's y, and its side product is `ds = factor * dy B^T`.
    """

    def __call__(
        self,
        function: RowFunction,
        arguments: RowArguments,
        projections: Sequence[Projection],
        block_adapter: Int[Array, " NB"],
        *,
        is_gradient: bool,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the results, [T, K], and s or ds of each projection."""
        ...


@dataclasses.dataclass(frozen=True)
class Producer:
    """Kernels of a back end that compute s beside row-wise functions.

    Its `Forward` also takes `s`, and its `Backward` `ds`, computed before.

    Attributes:
        produce: The kernels.
        unsupported: Returns why they cannot compute such a function here, as a clause
            without a full stop; None if they can. Arrays may be shapes.
    """

    produce: Produce
    unsupported: Callable[..., str | None]


@runtime_checkable
class NormGradient(Protocol):
    """Computes the gradient of a norm, and adds the one that its input has already.

    That is `dh + gradient of dx`, in float32, rounded once.
    """

    def __call__(
        self,
        h: Float[Array, "T D"],
        scale: Float[Array, " D"],
        dx: Float[Array, "T D"],
        dh: Float[Array, "T D"],
        *,
        eps: float,
        offset: bool,
    ) -> Float[Array, "T D"]:
        """Returns the sum in the dtype of h."""
        ...


@dataclasses.dataclass(frozen=True)
class NormBackward:
    """A back end's kernel for the backward pass of norms.

    Attributes:
        gradient: The kernel.
        unsupported: Returns why it does not run here on rows h before a linear with
            the weight w, as a clause without a full stop; None if it does. The rows may
            be their shape, and w None.
    """

    gradient: NormGradient
    unsupported: Callable[..., str | None]


def _nowhere() -> None:
    """The default `slow_device`: the back end is never too slow for `auto`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of `multi_lora_linears`.

    Attributes:
        name: The value of `implementation` that selects it.
        forward: The kernels of the forward pass. Every projection has a rank, and w is
            a stack. The arguments are checked.
        backward: The kernels of the backward pass.
        unsupported: Returns why the back end cannot run a linear of a given shape on
            the default device, as a clause without a full stop; None if it can.
        stores_masks: Whether dropout masks occupy device memory, one byte per element
            of x.
        partitionable: Whether XLA can partition the kernels over a mesh. If not, a
            call on more than one device must be inside `jax.shard_map`.
        reads_transpose: Whether the backward pass on quantized weights that reach it
            multiplies with their transpose: the second copy, or one that it makes each
            time.
        skips_padding: Whether rows of padding take less time than others.
        traced_as: Back end that keeps the same arrays for the backward pass, and can be
            traced where this one's packages or GPU are missing; None: itself.
        producer: What it computes beside row-wise functions; None: nothing.
        norm_backward: How it computes gradients of norms; None: XLA computes them.
        slow_device: Returns why `auto` passes over the back end on the default device
            although it can run there, as such a clause; None if it does not.
    """

    name: str
    forward: Forward
    backward: Backward
    unsupported: Callable[[LinearShape], str | None]
    stores_masks: bool
    partitionable: bool
    reads_transpose: bool = False
    skips_padding: bool = False
    traced_as: str | None = None
    producer: Producer | None = None
    norm_backward: NormBackward | None = None
    slow_device: Callable[[], str | None] = _nowhere

    def why_not(self, unsupported: str | None, *, is_auto: bool) -> str | None:
        """Says why the back end is not taken for some linears; None if it is.

        Args:
            unsupported: Why it cannot run them, as its field `unsupported` says it.
            is_auto: Whether `auto` chooses, which passes over back ends that are slow
                on the default device, rather than a user by name.

        Returns:
            What follows the back end's name in a sentence, without a full stop.
        """
        if unsupported is not None:
            return f"cannot run this: {unsupported}"
        slow = self.slow_device() if is_auto else None
        return None if slow is None else f"is slow here: {slow}"


def _when_traced(module: str, name: str, **given: Callable[[], Any]) -> Callable:
    """Returns a function of a module that is imported when it is called first.

    Most starts of a run load programs that were kept and trace nothing, so they need
    neither MLIR's dialects, which Mosaic imports, nor Triton's optional packages.

    Args:
        module: The module, in this package.
        name: The function.
        **given: Functions whose results it is called with, by parameter.
    """

    def call(*args: Any, **options: Any) -> Any:
        found = importlib.import_module(f"jaxlora.pallas_kernels.{module}")
        more = {key: make() for key, make in given.items()}
        return getattr(found, name)(*args, **options, **more)

    return call


def _table(*backends: Backend) -> dict[str, Backend]:
    return {backend.name: backend for backend in backends}


# In order of preference: `auto` takes the first that supports every linear and is not
# slow on the device.
BACKENDS: dict[str, Backend] = _table(
    Backend(
        name="mosaic",
        forward=_when_traced("mosaic.passes", "forward"),
        backward=_when_traced("mosaic.passes", "backward"),
        unsupported=mosaic.unsupported,
        producer=Producer(
            _when_traced("mosaic.producers", "produce_for"),
            mosaic.unsupported_producer,
        ),
        norm_backward=NormBackward(
            _when_traced("mosaic.norm_gradient", "norm_gradient"),
            mosaic.unsupported_norm_gradient,
        ),
        stores_masks=False,
        partitionable=False,
        reads_transpose=True,
        skips_padding=True,
    ),
    Backend(
        name="triton",
        forward=_when_traced("triton.passes", "forward", target=present_target),
        backward=_when_traced("triton.passes", "backward", target=present_target),
        unsupported=triton.unsupported,
        slow_device=slow_device,
        stores_masks=False,
        partitionable=False,
        skips_padding=True,
        traced_as="mosaic",
    ),
    Backend(
        name="xla",
        forward=xla.forward,
        backward=xla.backward,
        unsupported=xla.unsupported,
        stores_masks=True,
        partitionable=True,
    ),
)


def is_partitioned(mesh: Any) -> bool:
    """Tells whether arrays on an abstract mesh are split by XLA or by their types."""
    return not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual


def get_backend(name: str) -> Backend:
    """Returns the back end of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in BACKENDS:
        raise ValueError(
            f"implementation={name!r} is unknown. Use one of: {', '.join(BACKENDS)}."
        )
    return BACKENDS[name]
