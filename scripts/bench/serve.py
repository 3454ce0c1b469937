"""Loads an engine as tenants of a server do, beside the offline trainer.

Each tenant sends 8 samples, waits for the optimizer step, and sends the next 8. The
offline trainer has the same jobs, and knows all of their samples ahead. Weights and
tokens are random, lengths are log-normal.

    A  1, 4, 16 and 32 such tenants
    D  one of 16 tenants sends 64 times as much
    L  a lone request of 512 tokens

Fairness is the largest deviation of a tenant's tokens from the mean of all. Fill is the
share of rows that hold tokens. Busy is the share of the time that the device would need
for its microbatches and steps one after another.

    python -m scripts.bench serve --output-dir bench
    python -m scripts.bench serve --model tiny --seconds 2 --tenants 4
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora import Datum
from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.data.pack import JobBatch, pack_microbatch
from jaxlora.errors import JaxloraError
from jaxlora.hf.load import FrozenModel
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.profile import training
from jaxlora.profile.tokens import TARGET_SHARE, job_batch
from jaxlora.profile.training import Training
from jaxlora.programs.program import Prepared
from jaxlora.scheduler import AffineCost, CostModel, Pipeline, get_packer
from jaxlora.session.datum import ChosenLoss
from jaxlora.session.engine import Engine, OpenAdapter, StepCall
from jaxlora.session.operations import new_adapter, pass_call
from jaxlora.session.sampler import publish
from jaxlora.train.execute.step import optimizer_inputs
from scripts.bench.report import Rows, about, add_output_dir, needs_gpu, table
from scripts.bench.shapes import ANY_DEVICE, LARGE
from scripts.bench.workload import Workload

SIGMA = 0.6  # of the logarithm of lengths
HEAVY = 64  # times the load of another tenant
LONE_TOKENS = 512
_POOL = 6  # batches that a tenant sends in turn
_RATE = AdamParams(learning_rate=1e-5)
_COST = AffineCost(base=0.0, per_token=1.0, per_square=0.0)
_COSTS = CostModel.uniform(1, forward=_COST, backward=_COST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Workload):
    """The settings of all rows.

    Attributes:
        sizes: Sizes of microbatches of the engine; the largest one is the trainer's.
        slots: Slots of the engine.
        samples: Samples of a batch.
        mean_tokens: Mean length of a sample.
        seconds: Time of a row.
    """

    sizes: tuple[int, ...]
    slots: int
    samples: int = 8
    mean_tokens: int = 350
    seconds: float = 15.0

    def lengths(self, rng: np.random.Generator, number: int) -> list[int]:
        """Draws the lengths of some samples."""
        median = np.log(self.mean_tokens) - SIGMA**2 / 2
        drawn = rng.lognormal(median, SIGMA, number)
        return np.clip(drawn, 4, self.longest).astype(int).tolist()


# ---- the offline trainer -------------------------------------------------------------


class Offline:
    """The jobs of tenants in the programs of a run."""

    def __init__(self, case: Case, jobs: int, *, compiles: bool):
        """Makes weights, and starts to compile.

        Args:
            case: The settings.
            jobs: Number of jobs.
            compiles: Whether the programs are compiled, for `measure`.
        """
        model, rng = case.model_config(), np.random.default_rng(0)
        every = [
            [
                job_batch(slot, case.lengths(rng, case.samples), model.vocab_size, rng)
                for _ in range(_POOL)
            ]
            for slot in range(jobs)
        ]
        config = case.config(jobs, case.samples, slot_dropout=False)
        prepared = [
            training.make_job(job, [s for b in own for s in b.samples], model)
            for job, own in zip(config.jobs, every, strict=True)
        ]
        machine = dataclasses.replace(this_machine(), memory=None)
        plan = training.plan_run(
            config,
            training.model_of_shapes(config, model),
            prepared,
            machine,
            mean_segment_tokens=64,
        )
        self._case, self._batches = case, every
        self.trained = Training(plan, prepared)
        limits = plan.config.limits
        (stage,), (slots,) = self.trained.layout.stages, self.trained.slots.tables
        self._step, self._table = stage.steps.step, slots
        self._compiling: list[Prepared] = []
        if compiles:
            shapes, step = stage.steps.shapes(limits), self._step_args({0: 0})
            self._compiling += stage.steps.passes.prepare(shapes).each
            self._compiling.append(stage.steps.step.prepare(*step))

    def _step_args(self, steps: Mapping[int, int]) -> tuple[Any, ...]:
        slots = self.trained.spec.slots
        assert slots is not None
        inputs = optimizer_inputs(dict(enumerate(self.trained.jobs)), steps, slots)
        return self._table.state, inputs, (), self._table.settings["rank"]

    def measure(self) -> dict[str, Any]:
        """Trains the jobs as a plan of all their batches says."""
        for one in self._compiling:
            one.compiled()
        limits = self.trained.plan.config.limits
        samples, left = [], collections.Counter[tuple[int, int]]()
        for slot, own in enumerate(self._batches):
            for number, batch in enumerate(own):
                some = dataclasses.replace(batch, step=number).to_schedule()
                samples += some
                left[slot, number] = len(some)
        schedule = get_packer("joint")(samples, limits, Pipeline(), _COSTS)
        ticks: list[tuple[PackedBatch, dict[int, int]]] = []
        for microbatch in schedule.microbatches:
            mine: dict[int, JobBatch] = {
                s.owner: self._batches[s.owner][s.batch] for s in microbatch
            }
            left.subtract((s.owner, s.batch) for s in microbatch)
            done = {s.owner: s.batch for s in microbatch if not left[s.owner, s.batch]}
            ticks.append((pack_microbatch(microbatch, mine, limits), done))

        def train(some: Sequence[tuple[PackedBatch, dict[int, int]]]) -> None:
            for packed, done in some:
                self.trained.accumulate(packed)
                if done:
                    self._table.state, _ = self._step(*self._step_args(done))
            jax.block_until_ready(self._table.state.pending.is_finite)

        train(ticks[:2])
        began = time.perf_counter()
        train(ticks)
        seconds = time.perf_counter() - began
        tokens = sum(s.num_tokens for s in samples)
        return {
            "tokens_per_second": round(tokens / seconds),
            "fill": round(schedule.fill, 3),
            "microbatch_ms": round(1e3 * seconds / len(ticks), 2),
        }


# ---- tenants -------------------------------------------------------------------------


class Tenant:
    """A client that sends its next batch when the last step is done."""

    def __init__(
        self, engine: Engine, one: OpenAdapter, batches: Sequence[Sequence[Datum]]
    ):
        """Sends nothing yet.

        Args:
            engine: The engine.
            one: Its adapter.
            batches: What it sends, in turn.
        """
        self.one, self._engine = one, engine
        self._batches = itertools.cycle(batches)
        self._loss = ChosenLoss.of("cross_entropy", None)
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.is_stopped = False

    def send(self) -> None:
        """Sends a batch and a step."""
        data, began = next(self._batches), time.perf_counter()
        call = pass_call(self._engine, data, self._loss, is_training=True)

        def done(result: object) -> None:
            self.seconds.append(time.perf_counter() - began)
            self.tokens.append(sum(len(one.tokens) for one in data))
            if not self.is_stopped:
                self.send()

        self._engine.submit(self.one, call)
        self._engine.submit(self.one, StepCall(params=_RATE, on_result=done))


class Load:
    """An engine with tenants."""

    def __init__(self, case: Case, engine: Engine):
        """Opens no adapter yet.

        Args:
            case: The settings.
            engine: An empty engine, whose programs are there.
        """
        self._case, self.engine = case, engine
        self._vocab = engine.model.config.vocab_size
        self._microbatches: collections.Counter[int] = collections.Counter()
        self._num_tokens = 0
        queue = engine._queue_microbatch

        def count(run, microbatch, places, batches, rows):
            self._microbatches[rows] += 1
            self._num_tokens += sum(sample.num_tokens for sample in microbatch)
            return queue(run, microbatch, places, batches, rows)

        engine._queue_microbatch = count
        self.times: dict[str, float] = {}  # of the device's work, in ms

    def datums(self, rng: np.random.Generator, lengths: Sequence[int]) -> list[Datum]:
        """Makes datums whose last tokens are targets."""
        return [
            Datum(
                tokens=rng.integers(0, self._vocab, length),
                target_tokens=rng.integers(0, self._vocab, length),
                weights=(np.arange(length) >= (1 - TARGET_SHARE) * length).astype(
                    float
                ),
            )
            for length in lengths
        ]

    def tenants(self, number: int, *, first: int = 1) -> list[Tenant]:
        """Opens adapters of tenants, the first of which sends so many times as much."""
        rng, case = np.random.default_rng(0), self._case
        every = []
        for i in range(number):
            name = f"tenant{i}"
            adapter = new_adapter(self.engine, name, rank=case.rank, seed=i)
            one = self.engine.open(name, adapter, tenant=name)
            samples = case.samples * (1 if i else first)
            batches = [
                self.datums(rng, case.lengths(rng, samples)) for _ in range(_POOL)
            ]
            every.append(Tenant(self.engine, one, batches))
        return every

    def close(self, tenants: Sequence[Tenant]) -> None:
        """Closes their adapters."""
        for one in tenants:
            one.is_stopped = True
        for one in tenants:
            self.engine.finish(one.one)
            self.engine.close(one.one)

    def run(self, tenants: Sequence[Tenant]) -> float:
        """Runs for the time of a row, after a warm-up; returns the seconds."""
        for one in tenants:
            one.send()
        self._until(time.perf_counter() + self._case.seconds / 4)
        self._microbatches.clear()
        self._num_tokens, before = 0, self.engine._residence.num_moves
        for one in tenants:
            one.seconds.clear()
            one.tokens.clear()
        began = time.perf_counter()
        self._until(began + self._case.seconds)
        seconds = time.perf_counter() - began
        self._moves = self.engine._residence.num_moves - before
        return seconds

    def _until(self, end: float) -> None:
        while time.perf_counter() < end:
            self.engine.advance()

    def columns(self, counted: Sequence[Tenant], seconds: float) -> dict[str, Any]:
        """Returns the results of a row.

        Args:
            counted: The tenants whose times count.
            seconds: Time of the row.
        """
        every = [x for one in counted for x in one.seconds]
        rows = sum(size * number for size, number in self._microbatches.items())
        shares = np.array([sum(one.tokens) for one in counted]) / seconds
        busy = sum(self.times[f"{s}"] * n for s, n in self._microbatches.items())
        busy += self.times["step"] * len(every)
        quantile = lambda q: round(float(np.quantile(every, q)), 3) if every else None
        return {
            "tokens_per_second": round(self._num_tokens / seconds),
            "p50_s": quantile(0.5),
            "p99_s": quantile(0.99),
            "requests": len(every),
            "unfairness": round(float(np.abs(shares / shares.mean() - 1).max()), 3),
            "fill": round(self._num_tokens / max(1, rows), 3),
            "busy": round(busy / 1e3 / seconds, 3),
            "microbatches": {str(k): n for k, n in sorted(self._microbatches.items())},
            "moves": self._moves,
        }

    # ---- rows --------------------------------------------------------------------

    def singles(self) -> Iterator[dict[str, Any]]:
        """Times single pieces of work, each from its call to its end."""
        engine, rng = self.engine, np.random.default_rng(1)
        began = time.perf_counter()
        tenants = self.tenants(min(16, self._case.slots))
        each = (time.perf_counter() - began) / len(tenants)
        yield {"row": "create and draw data", "ms": round(1e3 * each, 2)}
        one = tenants[0].one
        loss = ChosenLoss.of("cross_entropy", None)

        def send(lengths: Sequence[int], *, steps: bool) -> None:
            data = self.datums(rng, lengths)
            engine.submit(one, pass_call(engine, data, loss, is_training=True))
            if steps:
                engine.submit(one, StepCall(params=_RATE))
            engine.finish(one)

        longest = self._case.longest
        for size in self._case.sizes:
            lengths = [min(longest, size)] * max(1, size // longest)
            ms = _median(functools.partial(send, lengths, steps=False))
            self.times[f"{size}"] = ms
            yield {"row": f"microbatch of {size}", "ms": round(ms, 2)}
        alone = min(LONE_TOKENS, self._case.sizes[0])

        def step() -> None:
            engine.submit(one, StepCall(params=_RATE))
            engine.finish(one)

        self.times["step"] = _median(step)
        yield {"row": "step of a slot", "ms": round(self.times["step"], 2)}
        ms = _median(functools.partial(send, [alone], steps=True), 15)
        yield {"row": f"L: lone request of {alone} tokens", "ms": round(ms, 2)}
        no_tokenizer: Any = lambda: None

        def published() -> None:
            made = publish(engine, one, no_tokenizer)
            jax.block_until_ready(jax.tree.leaves(made._decoder.weights()[0].adapters))

        yield {"row": "publish", "ms": round(_median(published), 2)}

        def move() -> None:
            engine.park(one)
            engine.bring(one)
            jax.block_until_ready(engine.table.state.pending.is_finite)

        yield {"row": "park and bring back", "ms": round(_median(move), 2)}
        self.close(tenants)

    def closed_loop(self, number: int) -> dict[str, Any]:
        """Row A."""
        tenants = self.tenants(number)
        seconds = self.run(tenants)
        found = self.columns(tenants, seconds)
        self.close(tenants)
        return {"row": f"A: {number} tenants"} | found

    def heavy(self, number: int) -> dict[str, Any]:
        """Row D, whose times and shares are those of the other tenants."""
        tenants = self.tenants(number, first=HEAVY)
        others = tenants[1:]
        seconds = self.run(tenants)
        found = self.columns(others, seconds)
        each = [sum(one.tokens) / seconds for one in others]
        found["others_tokens_per_second"] = round(sum(each) / len(each))
        found["heavy_tokens_per_second"] = round(found["tokens_per_second"] - sum(each))
        self.close(tenants)
        return {"row": f"D: {number} tenants, one of {HEAVY} times the load"} | found


def _median(run: Callable[[], object], times: int = 7) -> float:
    """Returns the milliseconds of a call."""
    run()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - began))
    return float(np.median(found))


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the single pieces of work, and the loads."""
    ms = [row for row in rows if "ms" in row]
    loads = [row for row in rows if "tokens_per_second" in row]
    columns = (
        "row", "tokens_per_second", "of_offline", "p50_s", "p99_s", "unfairness",
        "fill", "busy", "moves", "heavy_tokens_per_second", "others_tokens_per_second",
    )  # fmt: skip
    return f"{table(ms, ('row', 'ms'))}\n\n{table(loads, columns)}"


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--model", choices=[*ANY_DEVICE, LARGE], default=LARGE)
    out.add_argument("--layers", type=int, help="replaces the model's own number")
    out.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    out.add_argument("--sizes", type=int, nargs="+", default=[512, 2048, 8192])
    out.add_argument("--block-tokens", type=int, default=64)
    out.add_argument("--slots", type=int, default=32)
    out.add_argument("--rank", type=int, default=16)
    out.add_argument("--tenants", type=int, nargs="+", default=[16, 1, 4, 32])
    out.add_argument("--samples", type=int, default=8, help="in a batch")
    out.add_argument("--mean-tokens", type=int, default=350, help="in a sample")
    out.add_argument(
        "--rows",
        nargs="+",
        choices=["singles", "offline", "A", "D"],
        default=["singles", "offline", "A", "D"],
    )
    out.add_argument("--seconds", type=float, default=15.0, help="of a row")


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options.

    Raises:
        JaxloraError: The model is too large for this device.
    """
    if (why := needs_gpu(args.model, jax.default_backend() == "gpu")) is not None:
        raise JaxloraError(why)
    case = Case(
        model=args.model,
        layers=args.layers,
        rank=args.rank,
        dropout=0.0,
        microbatch_tokens=max(args.sizes),
        block_tokens=args.block_tokens,
        longest_tokens=min(2048, max(args.sizes)),
        dtype=args.dtype,
        sizes=tuple(sorted(args.sizes)),
        slots=args.slots,
        samples=args.samples,
        mean_tokens=args.mean_tokens,
        seconds=args.seconds,
    )
    rows, began = Rows(args.output_dir, "serve", tables), time.perf_counter()
    device = about(jax.devices()[0].device_kind)

    def add(found: Mapping[str, Any]) -> None:
        at = {"at_s": round(time.perf_counter() - began, 1)}
        rows.add({**found, **at, "peak_gib": training.peak_gib(), **device})

    most = max(args.tenants)
    jobs = min(most, 16)
    offline = Offline(case, jobs, compiles="offline" in args.rows)
    load = Load(case, _engine(case, offline.trained))
    add({"row": "programs", "ms": round(1e3 * (time.perf_counter() - began))})
    for found in load.singles():  # which the others need, too
        add(found)
    first, *others = args.tenants
    speed: float | None = None
    if "offline" in args.rows:
        found = offline.measure()
        speed = found["tokens_per_second"]
        add({"row": "offline trainer", **found})

    def against(found: Mapping[str, Any]) -> dict[str, Any]:
        ratio = None if speed is None else round(found["tokens_per_second"] / speed, 3)
        return {**found, "of_offline": ratio}

    if "A" in args.rows:
        add(against(load.closed_loop(first)))
    if "D" in args.rows:
        add(against(load.heavy(first)))
    for number in others if "A" in args.rows else ():
        add(against(load.closed_loop(number)))
    print(rows.tables())


def _engine(case: Case, trained: Training) -> Engine:
    """Makes an engine on the weights of a run, with all programs for training."""
    model = FrozenModel(
        config=trained.spec.config,
        params=trained.params,
        dtype=trained.spec.options.dtype,
        folder=pathlib.Path(),
        source="random",
        fingerprint="random",
    )
    config = SessionConfig(
        slots=case.slots,
        rank=case.rank,
        microbatch_tokens=case.sizes,
        block_tokens=case.block_tokens,
    )
    engine = Engine(model, config)
    engine.prepare(is_training=True)
    return engine
