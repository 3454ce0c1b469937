"""Joins sites that read the same x, so that the kernels read it once for all."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlora.fuse.kernel_call import inputs_of
from jaxlora.fuse.site import Index, Site


def group_sites(sites: Sequence[Site]) -> tuple[Site, ...]:
    """Joins sites of one jaxpr that have the same x and do not depend on each other."""
    groups: list[Site] = []
    by_input: dict[Any, list[int]] = {}
    for site in sites:
        places = by_input.setdefault(site.x.var, [])
        for place in places:
            joined = _join(groups[place], site)
            if joined is not None:
                groups[place] = joined
                break
        else:
            places.append(len(groups))
            groups.append(site)
    return tuple(groups)


def ungroup(site: Site) -> tuple[Site, ...]:
    """Returns the sites that were joined, one for each linear."""
    return tuple(dataclasses.replace(site, projections=(p,)) for p in site.projections)


def _join(first: Site, second: Site) -> Site | None:
    """Returns both sites as one, or None if one call cannot compute them."""
    names = _same_roles(first, second)
    if names is None or _kind(first) != _kind(second):
        return None
    if first.graph.depends(inputs_of(second), {p.root for p in first.projections}):
        return None
    projections = tuple(_rename(p, names) for p in second.projections)
    return dataclasses.replace(
        first,
        projections=(*first.projections, *projections),
        equations=first.equations | second.equations,
        names=first.names + second.names,
    )


def _kind(site: Site) -> tuple:
    """Returns what the linears of one call must have in common."""
    p = site.projections[0]
    is_transposed = p.w.indices[-1] in site.in_indices
    how = site.implementation, site.block_tokens, site.dtype, site.num_adapters
    return *how, site.keeps_s, p.mask is None, is_transposed


def _same_roles(first: Site, second: Site) -> dict[Index, Index] | None:
    """Returns how to rename the second site's indices; None: it reads x differently."""
    if first.x.var is not second.x.var or len(first.x.indices) != len(second.x.indices):
        return None
    if first.selection is not None or second.selection is not None:
        return None
    names = dict(zip(second.x.indices, first.x.indices, strict=True))
    if any(first.sizes[new] != second.sizes[old] for old, new in names.items()):
        return None
    roles = ("adapter_indices", "row_indices", "in_indices")
    for role in roles:
        renamed = tuple(names.get(i, i) for i in getattr(second, role))
        if renamed != getattr(first, role):
            return None
    return names


def _rename(value: Any, names: dict[Index, Index]) -> Any:
    """Renames the indices in a part of a projection."""
    if isinstance(value, tuple):
        return tuple(_rename_index(part, names) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value))
        return dataclasses.replace(
            value, **{name: _rename(getattr(value, name), names) for name in fields}
        )
    return value


def _rename_index(value: Any, names: dict[Index, Index]) -> Any:
    # All tuples of int hold indices.
    return names.get(value, value) if type(value) is int else _rename(value, names)
