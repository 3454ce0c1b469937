"""The sizes of a site, on which alone its predicted time depends."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import Factor, Index
from jaxlora.fuse.site import Linear, Site

_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_QUANTIZED_BYTES = 1  # of the elements of codes, at most


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """A product of arrays that the function leaves apart and the kernels read as one.

    A or B may have several factors, or one that all adapters share, as the kernels read
    one of each adapter. A weight may have scales.

    Attributes:
        role: `a`, `b` or `w`.
        linear: Number of the linear of which it is the only A, B or W; -1: it is one of
            several.
        num_factors: Number of arrays that are multiplied.
        num_bytes: Bytes of the factors and of their product.
        is_trained: Whether the factors may be trained.
    """

    role: str
    linear: int
    num_factors: int
    num_bytes: float
    is_trained: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SiteShape:
    """The sizes of linears with adapters that share x.

    Attributes:
        tokens: T, the rows of all adapters.
        in_features: K.
        out_features: N of each linear.
        ranks: Rank of each linear's branches together.
        adapters: G.
        dtype: Name of the dtype of x and W.
        masks: Number of different dropout masks.
        draws_masks: Whether the function draws the random bits of the masks itself.
        bias: Whether a linear has a bias.
        scales: Arrays that multiply the sums of the linears.
        formed: Products of several arrays that the kernels read as one.
    """

    tokens: int
    in_features: int
    out_features: tuple[int, ...]
    ranks: tuple[int, ...]
    adapters: int = 1
    dtype: str = "bfloat16"
    masks: int = 0
    draws_masks: bool = False
    bias: bool = False
    scales: int = 0
    formed: tuple[Formed, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x and W."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(self.ranks)

    @classmethod
    def of(cls, site: Site) -> "SiteShape":
        """Returns the sizes of a site."""
        formed = [
            one
            for number, linear in enumerate(site.linears)
            for one in _formed(site.graph, linear, number)
        ]
        return cls(
            tokens=site.num_tokens,
            in_features=site.first.in_features,
            out_features=tuple(p.out_features for p in site.linears),
            ranks=tuple(p.rank for p in site.linears),
            adapters=site.first.num_adapters,
            dtype=site.dtype.name,
            masks=len(site.masks),
            draws_masks=draws_masks(site),
            bias=any(p.bias is not None for p in site.linears),
            scales=sum(len(p.scales) for p in site.linears),
            formed=tuple(dict.fromkeys(formed)),
        )


def draws_masks(site: Site) -> bool:
    """Returns whether the function draws the random bits of a site's masks itself."""

    def is_random(var: core.Var) -> bool:
        eqn = site.graph.equation(var)
        return eqn is not None and eqn.primitive.name in _RANDOM

    return any(map(is_random, site.graph.ancestors(site.masks, stops=is_random)))


def _formed(graph: Graph, p: Linear, number: int) -> Iterator[Formed]:
    """Yields the products that the kernels of a linear need.

    What the function multiplies itself costs as much before as after, and is left out.
    """
    slots = p.table_indices
    for branch in p.branches:
        ends = {
            "a": (branch.a, (*slots, *p.in_indices, *branch.rank_indices)),
            "b": (branch.b, (*slots, *branch.rank_indices, *p.out_indices)),
        }
        for role, (factors, result) in ends.items():
            held = {i for f in factors for i in f.indices}
            arrays = {f.var for f in factors if isinstance(f.var, core.Var)}
            matrices = {f.var for f in factors if len(f.indices) > 1}
            if len(factors) == 1 and held.issuperset(slots):
                continue
            if any(matrices <= product <= arrays for product in branch.products):
                continue
            yield Formed(
                role=role,
                linear=number if len(p.branches) == 1 else -1,
                num_factors=len(factors),
                num_bytes=_num_bytes(p, factors, result),
            )
    if p.w_scales:
        yield Formed(
            role="w",
            linear=number,
            num_factors=1 + len(p.w_scales),
            num_bytes=_num_bytes(
                p, (p.w, *p.w_scales), (*p.in_indices, *p.out_indices)
            ),
            is_trained=any(_may_be_trained(graph, p.w, s) for s in p.w_scales),
        )


def _num_bytes(p: Linear, factors: Sequence[Factor], result: Sequence[Index]) -> float:
    """Returns the bytes of arrays and of their product."""
    read = sum(p.size_of(f.indices) * f.dtype.itemsize for f in factors)
    written = jnp.result_type(*(f.dtype for f in factors)).itemsize
    return read + p.size_of(result) * written


def _may_be_trained(graph: Graph, w: Factor, scale: Factor) -> bool:
    """Returns whether the caller may train a scale, which a function cannot know.

    The scales of codes are not trained, nor are constants and stopped gradients.
    """
    has_several_inputs = lambda var: len(graph.equation(var).invars) != 1
    for var in graph.ancestors([w.var], stops=has_several_inputs):
        if var.aval.dtype.itemsize <= _QUANTIZED_BYTES:
            return False
    is_stopped = lambda var: graph.equation(var).primitive.name == "stop_gradient"
    inputs = set(graph.jaxpr.invars)
    return any(v in inputs for v in graph.ancestors([scale.var], stops=is_stopped))
