"""Measures one mesh, in a process of its own, with random weights.

    python -m scripts.bench.mesh.measure CASE FOLDER
    python -m scripts.bench.mesh.measure CASE

CASE is a `Case` in JSON. Without a folder, its programs are compiled and kept, and
nothing is measured.
"""

import dataclasses
import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.costs.work import head_work, layer_work
from jaxlora.errors import JaxloraError
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.spec import DecoderSpec
from jaxlora.profile.pass_times import Probe, make_probe, measure_passes
from jaxlora.profile.tokens import TARGET_SHARE, equal_shares, fill
from jaxlora.profile.training import GIB, Training, peak_gib, time_steps
from jaxlora.programs.program import wait_until_kept
from jaxlora.scheduler import CostModel, simulate
from jaxlora.scheduler.lanes import ticks_of
from jaxlora.train.compilation_cache import keep_compiled_programs
from jaxlora.train.execute.executor import Executor, Outcomes
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.run_programs import RunPrograms
from scripts.bench.kernel_times import busy_ms, by_kind, is_exchange, ranked, trace
from scripts.bench.mesh.cases import DATA_SETS, Case, Window, make_jobs
from scripts.bench.mesh.fixed_ticks import FixedTicks
from scripts.bench.mesh.results import columns_of, results, skipped
from scripts.bench.mesh.routes import Choices, chosen_experts, num_changed
from scripts.bench.report import Rows, Timing, about, needs_gpu
from scripts.bench.scheduler.lengths import lengths

Columns = dict[str, Any]
_SHOWN = 30  # kernels of a profile
_SIZES = re.compile(r"(?<=[a-z])_\d+$")  # numbers of alike kernels


def measure(case: Case, rows: Rows) -> None:
    """Measures all parts of a case; each gives its rows as soon as it is measured.

    Raises:
        JaxloraError: The case needs a GPU, or cannot be trained here.
    """
    reason = needs_gpu(case.model, jax.default_backend() == "gpu")
    if reason is not None:
        raise JaxloraError(reason)
    for name, part in MeshTraining(case, rows).parts():
        try:
            part()
        except (JaxloraError, ValueError, RuntimeError) as error:
            rows.add(skipped(case, name, str(error)[:500]))


