"""Prints the plan of a run, and draws it."""

import os
import pathlib
from collections.abc import Iterator

import rich.box
from rich.console import Console
from rich.table import Table

from jaxlora.common.console import literal, show
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import describe_list
from jaxlora.costs.gpus import GpuMachine
from jaxlora.errors import ConfigError
from jaxlora.forecast import RunForecast
from jaxlora.forecast.sweep_groups import NO_TIME, draw_groups, print_groups
from jaxlora.plan.memory.device_memory import format_bytes
from jaxlora.plan.memory.need import DoesNotFitError, MemoryNeed
from jaxlora.scheduler import picture

_DRAWN_MICROBATCHES = 60


def print_plan(
    planned: RunForecast, console: Console, *, price_per_hour: float | None = None
) -> None:
    """Prints what the run needs, and its jobs.

    Args:
        planned: The plan.
        console: Console to print to.
        price_per_hour: Price of one GPU for an hour, in any currency.
    """
    machine = planned.machine
    where = "on this machine" if machine is None else describe_machine(machine)
    show(console, where, soft_wrap=True)
    show(console, _needs_table(planned, price_per_hour))
    for note in _notes(planned):
        show(console, note, soft_wrap=True)
    show(console, "")
    show(console, _jobs_table(planned))
    if planned.groups is not None:
        print_groups(planned.groups, console, price_per_hour=price_per_hour)
    elif planned.config.sweep is not None:
        show(console, NO_TIME, soft_wrap=True)


def print_misfit(error: DoesNotFitError, machine: GpuMachine, console: Console) -> None:
    """Prints that a run does not fit, what it needs, and what would help."""
    table = _facts_table()
    _add_memory(table, error.need, "")
    if error.need.where:
        table.add_row("mesh", literal(f"{error.mesh} comes closest"))
    show(console, describe_machine(machine), soft_wrap=True)
    show(console, table)
    if error.cures:
        subject = error.need.subject
        show(console, f"each of these alone would make {subject} fit:", soft_wrap=True)
        for cure in error.cures:
            show(console, f"- {cure}", soft_wrap=True)
        return
    show(
        console,
        "no single setting of remat, microbatch_tokens, max_concurrent_jobs or "
        "slot_rank would make it fit: combine them, set quantize_base, or plan for "
        "more GPUs or larger ones.",
        soft_wrap=True,
    )


def describe_machine(machine: GpuMachine) -> str:
    """Names the GPUs of a machine, and how many there are."""
    if machine.count == 1:
        return f"on one {machine.gpu.kind}"
    hosts = f" in {machine.num_hosts} machines" if machine.num_hosts > 1 else ""
    gpu = machine.gpu
    return f"on {machine.count} x {gpu.kind}{hosts}, linked by {gpu.link}"


def _facts_table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _needs_table(planned: RunForecast, price_per_hour: float | None) -> Table:
    """Makes the first table: whether the run fits, how long it takes, its price."""
    table = _facts_table()
    base, dtype = planned.plan.model.base_format, planned.plan.model.dtype.name
    stored = dtype if base is None else f"{base.name} and {dtype}"
    _add_memory(table, planned.memory, f", in {stored}")
    table.add_row("mesh", literal(_describe_mesh(planned)))
    config = planned.config
    how = f"remat {config.remat}"
    if size := planned.plan.spec.options.layers_per_program:
        how += f", {size} layers per program"
    table.add_row(
        "microbatches",
        f"{planned.num_microbatches:,} of {_sizes(config)} tokens, {how}",
    )
    if shapes := planned.plan.shapes.tokens:
        table.add_row(
            "their shapes",
            f"{', '.join(f'{n:,}' for n in shapes)} and {config.microbatch_tokens:,} "
            f"tokens, from microbatch {planned.plan.shapes.from_tick + 1:,} on",
        )
    table.add_row(
        "fill", f"{planned.fill:.1%} of them are tokens of samples, not padding"
    )
    _add_time(table, planned, price_per_hour)
    return table


def _add_memory(table: Table, need: MemoryNeed, stored: str) -> None:
    """Adds whether a run fits, and the parts of its memory."""
    total, available = format_bytes(need.total_bytes), need.available
    each = f"{need.where}, by estimate"
    if available is None:
        table.add_row("memory", literal(f"{total}{each}; what there is, is not known"))
    else:
        there = format_bytes(available.num_bytes)
        word = "yes" if need.fits else "no"
        table.add_row("fits", literal(f"{word}: needs {total} of {there}{each}"))
    table.add_row("  base weights", format_bytes(need.base_bytes) + stored)
    parts = "optimizer state and gradients"
    if need.has_references:
        parts = "optimizer state, gradients and references"
    table.add_row("  adapters", f"{format_bytes(need.adapter_bytes)}, with {parts}")
    step = format_bytes(need.step_bytes)
    if need.tokens:
        table.add_row("  a training step", f"{step}, for {need.tokens:,} tokens")
    else:
        table.add_row("  a checkpoint", f"{step}, for copies of the adapters")


def _sizes(config: RunConfig) -> str:
    """Names the sizes of microbatches."""
    tokens = {one.tokens for one in config.replica_shapes}
    sizes = sorted({*tokens, config.limits.capacity})
    return " or ".join(f"{tokens:,}" for tokens in sizes)


