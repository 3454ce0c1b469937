"""Chooses what is `auto` in a run: mesh or replicas, `remat`, capacity and storage."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import describe_list
from jaxlora.errors import ConfigError
from jaxlora.models.tensor_parallel import divides_experts
from jaxlora.pallas_kernels import get_backend
from jaxlora.plan.memory.capacity import check_resident, describe_capacity
from jaxlora.plan.memory.device_memory import format_bytes
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.mesh.candidates import (
    MARGIN,
    UNCHECKED_TOKENS,
    Candidate,
    Search,
    is_divided,
)
from jaxlora.plan.replicas.lists import fastest_list, with_sizes
from jaxlora.plan.run_plan import RunPlan
from jaxlora.sharding.mesh_sizes import ONE_DEVICE, MeshSizes

# Meshes that are this close to the fastest one count as equally fast, because the
# prediction is not more exact.
_TOLERANCE = 1.02
_GAIN = 1.02  # a list of replicas is taken only if it is this much faster than a mesh


def choose(search: Search, on_accepted: Callable[[], None] = lambda: None) -> RunPlan:
    """Returns the plan that is predicted to be fastest among those that fit.

    Each mesh and `remat` has the capacity that is predicted to be fastest with it. Of
    meshes that are about equally fast, the simplest is chosen: the one with the fewest
    devices, then with the fewest that share a microbatch, then with the fewest stages,
    and then with the fewest shards.

    Args:
        search: The run, and the machine.
        on_accepted: Is called when a run on one device can no longer be refused; only
            estimates follow.

    Raises:
        ConfigError: The run does not fit; or `remat` is `auto` and the device does not
            report its memory.
    """
    config, notes = search.config, []
    if config.remat == "auto" and search.machine.memory is None:
        raise ConfigError(
            "remat: auto needs the size of the device's memory, which its allocator "
            "does not report (XLA_PYTHON_CLIENT_ALLOCATOR chooses the allocator). Give "
            "none, elementwise, mlp or layer for remat."
        )
    if config.mesh == "auto" or config.replicas == "auto":
        chosen, why = _fastest_place(search)
        notes.append(why)
    else:
        if config.has_open_replicas:
            config, why = with_sizes(search)
            notes.append(why)
        chosen = _on_given(search, config, on_accepted)
    notes += _remat_notes(chosen)
    chosen, storage = _with_fastest_storage(chosen)
    notes += [*storage, *_capacity_notes(chosen)]
    bounds = chosen.plan.bounds
    if config.remat == "auto":
        bounds = dataclasses.replace(bounds, remats=search.remats)
    if bounds.fixed is None and chosen.sizes.num_devices > 1:
        bounds = dataclasses.replace(bounds, largest=chosen.tokens)
    notes = (*notes, *chosen.plan.notes)
    return dataclasses.replace(chosen.plan, bounds=bounds, notes=notes)


def _on_given(
    search: Search, config: RunConfig, on_accepted: Callable[[], None]
) -> Candidate:
    """Chooses on a mesh or replicas that are given."""
    available = search.machine.memory_of(config.num_devices)
    if available is not None:
        check_resident(search.laid_out(config), available)
        on_accepted()
    is_pipeline = config.mesh_sizes.stage > 1
    for margin in (MARGIN, 0.0):
        chosen = search.best(config, margin)
        # What is compiled decides whether other runs fit.
        if not (is_pipeline or chosen.plan.bounds.fixed is None) or chosen.fits:
            return chosen
    if is_pipeline:
        raise chosen.refusal()
    return chosen


# ---- meshes and replicas -------------------------------------------------------------


def _fastest_place(search: Search) -> tuple[Candidate, Note]:
    """Chooses a mesh, or a list of replicas; returns the reason too."""
    config, machine = search.config, search.machine
    if machine.num_devices == 1:
        mesh = config.replace(mesh=ONE_DEVICE, replicas=None)
        chosen = search.best(mesh, MARGIN)
        return chosen, Note(f"{_asked(config)}: there is one device")
    found = _fitting_meshes(search)
    least = min((one.seconds for one in found if one.fits), default=math.inf)

    def rank(one: Candidate) -> tuple:
        sizes, is_slow = one.sizes, one.seconds > _TOLERANCE * least
        inner = sizes.tensor, sizes.expert
        simpler = sizes.num_devices, *inner, sizes.stage, sizes.fsdp
        return not one.fits, is_slow, *simpler, one.seconds

    meshes = sorted(found, key=rank)
    chosen, *others = meshes
    if config.replicas == "auto" and (listed := fastest_list(search)):
        others.append(listed)
        if not chosen.fits or _GAIN * listed.seconds <= chosen.seconds:
            chosen, others = listed, meshes
    if not chosen.fits:
        best = min(found, key=lambda one: one.needed_bytes)
        raise best.refusal(
            f"{_asked(config)}: no mesh of {machine.num_devices} devices has the "
            f"memory for this run, and {best.sizes} comes closest: "
        )
    return chosen, _reason(search, chosen, others)


def _fitting_meshes(search: Search) -> list[Candidate]:
    """Returns the fastest candidates of the meshes of the most devices that hold a run.

    Those of half as many devices, of a quarter, and so on to a single one are compared
    with them. If none fits, these are candidates that do not.
    """
    most, tried = search.machine.num_devices, []
    for num_devices in range(most, 0, -1):
        for margin in (MARGIN, 0.0):
            found = _compared(search, [num_devices], margin, [])
            if any(one.fits for one in found):
                fewer = [num_devices >> n for n in range(1, num_devices.bit_length())]
                return _compared(search, fewer, margin, found)
        tried += found
    return tried


def _compared(
    search: Search, nums: Sequence[int], margin: float, found: list[Candidate]
) -> list[Candidate]:
    """Adds the best candidate of each mesh, until the others can only be slower.

    Memory takes longest to estimate, so meshes that would not be chosen if it had no
    limit are left as they would be then.
    """
    places = [
        search.config.replace(mesh=str(sizes), replicas=None)
        for num_devices in nums
        for sizes in _meshes(search, num_devices)
    ]
    unlimited = sorted(map(search.unlimited, places), key=lambda one: one.seconds)
    for one in unlimited:
        least = min((c.seconds for c in found if c.fits), default=math.inf)
        if one.seconds < _TOLERANCE * least:
            mesh = search.config.replace(mesh=one.plan.config.mesh, replicas=None)
            one = search.best(mesh, margin)
        found = [*found, one]
    return found


def _meshes(search: Search, num_devices: int) -> Iterator[MeshSizes]:
    """Yields the meshes of exactly this many devices that can run the model.

    The sums along `tensor` are not hidden behind other work, so it stays within a host.
    Where the rate of the links is not known, no devices share a microbatch.
    """
    machine, spec = search.machine, search.alone.spec
    config, model = search.config, spec.config
    most_tensor = machine.num_devices // machine.num_hosts
    if math.isinf(machine.speed.link_bytes):
        most_tensor = 1
    is_whole = num_devices == machine.num_devices
    for tensor in range(1, most_tensor + 1):
        rest, remainder = divmod(num_devices, tensor)
        if remainder or not is_divided(spec, tensor, config.block_tokens):
            continue
        most = min(model.num_layers, config.pipeline_microbatches or rest)
        if machine.num_processes > 1:  # pipeline stages cannot span processes
            most = 1
            if not is_whole:  # nor can a process be left out
                return
        for stage, fsdp, expert in itertools.product(
            range(1, most + 1), range(1, rest + 1), _expert_sizes(search, tensor)
        ):
            data, remainder = divmod(rest, stage * fsdp * expert)
            if data and not remainder and model.hidden_size % fsdp == 0:
                yield MeshSizes(
                    data=data, stage=stage, fsdp=fsdp, expert=expert, tensor=tensor
                )


def _expert_sizes(search: Search, tensor: int) -> list[int]:
    """Returns the sizes of the axis `expert` inside a host, with this one of `tensor`.

    Its exchanges are not hidden behind other work, either.
    """
    machine, most = search.machine, 1
    if tensor == 1 and not math.isinf(machine.speed.link_bytes):
        most = machine.num_devices // machine.num_hosts
    model = search.alone.spec.config
    return [n for n in range(1, most + 1) if divides_experts(model, n)]


# ---- reasons -------------------------------------------------------------------------


def _asked(config: RunConfig) -> str:
    return "mesh auto" if config.replicas is None else "replicas: auto"


def _reason(search: Search, chosen: Candidate, others: Sequence[Candidate]) -> Note:
    machine, every = search.machine, [chosen, *others]
    memory = f"it needs {format_bytes(chosen.needed_bytes)} on each device"
    available = machine.memory_of(chosen.plan.config.num_devices)
    size = "of an unknown size"
    if available is not None:
        size = f"which has {format_bytes(available.num_bytes)}"
    text = (
        f"{_asked(search.config)}: {_describe(chosen, every)} on "
        f"{machine.num_devices} devices: {memory}, {size}; "
    )
    fitting = [one for one in others if one.fits]
    if not fitting:
        return Note(f"{text}no other mesh fits")
    other = min(fitting, key=lambda one: one.seconds)
    text += f"predicted {other.seconds / chosen.seconds:.2f}x as fast as "
    text += _describe(other, every)
    is_fastest = chosen.seconds <= other.seconds
    return Note(text + (", the next best" if is_fastest else ", and simpler"))


def _describe(one: Candidate, every: Sequence[Candidate]) -> str:
    """Names a mesh or replicas, and those of their settings that others do not have."""
    config, settings = one.plan.config, []
    if len(one.search.remats) > 1:
        settings.append(f"remat {one.remat}")
    if config.replica_shapes:
        return ", ".join([describe_list(config.replica_shapes), *settings])
    if any(other.tokens != one.tokens for other in every):
        settings.append(f"microbatches of {one.tokens} tokens")
    return f"{one.sizes} with {' and '.join(settings)}" if settings else str(one.sizes)


def _remat_notes(chosen: Candidate) -> list[Note]:
    """Says why a `remat` was chosen, with the estimates of the others."""
    if chosen.search.config.remat != "auto" or not chosen.options:
        return []

    def describe(one: Candidate) -> str:
        text = f"{one.remat} with {one.tokens} tokens, about "
        text += format_bytes(one.needed_bytes)
        if one.remat == chosen.remat:
            return text
        if not one.fits:
            return f"{text}, which does not fit"
        return f"{text}, takes {one.seconds / chosen.seconds:.2f} times as long"

    others = [one for one in chosen.options if one.remat != chosen.remat]
    others = map(describe, others)
    why = "; ".join(others) or "a stronger remat would only take longer"
    return [Note(f"remat: auto: {describe(chosen)}; {why}")]


def _capacity_notes(chosen: Candidate) -> list[Note]:
    """Says why an automatic capacity was chosen."""
    plan, tokens = chosen.plan, chosen.tokens
    if plan.bounds.fixed is not None:
        return []
    available = chosen.search.machine.memory_of(plan.config.num_devices)
    if available is None:
        text = (
            f"microbatch_tokens: auto: {tokens}, at most {UNCHECKED_TOKENS} if a "
            "sample allows it, as the device's allocator does not report its memory "
            "(XLA_PYTHON_CLIENT_ALLOCATOR chooses the allocator). Give a number if the "
            "run has room for more, or for less."
        )
        return [Note(text, is_warning=True)]
    how = "estimated", chosen.found, available, plan.bounds
    notes = [Note(describe_capacity(tokens, *how))]
    if tokens < chosen.most:
        why = f"{tokens}, predicted to be faster than {chosen.most}"
        notes.append(Note(f"microbatch_tokens: auto: {why}"))
    return notes


def _with_fastest_storage(chosen: Candidate) -> tuple[Candidate, list[Note]]:
    """Stores quantized weights in the way that is read fastest, if that is as well.

    Where the format leaves a choice, it is taken if the back end reads what that adds,
    and if memory is estimated to allow the same settings as with the smallest storage.
    """
    search, plan = chosen.search, chosen.plan
    asked = search.model.base_format
    if asked is None or len(asked.options.storage_choices()) == 1:
        return chosen, []
    config = plan.config.replace(microbatch_tokens=plan.bounds.fixed or "auto")
    stored = search.laid_out(config, stores_more=True)
    limit = search.limit(config, MARGIN)
    larger = dataclasses.replace(chosen, plan=stored, limit=limit).at(chosen.tokens)
    more = num_bytes(stored.spec.base_shapes()) - num_bytes(plan.spec.base_shapes())
    same = f"remat {chosen.remat} with {chosen.tokens} tokens"
    name, is_taken = plan.spec.options.implementation, False
    if not get_backend(name).reads_transpose:
        why = f"{name} multiplies with the stored weights in both passes"
    elif limit is None:
        why = "the device does not report its memory"
    elif is_taken := larger.fits:
        why = f"{format_bytes(more)} more leave enough memory for {same}"
    else:
        why = f"{format_bytes(more)} more would leave too little memory for {same}"
    chosen = larger if is_taken else chosen
    base = chosen.plan.spec.options.base_format
    assert base is not None
    settings = [
        f"{field.name}: auto: {getattr(base.options, field.name)}"
        for field in dataclasses.fields(base.options)
        if getattr(base.options, field.name) != getattr(asked.options, field.name)
    ]
    return chosen, [Note(f"{', '.join(settings)}, as {why}")]