class MeshTraining(Training):
    """The weights, the slots and the programs of a case, and what is measured of it.

    Attributes:
        case: What is measured.
    """

    def __init__(self, case: Case, rows: Rows):
        """Makes weights and adapters on the devices; nothing is compiled yet.

        Args:
            case: What is measured.
            rows: Takes the rows.

        Raises:
            ConfigError: The run cannot be trained here.
        """
        began = time.perf_counter()
        super().__init__(case.plan(), make_jobs(case, max(case.adapters), 1))
        jax.block_until_ready(self.bases)
        self._weights_seconds = round(time.perf_counter() - began, 1)
        self.case, self._rows = case, rows
        self._cost: CostModel | None = None

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yields the name of each part, and a function that measures it."""
        case, adapters = self.case, sorted(self.case.adapters, reverse=True)
        is_pipeline, asked = case.sizes.stage > 1, case.parts
        model = self.spec.config
        has_experts = any(map(model.expert_shape, range(model.num_layers)))
        yield "compile", self._compile
        if has_experts and "routes" in asked:
            yield "routes", self._compare_routes
        if not is_pipeline and "step" in asked:
            yield "step", self._step
        if is_pipeline and "passes" in asked:
            yield "passes", self._passes
        for kind in case.kinds if is_pipeline and "kinds" in asked else ():
            yield kind, functools.partial(self._time_kind, kind)
        for number in adapters if is_pipeline else adapters[:1]:
            if "windows" in asked:
                yield self._window(number)

    def probe(self, num_tokens: int, longest: int) -> Probe:
        """Makes a microbatch that all jobs share, with lengths like theirs.

        Args:
            num_tokens: Its tokens.
            longest: Largest length of a sample.
        """
        case = self.case

        def draw(slot: int, total: int, rng: np.random.Generator) -> list[int]:
            source = DATA_SETS[slot]
            return fill(total, longest, lambda: lengths(source, 1, rng).item())

        totals = equal_shares(num_tokens, max(case.adapters), case.block_tokens)
        return make_probe(self, case.limits, totals, draw)

    def probes(self) -> list[Probe]:
        """Makes microbatches of different lengths and fills, which determine a fit."""
        case, longest = self.case, self.case.longest
        half = case.limits.padded(case.microbatch_tokens // 2)
        sizes = [(case.microbatch_tokens, longest // cut) for cut in (1, 2, 4)]
        return [self.probe(*size) for size in (*sizes, (half, longest))]

    def seconds(self, window: Window) -> float:
        """Runs a window; returns the time until all is done.

        The devices have nothing to do before and after. Everything that the trainer's
        host does in a window is included: packing, uploads, and reading results.

        Args:
            window: The window.

        Raises:
            JaxloraError: A gradient is not finite, so that times mean nothing.
        """
        args = self.layout, self.params, self.slots, self.case.limits
        executor = Executor(*args)
        executor.wait()
        began = time.perf_counter()
        num_lanes = self.layout.num_lanes
        ticks = FixedTicks(window.schedule, num_lanes)
        outcomes = list(executor.run(ticks, window.jobs))
        executor.wait()
        elapsed = time.perf_counter() - began
        _check_finite(outcomes)
        return elapsed

    def _add(self, kind: str, **columns: Any) -> None:
        end = about(jax.devices()[0].device_kind)
        self._rows.add(columns_of(self.case, kind) | columns | end)

    def _compile(self) -> None:
        """Compiles all programs, and runs each of them once."""
        began, limits = time.perf_counter(), self.case.limits
        RunPrograms.start(self.layout, limits, evaluates=False).compiled_passes()
        seconds = time.perf_counter() - began
        self.seconds(Window.of(self.case, 1, self.starts, self.plan.lanes))
        options = self.spec.options
        self._add(
            "compile",
            borders=self.plan.stages.borders,
            kernels=options.implementation,
            attention=options.attention,
            remat=options.remat,
            weights_seconds=self._weights_seconds,
            compile_seconds=round(seconds, 1),
            peak_gib=peak_gib(self.case.sizes.num_devices),
        )

    def _compare_routes(self) -> None:
        """Compares the routes of the first lane's tokens with those on the first mesh.

        A file beside the rows has these.
        """
        case = self.case
        packed = self.probe(case.microbatch_tokens, case.longest).packed
        rows = slice(case.microbatch_tokens)
        own = [layer[rows] for layer in chosen_experts(self, packed)]
        is_token = np.asarray(packed.segment_ids)[rows] >= 0
        first, others = self._first_routes(own)
        self._add(
            "routes",
            first_mesh=first,
            tokens=int(is_token.sum()),
            changed_by_layer=num_changed(others, own, is_token),
        )

    def _first_routes(self, own: Choices) -> tuple[str, Choices]:
        """Returns the first mesh, and the routes there; these are the own ones if not.

        Args:
            own: The routes on this mesh.
        """
        case, folder = self.case, self._rows.folder
        if folder is None:
            return case.mesh, own
        path = folder / f"routes-{case.model}-{len(own)}-{case.microbatch_tokens}.npz"
        if not path.exists():
            np.savez(path, *own, mesh=case.mesh)
        with np.load(path) as found:
            others = [found[f"arr_{number}"] for number in range(len(own))]
            return str(found["mesh"]), others

    def _step(self) -> None:
        """Times a full tick with the optimizer step of all jobs."""
        (stage,), case = self.layout.stages, self.case
        full = self.probe(case.microbatch_tokens, case.longest).packed
        batch = self.place(full, 0)
        timing = Timing.of(time_steps(lambda: self.start([batch]), case.repeats))
        self.load()
        passes = stage.steps.passes.prepare(stage.steps.shapes(case.limits))
        memory: Any = passes.last.compiled().memory_analysis()
        self._add(
            "step",
            adapters=max(self.case.adapters),
            **timing.columns("step_ms", 2),
            **self._profiled(batch),
            argument_gib=round(memory.argument_size_in_bytes / GIB, 2),
            temp_gib=round(memory.temp_size_in_bytes / GIB, 2),
            peak_gib=peak_gib(self.case.sizes.num_devices),
        )

    def _profiled(self, batch: PackedBatch) -> Columns:
        """Returns the shares of a step in which exchanges between devices run.

        `exposed` is the share in which nothing else runs on the first device. The
        kernels that take longest there have rows of their own.
        """
        kernels = trace(lambda: self.start([batch])(), 1)
        own = [k for k in kernels if k.device == 0]
        named = [(_SIZES.sub("", k.name), k.ms) for k in own]
        self._add("kinds", step_ms=round(busy_ms(own), 2), **by_kind(named, digits=2))
        for name, count, ms in ranked(named)[:_SHOWN]:
            self._add("kernel", name=name[:100], count=count, ms=round(ms, 3))
        if self.case.sizes.num_devices == 1:
            return {}
        rest = [k for k in own if not is_exchange(k)]
        whole = busy_ms(own)
        exchanges = busy_ms([k for k in own if is_exchange(k)])
        share = lambda ms: round(100 * ms / whole, 2) if whole else None
        return {
            "exchange_percent": share(exchanges),
            "exposed_percent": share(whole - busy_ms(rest)),
        }

    def _passes(self) -> None:
        """Times each pass of the pipeline on its own, and fits the cost model."""
        found = measure_passes(self, self.probes(), self.case.repeats)
        self._cost = found.cost
        for name, points in found.points.items():
            for p in points:
                ms = round(1000 * p.seconds, 3)
                columns = {"tokens": p.tokens, "squares": p.squares, "ms": ms}
                self._add("pass", **{"pass": name}, **columns)
        ms = round(1000 * found.cost.communication, 3)
        columns = {"tokens": self.case.microbatch_tokens, "squares": "", "ms": ms}
        self._add("pass", **{"pass": "transfer"}, **columns)
        last, capacity = found.cost.stages[-1].forward, self.case.microbatch_tokens
        share = last.base / (last.base + capacity * last.per_token)
        self._add(
            "fit",
            mape_percent=round(100 * found.mape, 2),
            fixed_share=round(share, 3),
        )

    def _window(self, num_jobs: int) -> tuple[str, Callable[[], None]]:
        run = functools.partial(self._time_window, num_jobs)
        return f"{num_jobs} adapters", run

    def _time_window(self, num_jobs: int) -> None:
        """Times all samples of some jobs."""
        case = self.case
        lanes, starts = self.plan.lanes, self.starts[:num_jobs]
        window = Window.of(case, case.num_microbatches, starts, lanes)
        self._add(
            "window",
            adapters=num_jobs,
            batch_samples=case.batch_samples,
            data_sets=DATA_SETS[:num_jobs],
            **self._figures(window),
        )

    def _time_kind(self, kind: str) -> None:
        """Times the stream of a kind of jobs.

        It is packed as if padding took as long as tokens, and by the share of the run.
        """
        for share in sorted({1.0, self.plan.config.padding_share}, reverse=True):
            config = self.plan.config.replace(padding_share=share)
            plan = dataclasses.replace(self.plan, config=config)
            began = time.perf_counter()
            window = Window.of_kind(self.case, kind, self.starts, plan.rules)
            planning = time.perf_counter() - began
            self._add(
                "stream",
                jobs=kind,
                padding_share=share,
                planning_seconds=round(planning, 2),
                predicted_seconds=plan.seconds(window.schedule),
                **self._figures(window),
            )

    def _figures(self, window: Window) -> Columns:
        """Times a window; returns its columns."""
        case, lanes = self.case, self.plan.lanes
        seconds = self.seconds(window)
        lengths = np.concatenate(
            [job.prepared.train_data.lengths for job in window.jobs.values()]
        )
        tokens, gpus = int(lengths.sum()), case.sizes.num_devices
        ticks = ticks_of(window.schedule.microbatches, lanes.num_lanes)
        bubbles = {}
        if self._cost is not None:
            bubbles = self._bubbles(window.schedule, lanes, self._cost, seconds)
        return {
            "ticks": len(ticks),
            "no_ops": sum(not any(tick) for tick in ticks),
            "tokens": tokens,
            "seconds": round(seconds, 4),
            "tokens_per_second_gpu": round(tokens / seconds / gpus, 1),
            **self._of_peak(lengths, seconds),
            "peak_gib": peak_gib(gpus),
            **bubbles,
        }

    def _of_peak(self, lengths: np.ndarray, seconds: float) -> Columns:
        """Returns the operations of a token, and their share of the device's peak."""
        mean_keys = float((lengths**2).sum() / lengths.sum())
        flops = flops_per_token(self.spec, mean_keys)
        speed = find_speed(jax.devices()[0].device_kind)
        if speed is UNKNOWN_DEVICE:
            return {"flops_per_token": flops, "peak_percent": None}
        rate = lengths.sum() * flops / seconds / self.case.sizes.num_devices
        share = round(100 * float(rate) / speed.flops, 2)
        return {"flops_per_token": flops, "peak_percent": share}

    def _bubbles(self, schedule, lanes, cost: CostModel, seconds: float) -> Columns:
        """Returns the measured and the simulated bubble of a window in percent.

        Both have the same work: the sum of the passes' own times. Optimizer steps and
        transfers are part of the bubble.
        """
        found = simulate(schedule, cost, lanes.pipeline, num_lanes=lanes.num_lanes)
        busy = found.makespan * np.array(found.utilization)
        bubble = lambda time: round(100 * float(1 - busy.mean() / time), 2)
        return {
            "bubble_percent": bubble(seconds),
            "simulated_bubble_percent": bubble(found.makespan),
            "busy_percent_by_stage": np.round(100 * busy / seconds, 2).tolist(),
            "simulated_seconds": round(found.makespan, 4),
        }


