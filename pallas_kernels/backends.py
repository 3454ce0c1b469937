"""The table of kernel back ends. A new back end is one entry here and one folder.

Nothing outside this file and the back ends' own folders compares with a back end's
name. Callers look an entry up and read its fields.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.expert_rows import RowPlan
from jaxlora.pallas_kernels.mosaic import support as mosaic
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.triton import target as triton
from jaxlora.pallas_kernels.xla import layer as xla


@runtime_checkable
class Forward(Protocol):
    """Computes y [T, N] of each projection, and what its backward pass keeps.

    The layer is the index of w in its stack, [1]. With the rows of experts in the place
    of block_adapter, it is the expert of each tile.
    """

    def __call__(
        self,
        x: Float[Array, "T K"],
        projections: tuple[Projection, ...],
        layer: Int[Array, " _"],
        block_adapter: Int[Array, " NB"] | RowPlan,
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
        layer: Int[Array, " _"],
        block_adapter: Int[Array, " NB"] | RowPlan,
        *,
        w_transposed: bool,
    ) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
        """Returns dx [T, K] in x's dtype, and the gradients of each projection.

        These are `a` [G, K, R] and `b` [G, R, N], in float32. Back ends of experts also
        take `row_weights`, [T]: then these two are the gradients of a function of
        `row_weights * y`, and dx is that of y itself, as dy is.
        """
        ...


def _nowhere(*_: Any, **__: Any) -> None:
    """The default answer to where a back end is too slow, or lacks a kernel."""


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
        is_plain: Whether it is plain JAX, which XLA fuses with what is around it and
            which follows JAX's settings of precision.
        stores_masks: Whether dropout masks occupy device memory, one byte per element
            of x.
        partitionable: Whether XLA can partition the kernels over a mesh. If not, a
            call on more than one device must be inside `jax.shard_map`.
        reads_transpose: Whether the backward pass on quantized weights that reach it
            multiplies with their transpose: the second copy, or one that it makes each
            time.
        skips_padding: Whether rows of padding take less time than others.
        shares_blocks: Whether adapters of few ranks can share blocks of experts' rows.
        traced_as: Back end that keeps the same arrays for the backward pass, and can be
            traced where this one's packages or GPU are missing; None: itself.
        produce: Computes a row-wise function with side products of its results, as
            `produce(function, arguments, projections, block_adapter, is_gradient=)`.
            Forward, all projections take its first result x, and their side products
            are `s = factor * dropout(x) A`. With `is_gradient`, result i is the
            gradient of projection i's y, and its side product `ds = factor * dy B^T`.
            Returns the results, [T, K], and s or ds of each projection, which
            `forward` and `backward` then also take by these names. None: it has no
            such kernels.
        unsupported_producer: Returns why `produce` cannot compute such a function here,
            as a clause without a full stop; None if it can. It has the arguments of
            `produce` but for block_adapter, and arrays may be shapes.
        gather: Computes the rows of `gather_rows`, [S, K], and s of the linears of
            experts that take them, as `gather(x, projections, plan, is_gradient=)`.
            With `is_gradient`, x is the gradient of the linears' combined rows, and s
            is ds. None: it has no such kernel.
        unsupported_gather: Returns why `gather` cannot serve some linears here, as such
            a clause; None if it can.
        norm_gradient: Computes the gradient of a norm and adds the one that its input
            has already, as `norm_gradient(h, scale, dx, dh, eps=, offset=)`; see
            producers.py. None: XLA computes it.
        unsupported_norm_gradient: Returns why it does not run here on rows h before a
            linear with the weight w, as such a clause; None if it does. The rows may be
            their shape, and w None.
        slow_device: Returns why `auto` passes over the back end on the default device
            although it can run there, as such a clause; None if it does not.
    """

    name: str
    forward: Forward
    backward: Backward
    unsupported: Callable[[LinearShape], str | None]
    stores_masks: bool
    partitionable: bool
    is_plain: bool = False
    reads_transpose: bool = False
    skips_padding: bool = False
    shares_blocks: bool = False
    traced_as: str | None = None
    produce: Callable[..., tuple[list[jax.Array], list[jax.Array]]] | None = None
    unsupported_producer: Callable[..., str | None] = _nowhere
    gather: Callable[..., tuple[jax.Array, list[jax.Array]]] | None = None
    unsupported_gather: Callable[..., str | None] = _nowhere
    norm_gradient: Callable[..., jax.Array] | None = None
    unsupported_norm_gradient: Callable[..., str | None] = _nowhere
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
        forward=_when_traced("mosaic.layer", "forward"),
        backward=_when_traced("mosaic.layer", "backward"),
        unsupported=mosaic.unsupported,
        produce=_when_traced("mosaic.layer", "produce_beside"),
        unsupported_producer=mosaic.unsupported_producer,
        # Mosaic copies consecutive rows only.
        gather=_when_traced("triton.gather", "gather", target=triton.present_target),
        unsupported_gather=triton.unsupported_gather,
        norm_gradient=_when_traced("mosaic.norm_gradient", "norm_gradient"),
        unsupported_norm_gradient=mosaic.unsupported_norm_gradient,
        stores_masks=False,
        partitionable=False,
        reads_transpose=True,
        skips_padding=True,
        shares_blocks=True,
    ),
    Backend(
        name="triton",
        forward=_when_traced("triton.layer", "forward", target=triton.present_target),
        backward=_when_traced("triton.layer", "backward", target=triton.present_target),
        unsupported=triton.unsupported,
        slow_device=triton.slow_device,
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
        shares_blocks=True,
        is_plain=True,
    ),
)


def is_partitioned(mesh: Any) -> bool:
    """Whether arrays on an abstract mesh are split by XLA or by their types."""
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
