"""Joins sites that read the same x, so that the kernels read it once for all."""

import dataclasses
from collections.abc import Hashable, Sequence

from jaxlora.fuse.site import Site


def group_sites(sites: Sequence[Site]) -> tuple[Site, ...]:
    """Joins sites of one jaxpr that have the same x and do not depend on each other."""
    groups: list[Site] = []
    alike: dict[Hashable, list[int]] = {}
    for site in sites:
        places = alike.setdefault(_kind(site), [])
        for place in places:
            first = groups[place]
            if not site.graph.depends(site.inputs, first.roots):
                groups[place] = dataclasses.replace(
                    first,
                    linears=(*first.linears, *site.linears),
                    s_names=first.s_names + site.s_names,
                    y_names=first.y_names + site.y_names,
                )
                break
        else:
            places.append(len(groups))
            groups.append(site)
    return tuple(groups)


def ungroup(site: Site) -> tuple[Site, ...]:
    """Returns the sites that were joined, one for each linear."""
    return tuple(dataclasses.replace(site, linears=(one,)) for one in site.linears)


def _kind(site: Site) -> Hashable:
    """Returns what the linears of one call must have in common."""
    linear = site.first
    if linear.selection is not None:
        return site  # its rows are laid out for it alone
    place = linear.x.indices.index  # of an index among those of x
    roles = (linear.adapter_indices, linear.row_indices, linear.in_indices)
    layout = tuple(tuple((place(i), linear.size_of([i])) for i in r) for r in roles)
    how = site.implementation, site.block_tokens, site.dtype, site.precision
    is_masked = linear.mask is not None
    return linear.x.var, layout, how, site.keeps_s, is_masked, linear.is_transposed
