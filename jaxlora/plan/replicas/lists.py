"""Lists of replicas for a run with `replicas: auto`, or with sizes that are `auto`.

Replicas differ in their microbatches, large ones for the long samples and small ones,
which short samples fill better, and in the number of devices that share them (axis
`tensor`). These lists are compared:

- replicas of one device, some of which may be smaller than the others;
- each division of the devices into replicas of several devices, of which those of the
  fewest devices may be smaller.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import (
    ReplicaShape,
    describe_list,
    in_order,
    listed,
)
from jaxlora.errors import ConfigError
from jaxlora.models.options import Remat
from jaxlora.plan.mesh.candidates import (
    MARGIN,
    Candidate,
    Search,
    is_divided,
)
from jaxlora.sharding.mesh_sizes import MeshSizes

_HALVINGS = 4  # of the largest microbatches, to the smallest
_CLOSE = 0.9  # a size that is closer to a larger one is not tried


# The largest microbatches that fit on replicas of each number of devices, in ascending
# order.
_Room = dict[int, int]
# A replica of a list whose sizes are still open: its devices, and whether it has small
# microbatches.
_Member = tuple[int, bool]


def fastest_list(search: Search) -> Candidate | None:
    """Returns the list of all devices that is predicted to be fastest.

    Returns:
        The list; None: no replica has the memory for the longest sample.
    """
    found = [
        Candidate(
            plan=search.laid_out(_listed(search, remat, shapes)),
            search=search,
            limit=None,
            most=shapes[0].tokens,
        )
        for remat, room in _rooms(search, _degrees(search)).items()
        for mix in _mixes(search, list(room))
        for shapes in _with_sizes(search, room, mix)
    ]
    return min(found, key=lambda one: one.seconds, default=None)


def with_sizes(search: Search) -> tuple[RunConfig, Note]:
    """Gives listed replicas the largest microbatches that fit, where none is given.

    Returns:
        The run with the replicas, and what they are.

    Raises:
        ConfigError: A replica does not have the memory for any microbatch, or none has
            it for the longest sample.
    """
    given = search.config.replicas
    assert given is not None and given != "auto"
    rooms = _rooms(search, sorted({one.tensor for one in given}))
    if not rooms:
        largest = ReplicaShape(
            tokens=search.alone.bounds.smallest, tensor=max(one.tensor for one in given)
        )
        plan = search.laid_out(_listed(search, search.remats[-1], [largest] * 2))
        one = Candidate(plan=plan, search=search, limit=None, most=0)
        raise one.refusal(
            f"replicas: a replica with tensor={largest.tensor} does not have the "
            "memory for the longest sample. Set mesh: auto in the place of it: "
        )
    remat = max(rooms, key=lambda remat: len(rooms[remat]))  # the weakest of them
    shapes: list[ReplicaShape] = []
    for one in given:
        tokens: int | str | None = one.microbatch_tokens
        if tokens == "auto":
            tokens = rooms[remat].get(one.tensor)
        if tokens is None:
            raise ConfigError(
                f"replicas: a replica with tensor={one.tensor} does not have the "
                "memory for any microbatch. Give it more devices."
            )
        assert isinstance(tokens, int)
        shapes += [ReplicaShape(tokens=tokens, tensor=one.tensor)] * one.count
    text = f"replicas: {describe_list(shapes)}, as many as fit"
    return _listed(search, remat, shapes), Note(text)


# ---- memory --------------------------------------------------------------------------


def _rooms(search: Search, degrees: Sequence[int]) -> dict[Remat, _Room]:
    """Returns what fits with each `remat` that leaves room for the longest sample."""
    rooms, bounds = {}, search.alone.bounds
    for remat in search.remats:
        found = {n: _fitting_tokens(search, remat, n) for n in degrees}
        most = {n: tokens for n, tokens in found.items() if tokens is not None}
        if max(most.values(), default=0) >= bounds.smallest:
            rooms[remat] = most
        if set(found.values()) == {bounds.max_tokens}:
            break  # a stronger one would only take longer
    return rooms


def _fitting_tokens(search: Search, remat: Remat, tensor: int) -> int | None:
    """Returns the largest microbatches of the first replica, which has the most.

    It has the optimizers, and no other replica has larger microbatches. They need not
    hold the longest sample, which may run on another replica.
    """
    bounds = search.alone.bounds
    shape = ReplicaShape(tokens=bounds.max_tokens, tensor=tensor)
    plan = search.laid_out(_listed(search, remat, [shape] * 2))
    limit = search.limit(plan.config, MARGIN)
    bounds = dataclasses.replace(bounds, smallest=bounds.unit)
    return search.largest(plan, bounds, limit)


# ---- lists ---------------------------------------------------------------------------


def _listed(search: Search, remat: Remat, shapes: Sequence[ReplicaShape]) -> RunConfig:
    """Returns the run with these replicas, the largest first."""
    first = in_order(shapes)[0]
    return search.config.replace(
        remat=remat,
        replicas=listed(shapes),
        mesh=str(MeshSizes(tensor=first.tensor)),
        microbatch_tokens=first.tokens,
    )


def _degrees(search: Search) -> list[int]:
    """Returns the numbers of devices that may share each layer, within a host."""
    machine, spec = search.machine, search.alone.spec
    if math.isinf(machine.speed.link_bytes):
        return [1]
    most = machine.num_devices // machine.num_hosts
    powers = [2**n for n in range(most.bit_length())]
    return [n for n in powers if is_divided(spec, n, search.config.block_tokens)]


def sizes(search: Search, most: int) -> list[int]:
    """Returns sizes of microbatches that are tried, the largest first."""
    bounds = search.alone.bounds
    tried = {
        math.ceil(size / 2**n / bounds.unit) * bounds.unit
        for size in (most, bounds.smallest)
        for n in range(_HALVINGS)
    }
    found = [most]
    for size in sorted(tried, reverse=True):
        is_longest = size == bounds.smallest < most
        if is_longest or bounds.sample_tokens / 2 <= size < _CLOSE * found[-1]:
            found.append(size)
    return found


def _mixes(search: Search, degrees: Sequence[int]) -> Iterator[list[_Member]]:
    """Yields the devices of the lists that are compared, the largest replica first."""
    num, least = search.machine.num_devices, min(degrees)
    for mix in _divisions(num, sorted(degrees, reverse=True)):
        if len(mix) > 1:
            yield [(one, one == least < mix[0]) for one in mix]
    if least == 1:
        for count in sorted({2**n for n in range(num.bit_length())} | {num - 1}):
            if count < num:
                yield [(1, False)] * count + [(1, True)] * (num - count)


def _divisions(num: int, degrees: Sequence[int]) -> Iterator[list[int]]:
    """Yields numbers of devices, in descending order, that use all of `num` devices."""
    first, *rest = degrees
    if not rest:
        yield [first] * (num // first)
        return
    for count in range(num // first, -1, -1):
        for others in _divisions(num - count * first, rest):
            yield [first] * count + others


def _with_sizes(
    search: Search, room: _Room, mix: Sequence[_Member]
) -> Iterator[list[ReplicaShape]]:
    """Yields the sizes of a list in which the last replicas may be smaller."""
    (first, _), (last, has_small) = mix[0], mix[-1]
    firsts = [
        tokens
        for tokens in sizes(search, room[first])
        if tokens >= search.alone.bounds.smallest  # holds the longest sample
    ]
    others = sizes(search, room[last]) if has_small else [0]
    for large, small in itertools.product(firsts, others):
        if small < large:
            yield [
                ReplicaShape(
                    tokens=small if is_small else min(large, room[tensor]),
                    tensor=tensor,
                )
                for tensor, is_small in mix
            ]
