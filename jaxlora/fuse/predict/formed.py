"""Products of arrays that the kernels read as one array: A, B, and weights with scales.

An A or B that all adapters share is one too, as the kernels read one of each adapter. A
function may multiply x by the factors one after the other. The kernels need their
product, which costs time that depends on the factors' sizes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxlora.fuse.site import Branch, Index, Operand, Site, SiteProjection

_ROWS = -1  # the label of the rows of x
_QUANTIZED_BYTES = 1  # of the elements of codes, at most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """A product of several arrays, which the kernels read as one.

    Attributes:
        role: `a`, `b` or `w`.
        linear: Number of the linear of which it is the only A, B or W; -1: it is one of
            several.
        factors: The labels of the dimensions of each factor.
        dtypes: Names of the factors' dtypes.
        result: The labels of the adapters, of the input and of the output features.
        sizes: The size of each label.
        is_written: Whether the function computes the product itself.
        is_trained: Whether the factors may be trained.
    """

    role: str
    linear: int
    factors: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    result: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    is_written: bool = False
    is_trained: bool = True

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """The factors' shapes and dtypes."""
        return [
            jax.ShapeDtypeStruct(self.shape(labels), dtype)
            for labels, dtype in zip(self.factors, self.dtypes, strict=True)
        ]

    def shape(self, labels: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of labels."""
        return tuple(self.sizes[label] for label in labels)

    def product(self, arrays: Sequence[Any]) -> Any:
        """Multiplies the factors; returns [adapters, inputs, outputs].

        What all adapters share is copied for each.
        """
        wanted = tuple(i for labels in self.result for i in labels)
        first, *rest = zip(arrays, self.factors, strict=True)
        product = _chain(*first, rest, wanted)
        held = {i for labels in self.factors for i in labels}
        if not held.issuperset(wanted):
            sizes = [self.sizes[i] if i in held else 1 for i in wanted]
            copies = jnp.ones(self.shape(wanted), product.dtype)
            product = product.reshape(sizes) * copies
        return product.reshape([math.prod(self.shape(g)) for g in self.result])

    def applied(self, x: Any, arrays: Sequence[Any]) -> Any:
        """Multiplies x [adapters, rows, inputs] by the factors, one after the other."""
        slots, inputs, outputs = self.result
        rows = x.shape[1]
        value = x.reshape(*self.shape(slots), rows, *self.shape(inputs))
        pairs = list(zip(arrays, self.factors, strict=True))
        wanted = (*slots, _ROWS, *outputs)
        result = _chain(value, (*slots, _ROWS, *inputs), pairs, wanted)
        return result.reshape(x.shape[0], rows, -1)


def _chain(
    value: Any,
    labels: Sequence[int],
    factors: Sequence[tuple[Any, Sequence[int]]],
    wanted: Sequence[int],
) -> Any:
    """Multiplies a value by factors, and sums over a label as soon as it can.

    Scales are multiplied where the value is small, so that times are no overestimates.
    """
    left = list(factors)
    while left:
        place = min(range(len(left)), key=lambda i: _growth(labels, left[i][1]))
        array, held = left.pop(place)
        later = {*wanted, *(i for _, other in left for i in other)}
        both = dict.fromkeys((*labels, *held))
        if {*both} <= later:
            value, labels = _times(value, labels, array, held)
            continue
        kept = [i for i in both if i in later]
        names = {label: number for number, label in enumerate(both)}
        value = jnp.einsum(
            value,
            [names[i] for i in labels],
            array,
            [names[i] for i in held],
            [names[i] for i in kept],
        )
        labels = kept
    order = [i for i in wanted if i in labels]
    return value.transpose([list(labels).index(i) for i in order])


def _growth(labels: Sequence[int], held: Sequence[int]) -> tuple[int, bool]:
    """Orders factors: scales of what there is come first, those far from it last."""
    return len({*held} - {*labels}), not {*held} & {*labels}


def _times(
    value: Any, labels: Sequence[int], array: Any, held: Sequence[int]
) -> tuple[Any, list[int]]:
    """Multiplies without a sum, which XLA computes element by element."""
    extra = [i for i in held if i not in labels]
    value = value.reshape(*value.shape, *[1] * len(extra))
    labels = [*labels, *extra]
    order = sorted(range(len(held)), key=lambda axis: labels.index(held[axis]))
    sizes = {label: array.shape[axis] for axis, label in enumerate(held)}
    array = array.transpose(order).reshape([sizes.get(i, 1) for i in labels])
    return value * array, labels


def formed_of(site: Site) -> tuple[Formed, ...]:
    """Returns the products that the kernels of a site need."""
    found = []
    for number, p in enumerate(site.projections):
        found += _of_projection(site, p, number)
    return tuple(dict.fromkeys(found))


def _of_projection(site: Site, p: SiteProjection, number: int) -> Iterator[Formed]:
    slots = site.adapter_indices
    if site.selection is not None:
        slots = site.selection.table_indices
    place = number if len(p.branches) == 1 else -1
    for branch in p.branches:
        ends = {
            "a": (slots, site.in_indices, branch.rank_indices),
            "b": (slots, branch.rank_indices, p.out_indices),
        }
        for role, operands in (("a", branch.a), ("b", branch.b)):
            held = {i for o in operands for i in o.indices}
            if len(operands) > 1 or not held.issuperset(slots):
                written = _is_written(branch, operands)
                made = _formed(site, operands, ends[role])
                yield made(role=role, linear=place, is_written=written)
    if p.w_scales:
        made = _formed(site, (p.w, *p.w_scales), ((), site.in_indices, p.out_indices))
        trained = any(_may_be_trained(site, p.w, scale) for scale in p.w_scales)
        yield made(role="w", linear=number, is_trained=trained)


def _formed(
    site: Site, operands: Sequence[Operand], result: Sequence[Sequence[Index]]
) -> Callable[..., Formed]:
    """Returns what makes a product, whose labels are numbered as they occur."""
    groups = (*result, *(o.indices for o in operands))
    labels = {i: n for n, i in enumerate(dict.fromkeys(i for g in groups for i in g))}
    numbered = lambda indices: tuple(labels[i] for i in indices)

    def make(**fields: Any) -> Formed:
        return Formed(
            factors=tuple(numbered(o.indices) for o in operands),
            dtypes=tuple(o.dtype.name for o in operands),
            result=tuple(numbered(indices) for indices in result),
            sizes=tuple(site.sizes[i] for i in labels),
            **fields,
        )

    return make


def _is_written(branch: Branch, operands: Sequence[Operand]) -> bool:
    """Tells whether the function multiplies the matrices among some arrays itself."""
    arrays = {o.var for o in operands if isinstance(o.var, core.Var)}
    matrices = {o.var for o in operands if len(o.indices) > 1}
    return any(matrices <= product <= arrays for product in branch.products)


def _may_be_trained(site: Site, w: Operand, scale: Operand) -> bool:
    """Tells whether the caller may train a scale, which a function cannot know.

    The scales of codes are not trained, nor are constants and stopped gradients.
    """
    writers: dict[Any, Any] = {v: eqn for eqn in site.jaxpr.eqns for v in eqn.outvars}
    codes: Any = w.var
    while codes.aval.dtype.itemsize > _QUANTIZED_BYTES:
        eqn = writers.get(codes)
        if eqn is None or len(eqn.invars) != 1:
            break
        (codes,) = eqn.invars
    else:
        return False
    todo, inputs = [scale.var], set(site.jaxpr.invars)
    seen: set[Any] = set()
    while todo:
        var = todo.pop()
        if isinstance(var, core.Literal) or var in seen:
            continue
        seen.add(var)
        if var in inputs:
            return True
        eqn = writers.get(var)
        if eqn is not None and eqn.primitive.name != "stop_gradient":
            todo += eqn.invars
    return False
