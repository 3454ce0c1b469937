"""Loads an engine as tenants of a server do, beside the offline trainer.

Each tenant sends 8 samples, waits for the optimizer step, and sends the next 8. The
offline trainer has the same jobs, and knows all of their samples ahead. Weights and
tokens are random, lengths are log-normal.

    A  16, 1 and 4 such tenants
    D  one of 16 tenants sends 64 times as much
    L  a lone request of 512 tokens

    P  as A, with more tenants than slots, which so move to the host and back

Unfairness is the largest deviation of a tenant's tokens from the mean. Fill is the
share of rows that hold tokens. Busy is the share of the time that the device needs for
its microbatches and steps, by their times when it has the next one before the last one
has ended. Moves are adapters that left a slot.

    python -m scripts.bench serve --output-dir bench
    python -m scripts.bench serve --model tiny --seconds 2 --tenants 4
"""

import argparse
import collections
import dataclasses
import itertools
import pathlib
import sys
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
from jaxlora.session.engine import (
    Call,
    Engine,
    OpenAdapter,
    PassCall,
    Piece,
    StepCall,
)
from jaxlora.session.operations import new_adapter, pass_call
from jaxlora.session.sampler import publish
from jaxlora.train.execute.step import optimizer_inputs
from scripts.bench.kernel_times import busy_ms, by_kind, ranked, trace
from scripts.bench.report import Rows, about, add_output_dir, needs_gpu, table
from scripts.bench.shapes import ANY_DEVICE, LARGE
from scripts.bench.workload import Workload