def _describe_mesh(planned: RunForecast) -> str:
    used, machine = planned.config.num_devices, planned.machine
    text = "1 device" if used == 1 else str(planned.sizes)
    if planned.plan.lanes.replicas:
        text = f"replicas of {describe_list(planned.config.replica_shapes)}"
    if machine is not None and used < machine.count:
        text += f", which uses {used} of the {machine.count} GPUs"
    return text


def _add_time(table: Table, planned: RunForecast, price_per_hour: float | None) -> None:
    """Adds the predicted speed, time and price."""
    time = planned.time
    if time is None:
        table.add_row(
            "time",
            "not predicted, as the rates of this device are not known; `jaxlora "
            "profile` measures them",
        )
        return
    speed = planned.num_tokens / time.together
    each = planned.config.num_devices
    per_gpu = f", {speed / each:,.0f} on each GPU" if each > 1 else ""
    table.add_row("speed", f"{speed:,.0f} tokens of samples a second{per_gpu}")
    table.add_row("time", _hours(time.together))
    if len(planned.jobs) > 1:
        table.add_row(
            "one after the other",
            f"{_hours(time.apart)}; together is {time.apart / time.together:.2f} times "
            "as fast",
        )
    if price_per_hour is not None:
        count = each if planned.machine is None else planned.machine.count
        price = count * price_per_hour * time.hours
        table.add_row(
            "price",
            f"{price:,.2f}: {count} x {price_per_hour:g} for each hour of a GPU",
        )


def _hours(seconds: float) -> str:
    """Formats a time in hours, or in minutes if it is short."""
    hours = seconds / 3600
    if hours >= 1:
        return f"{hours:,.1f} hours"
    if seconds >= 60:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.1f} seconds"


def _notes(planned: RunForecast) -> Iterator[str]:
    """Says how far the predictions can be trusted."""
    if planned.time is None:
        yield "`--gpu h100x4` and the like plan for GPUs that are not here."
        return
    yield (
        "Time is that of training: loading, compiling, evaluations and checkpoints "
        "come on top, and jobs that stop early take less."
    )
    machine, profile = planned.machine, planned.plan.rates.profile
    if profile is not None:
        yield (
            f"It follows what `jaxlora profile` measured on {profile.measured[:10]}, "
            f"with {profile.kernels}."
        )
    if machine is None or profile is not None:
        return
    if machine.gpu.is_measured:
        yield (
            f"On one {machine.gpu.kind}, predictions for Llama-3.1-8B were within 8 % "
            "of measurements; a model of 1B was 16 % slower than predicted."
        )
    else:
        yield (
            f"No {machine.gpu.kind} has been measured: memory and time follow from its "
            "data sheet, and the time may be off by 40 % either way."
        )
    if planned.plan.lanes.replicas:
        yield (
            "Replicas of different sizes have been measured on two GPUs, without "
            "samples of over 8,192 tokens; with longer ones, predictions were too low."
        )
    if planned.config.num_devices > 4:
        yield "More than four GPUs have not been measured."
    if machine.num_hosts > 1:
        yield (
            "Links between machines are counted by their data sheets, or by "
            "network_gbits; none was measured."
        )


def _jobs_table(planned: RunForecast) -> Table:
    table = Table(
        title="jobs", title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    for i, column in enumerate(("job", "samples", "longest", "steps", "tokens")):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for job in planned.jobs:
        lengths = job.train_data.lengths
        tokens = sum(sum(job.lengths(step)) for step in range(job.num_steps))
        row = (len(lengths), lengths.max(), job.num_steps, tokens)
        table.add_row(literal(job.name), *(f"{n:,}" for n in row))
    return table


def draw_plan(planned: RunForecast, path: str | os.PathLike) -> str:
    """Writes a Gantt picture, of a sweep's groups or of a run's first microbatches.

    Returns:
        What is in it, in words.

    Raises:
        ConfigError: The suffix is no kind of picture.
    """
    picture_kind(path)
    if planned.groups is not None:
        draw_groups(planned.groups, path)
        return "the groups of the sweep"
    whole = planned.whole
    assert whole is not None, "replicas of different sizes are not simulated"
    n, num = planned.plan.lanes.num_lanes, len(whole.schedule.microbatches)
    drawn = min(-(-_DRAWN_MICROBATCHES // n), num // n)
    until = float(whole.simulation.backward_end[:, :drawn].max())
    names = {number: job.name for number, job in enumerate(planned.jobs)}
    options = {"num_lanes": n, "until": until, "names": names}
    picture.draw(whole.schedule, whole.simulation, path, **options)
    return f"microbatches 1 to {n * drawn} of {num}"


def picture_kind(path: str | os.PathLike) -> str:
    """Returns the suffix of a picture's file.

    Raises:
        ConfigError: It is no kind of picture.
    """
    suffix, kinds = pathlib.Path(path).suffix, (".png", ".svg", ".pdf")
    if suffix not in kinds:
        raise ConfigError(f"{path}: a picture ends in one of {', '.join(kinds)}.")
    return suffix