def _check_finite(items: Iterable[Outcomes]) -> None:
    for item in items:
        for slot, outcome in item.steps.items():
            if not outcome.is_finite:
                raise JaxloraError(
                    f"the gradients of slot {slot} are not finite, so that times mean "
                    "nothing. Use another model or dtype."
                )


def flops_per_token(spec: DecoderSpec, mean_keys: float) -> float:
    """Counts the operations of products, forward and backward, for one token.

    What `remat` computes again is not counted.

    Args:
        spec: The decoder.
        mean_keys: Mean length of the sample that a token is in.
    """
    options = dataclasses.replace(spec.options, remat="none")
    spec = dataclasses.replace(spec, options=options)
    parts = [layer_work(spec, n, mean_keys) for n in range(spec.config.num_layers)]
    parts.append(head_work(spec, TARGET_SHARE))
    return sum(part.forward.flops + part.backward.flops for part in parts)


def compile_programs(case: Case) -> None:
    """Compiles the programs of a case beside each other, without any weights.

    They are kept, so that a process that measures the case loads them.

    Raises:
        ConfigError: The case cannot be trained here.
    """
    plan = case.plan()
    layout = Layout.of(plan.stages)
    layout.empty_slots()
    RunPrograms.start(layout, case.limits, evaluates=False).finish()
    wait_until_kept()


def main() -> None:
    """Measures the case that the first argument describes in JSON, or compiles it."""
    keep_compiled_programs()
    case = Case.from_json(sys.argv[1])
    if len(sys.argv) == 2:
        compile_programs(case)
        return
    rows = results(Path(sys.argv[2]))
    try:
        measure(case, rows)
    except (JaxloraError, ValueError, RuntimeError) as error:
        rows.add(skipped(case, "all", str(error)[:500]))


if __name__ == "__main__":
    main()