SIGMA = 0.6  # of the logarithm of lengths
HEAVY = 64  # times the load of another tenant
LONE_TOKENS = 512
POOL = 6  # batches that a tenant sends in turn
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
    """

    sizes: tuple[int, ...]
    slots: int
    samples: int = 8
    mean_tokens: int = 350

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
                for _ in range(POOL)
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
        self,
        engine: Engine,
        one: OpenAdapter,
        batches: Sequence[Sequence[Datum]],
        owners: dict[Call, str],
    ):
        """Sends nothing yet.

        Args:
            engine: The engine.
            one: Its adapter.
            batches: What it sends, in turn.
            owners: Gets the name of the adapter for each call.
        """
        self.one, self._engine, self._owners = one, engine, owners
        self._batches = itertools.cycle(batches)
        self._loss = ChosenLoss.of("cross_entropy", None)
        self.seconds: list[float] = []
        self.is_stopped = False

    def send(self) -> None:
        """Sends a batch and a step."""
        data, began = next(self._batches), time.perf_counter()
        call = pass_call(self._engine, data, self._loss, is_training=True)

        def done(result: object) -> None:
            self.seconds.append(time.perf_counter() - began)
            del self._owners[call]
            if not self.is_stopped:
                self.send()

        self._owners[call] = self.one.name
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
        # What the device was given: microbatches by rows, and tokens by adapter.
        self._microbatches: collections.Counter[int] = collections.Counter()
        self._tokens: collections.Counter[str] = collections.Counter()
        self._owners: dict[Call, str] = {}
        engine.on_queued = self._count
        self.times: dict[int, float] = {}  # of microbatches, and 0 of a step, in ms

    def _count(self, piece: Piece) -> None:
        self._microbatches[piece.rows] += 1
        for call, number in piece.parts:
            if isinstance(call, PassCall):
                tokens = len(call.samples[number].token_ids)
                self._tokens[self._owners.get(call, "")] += tokens

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
                self.datums(rng, case.lengths(rng, samples)) for _ in range(POOL)
            ]
            every.append(Tenant(self.engine, one, batches, self._owners))
        return every

    def close(self, tenants: Sequence[Tenant]) -> None:
        """Closes their adapters."""
        for one in tenants:
            one.is_stopped = True
        for one in tenants:
            self.engine.finish(one.one)
            self.engine.close(one.one)

    def run(
        self, tenants: Sequence[Tenant], counted: Sequence[Tenant], seconds: float
    ) -> dict[str, Any]:
        """Runs a row after a warm-up, and closes the tenants; returns its columns.

        Args:
            tenants: All tenants.
            counted: Those whose times and shares count.
            seconds: Time of the row.
        """
        for one in tenants:
            one.send()
        # Longer than a round of all tenants, in which their adapters come for the
        # first time.
        warm_up = 3 + seconds / 8 + len(tenants) / 6 if seconds > 3 else 0.0
        self._until(time.perf_counter() + warm_up)
        self._microbatches.clear()
        self._tokens.clear()
        before = self.engine._residence.num_moves
        for one in tenants:
            one.seconds.clear()
        began = time.perf_counter()
        self._until(began + seconds)
        seconds = time.perf_counter() - began
        moves = self.engine._residence.num_moves - before
        found = self._columns(counted, seconds) | {"moves": moves}
        for one in tenants:
            one.is_stopped = True
        for one in tenants:
            self.engine.finish(one.one)
            self.engine.close(one.one)
        return found

    def _until(self, end: float) -> None:
        while time.perf_counter() < end:
            self.engine.advance()

    def _columns(self, counted: Sequence[Tenant], seconds: float) -> dict[str, Any]:
        every = [x for one in counted for x in one.seconds]
        num_tokens = self._tokens.total()
        pieces = self._microbatches
        shares = np.array([self._tokens[one.one.name] for one in counted]) / seconds
        busy = sum(self.times[size] * number for size, number in pieces.items())
        quantile = lambda q: round(float(np.quantile(every, q)), 3) if every else None
        return {
            "tokens_per_second": round(num_tokens / seconds),
            "of_a_tenant": round(shares.mean()),
            "p50_s": quantile(0.5),
            "p99_s": quantile(0.99),
            "requests": len(every),
            "unfairness": round(float(np.abs(shares / shares.mean() - 1).max()), 3),
            "fill": round(num_tokens / sum(s * n for s, n in pieces.items()), 3),
            "busy": round(busy / 1e3 / seconds, 3),
            "pieces": {str(k): n for k, n in sorted(pieces.items())},
        }

    # ---- rows --------------------------------------------------------------------

    def singles(self) -> Iterator[dict[str, Any]]:
        """Times single pieces of work.

        Those "to the end" are from the call to the result. The others are means of
        several of them that are queued one after another.
        """
        engine, rng = self.engine, np.random.default_rng(1)
        adapters = [
            new_adapter(engine, f"a{i}", rank=self._case.rank, seed=i) for i in range(4)
        ]
        began = time.perf_counter()
        adapter = new_adapter(engine, "new", rank=self._case.rank)
        yield _row("make an adapter on the host", time.perf_counter() - began)
        engine.close(engine.open("new", adapter))
        began = time.perf_counter()
        engine.close(engine.open("new", adapter))
        jax.block_until_ready(engine.table.state.pending.is_finite)
        yield _row("open and close it", time.perf_counter() - began)
        some = [engine.open(f"a{i}", adapter) for i, adapter in enumerate(adapters)]
        loss = ChosenLoss.of("cross_entropy", None)

        def call(lengths: Sequence[int]) -> PassCall:
            data = self.datums(rng, lengths)
            return pass_call(engine, data, loss, is_training=True)

        for size in self._case.sizes:
            mean = min(self._case.mean_tokens, size)
            number = max(1, size // mean)
            calls = [call([size // number] * number) for _ in range(7)]
            for number, one in enumerate(calls):
                if number == 1:
                    engine.drain()
                    began = time.perf_counter()
                engine.submit(some[0], one)
                numbers = [*one.waiting]
                engine.run_layout(size, [(some[0], one, i) for i in numbers])
            engine.drain()
            seconds = (time.perf_counter() - began) / (len(calls) - 1)
            self.times[size] = 1e3 * seconds
            yield _row(f"microbatch of {size}", seconds)

        def steps() -> None:
            for one in some:
                engine.submit(one, StepCall(params=_RATE))
            for one in some:
                engine.finish(one)

        seconds = _median(steps) / len(some)
        self.times[0] = 1e3 * seconds
        yield _row("step of a slot", seconds)
        alone = min(LONE_TOKENS, self._case.sizes[0])

        def lone(one: PassCall) -> None:
            engine.submit(some[0], one)
            engine.submit(some[0], StepCall(params=_RATE))
            engine.finish(some[0])

        calls = iter([call([alone]) for _ in range(16)])
        seconds = _median(lambda: lone(next(calls)), 15)
        yield _row(f"L: lone request of {alone} tokens, to the end", seconds)
        no_tokenizer: Any = lambda: None

        def published() -> None:
            made = publish(engine, some[0], no_tokenizer)
            jax.block_until_ready(jax.tree.leaves(made._decoder.weights()[0].adapters))

        yield _row("publish, to the end", _median(published))
        for one in some:
            engine.close(one)

    def moves(self) -> Iterator[dict[str, Any]]:
        """Times adapters that leave their slots and come back, four at a time."""
        engine, rank = self.engine, self._case.rank
        adapters = [new_adapter(engine, f"a{i}", rank=rank, seed=i) for i in range(4)]
        some = [engine.open(f"a{i}", adapter) for i, adapter in enumerate(adapters)]

        def move() -> None:
            for one in some:
                engine.park(one)
            for one in some:
                engine.bring(one)

        def moved() -> None:
            move()
            jax.block_until_ready(engine.table.state.pending.is_finite)

        moved()
        yield _row("park and bring back, host", _median(move, 3) / len(some))
        yield _row("park and bring back, to the end", _median(moved) / len(some))
        here = engine.begin_copy(some[0])().parked.by_kind()
        engine.park(some[0])
        began = time.perf_counter()
        parked = engine.begin_copy(some[0])().parked.by_kind()
        seconds = time.perf_counter() - began
        engine.bring(some[0])
        back = engine.begin_copy(some[0])().parked.by_kind()
        same = all(
            np.array_equal(array, other[kind][path])
            for kind, own in here.items()
            for path, array in own.items()
            for other in (parked, back)
        )
        yield _row("copy of a parked adapter", seconds) | {"same_bits": same}
        for one in some:
            engine.close(one)

    def kernels(self) -> Iterator[dict[str, Any]]:
        """Splits the device's time of a microbatch of each size into kinds of work."""
        engine, rng = self.engine, np.random.default_rng(2)
        adapter = new_adapter(engine, "a", rank=self._case.rank)
        one, loss = engine.open("a", adapter), ChosenLoss.of("cross_entropy", None)
        mean, repeats = self._case.mean_tokens, 3
        for size in self._case.sizes:
            number = max(1, size // mean)
            data = self.datums(rng, [size // number] * number)

            def run(data: Sequence[Datum] = data, size: int = size) -> None:
                call = pass_call(engine, data, loss, is_training=True)
                engine.submit(one, call)
                engine.run_layout(size, [(one, call, i) for i in [*call.waiting]])
                engine.drain()

            run()
            found = trace(run, repeats)
            named = [(kernel.name, kernel.ms) for kernel in found]
            for name, count, ms in ranked(named)[:15]:
                line = f"{ms / repeats:9.3f} ms {count // repeats:5} x {name[:80]}"
                print(line, file=sys.stderr)
            kinds = {k: round(ms / repeats, 2) for k, ms in by_kind(named, 6).items()}
            yield _row(
                f"kernels of a microbatch of {size}", busy_ms(found) / repeats / 1e3
            ) | {"number": len(found) // repeats, "kinds": kinds}
        engine.close(one)

    def closed_loop(self, number: int, seconds: float) -> dict[str, Any]:
        """Row A, or P."""
        tenants = self.tenants(number)
        letter = "P" if number > self._case.slots else "A"
        return {"row": f"{letter}: {number} tenants"} | self.run(
            tenants, tenants, seconds
        )

    def heavy(self, number: int, seconds: float) -> dict[str, Any]:
        """Row D, whose times and shares are those of the other tenants."""
        tenants = self.tenants(number, first=HEAVY)
        found = self.run(tenants, tenants[1:], seconds)
        others = (number - 1) * found["of_a_tenant"]
        found["of_the_heavy"] = round(found["tokens_per_second"] - others)
        return {"row": f"D: {number} tenants, one of {HEAVY} times the load"} | found


def _row(name: str, seconds: float) -> dict[str, Any]:
    return {"row": name, "ms": round(1e3 * seconds, 2)}


def _median(run: Callable[[], object], times: int = 7) -> float:
    """Returns the seconds of a call."""
    run()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return float(np.median(found))


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the single pieces of work, and the loads."""
    ms = [row for row in rows if "ms" in row]
    loads = [row for row in rows if "tokens_per_second" in row]
    columns = (
        "row", "tokens_per_second", "of_offline", "of_a_tenant", "of_the_heavy",
        "p50_s", "p99_s", "unfairness", "fill", "busy", "moves",
    )  # fmt: skip
    return f"{table(ms, ('row', 'ms'))}\n\n{table(loads, columns)}"


def add_load_options(out: argparse.ArgumentParser) -> None:
    """Adds the options of the load, which a server over HTTP has, too."""
    add_output_dir(out)
    out.add_argument("--model", choices=[*ANY_DEVICE, LARGE], default=LARGE)
    out.add_argument("--layers", type=int, help="replaces the model's own number")
    out.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    out.add_argument("--sizes", type=int, nargs="+", default=[512, 2048, 8192])
    out.add_argument("--block-tokens", type=int, default=64)
    out.add_argument("--slots", type=int, default=32)
    out.add_argument("--rank", type=int, default=16)
    out.add_argument("--tenants", type=int, nargs="+", default=[16, 1, 4, 64])
    out.add_argument("--samples", type=int, default=8, help="in a batch")
    out.add_argument("--mean-tokens", type=int, default=350, help="in a sample")
    out.add_argument("--seconds", type=float, default=15.0, help="of a row")
    out.add_argument(
        "--first-seconds",
        type=float,
        default=60.0,
        help="of the first number of tenants, whose shares are compared",
    )


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_load_options(out)
    out.add_argument(
        "--rows",
        nargs="+",
        choices=["kernels", "offline", "A", "D"],
        default=["offline", "A", "D"],
        help="besides single pieces of work; kernels: kinds of kernels, on a GPU; "
        "offline alone: nothing else, and no engine",
    )


def case_of(args: argparse.Namespace) -> Case:
    """Returns the settings of a load."""
    return Case(
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
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options.

    Raises:
        JaxloraError: The model is too large for this device.
    """
    if (why := needs_gpu(args.model, jax.default_backend() == "gpu")) is not None:
        raise JaxloraError(why)
    case = case_of(args)
    rows, began = Rows(args.output_dir, "serve", tables), time.perf_counter()
    device = about(jax.devices()[0].device_kind)

    def add(found: Mapping[str, Any]) -> None:
        at = {"at_s": round(time.perf_counter() - began, 1)}
        rows.add({**found, **at, "peak_gib": training.peak_gib(), **device})

    most = max(args.tenants)
    jobs = min(most, 16)
    offline = Offline(case, jobs, compiles="offline" in args.rows)
    if args.rows == ["offline"]:
        add({"row": "offline trainer", **offline.measure()})
        return
    load = Load(case, _engine(case, offline.trained))
    estimate = {"estimate": str(load.engine.memory_estimate)}
    add(_row("load and compile", time.perf_counter() - began) | estimate)
    for found in load.singles():  # which the others need, too
        add(found)
    for found in load.kernels() if "kernels" in args.rows else ():
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
        add(against(load.closed_loop(first, args.first_seconds)))
    if "D" in args.rows:
        add(against(load.heavy(first, args.seconds)))
    for found in load.moves():
        add(found)
    for number in others if "A" in args.rows else ():
        add(against(load.closed_loop(number, args.seconds)))
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
