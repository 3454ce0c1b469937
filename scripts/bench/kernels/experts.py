"""Times linears of experts on a Hopper GPU, as ratios to the frozen experts alone.

All times are device times: the sum of a call's kernels as CUPTI counts them. The frozen
experts are `y = x W[e]` and `dx = dy W[e]'` by the same kernels, with the tokens of one
adapter; everything else also returns the gradients of A and B, and casts A and B. The
rows are in their places before; `layer` is the whole MLP, from tokens to tokens.

Prints a table of ratios. With --output-dir, writes experts.jsonl and experts.md.

    python -m scripts.bench experts --output-dir bench
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxlora.models.blocks.mlp import swiglu
from jaxlora.pallas_kernels import (
    Projection,
    RowPlan,
    block_rows_for,
    expert_input,
    expert_linears,
    expert_output,
    gather_rows,
    kernel_settings,
    route_rows,
)
from jaxlora.pallas_kernels.mosaic.products import expand_work, run_expand
from jaxlora.pallas_kernels.operands import Term, blocks_of
from scripts.bench.kernel_times import device_times
from scripts.bench.report import Row, Rows, Timing, about, add_output_dir, require_gpu

BLOCK = 64  # token rows of a block
_SKEW = 0.5  # deviation of the logarithm of the experts' popularity


@dataclasses.dataclass(frozen=True)
class ExpertModel:
    """The sizes of a model's experts.

    Attributes:
        name: Name in tables.
        experts: X.
        chosen: k, the experts of a token.
        width: D.
        mlp_width: F.
    """

    name: str
    experts: int
    chosen: int
    width: int
    mlp_width: int

    def linears(self, which: str) -> tuple[int, tuple[int, ...]]:
        """Returns K, and N of each of the linears `gate and up` or `down`."""
        if which == "down":
            return self.mlp_width, (self.width,)
        return self.width, (self.mlp_width, self.mlp_width)


QWEN3_30B = ExpertModel("Qwen3-30B-A3B", 128, 8, 2048, 768)
GPT_OSS_20B = ExpertModel("gpt-oss-20b", 32, 4, 2880, 2880)


@dataclasses.dataclass(frozen=True)
class ExpertCase:
    """Linears that are timed together.

    Attributes:
        model: The model.
        which: `gate and up`, `down`, or `layer` for the whole MLP.
        tokens: T.
        adapters: G, which share the tokens equally.
        rank: Rank of each adapter.
    """

    model: ExpertModel
    which: str
    tokens: int
    adapters: int = 4
    rank: int = 16

    @property
    def name(self) -> str:
        """Name in tables."""
        adapters = "1 adapter" if self.adapters == 1 else f"{self.adapters} adapters"
        model = f"{self.model.name}, {self.which}, {self.tokens} tokens"
        return f"{model}, {adapters} of rank {self.rank}"

    @property
    def frozen(self) -> "ExpertCase":
        """The case whose frozen linears are the denominator."""
        return dataclasses.replace(self, adapters=1, rank=16)


def _cases() -> Iterator[ExpertCase]:
    for tokens in (8192, 32768):
        for which in ("gate and up", "down", "layer"):
            for adapters, rank in ((4, 16), (4, 2), (1, 16)):
                yield ExpertCase(QWEN3_30B, which, tokens, adapters, rank)
    for which in ("gate and up", "down", "layer"):
        yield ExpertCase(GPT_OSS_20B, which, 8192)


CASES = tuple(_cases())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Random operands of a case.

    Attributes:
        x: Rows of experts, [S, K]; of a layer, tokens [T, D].
        linears: The linears; of a layer, gate and up and then down.
        dy: The gradient of each result.
        plan: The rows.
        weights: Weights of the tokens' copies, [T, k].
    """

    x: Array
    linears: list[Projection]
    dy: list[Array]
    plan: RowPlan
    weights: Array


def operands(case: ExpertCase) -> Operands:
    """Makes a case's random operands; to be jitted."""
    model, g, t = case.model, case.adapters, case.tokens
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 16))

    def normal(*shape, scale=1.0, dtype=jnp.bfloat16):
        drawn = jax.random.normal(next(keys), shape, dtype)
        return drawn * jnp.asarray(scale, dtype)

    def linear(k, n):
        slots = model.experts * g
        return Projection(
            w=normal(model.experts, k, n, scale=k**-0.5),
            a=normal(slots, k, case.rank, scale=k**-0.5, dtype=jnp.float32),
            b=normal(slots, case.rank, n, scale=0.1, dtype=jnp.float32),
            scaling=jnp.full(g, 2.0),
        )

    liked = _SKEW * normal(model.experts, dtype=jnp.float32)
    scores = jax.random.gumbel(next(keys), (t, model.experts)) + liked
    ids = jax.lax.top_k(scores, model.chosen)[1].astype(jnp.int32)
    adapter = jnp.arange(t // BLOCK, dtype=jnp.int32) * g // (t // BLOCK)
    shapes = ("gate and up", "down") if case.which == "layer" else (case.which,)
    made = [linear(k, n) for k, widths in map(model.linears, shapes) for n in widths]
    rows = block_rows_for("mosaic", made, g, t * model.chosen / (model.experts * g))
    plan = route_rows(ids, adapter, model.experts, g, block_rows=rows)
    weights = jax.nn.softmax(normal(t, model.chosen, dtype=jnp.float32))
    if case.which == "layer":
        x, dy = normal(t, model.width), [normal(t, model.width)]
        return Operands(x, made, dy, plan, weights)
    k, widths = model.linears(case.which)
    rows = functools.partial(gather_rows, plan=plan)
    dy = [rows(normal(t, n)) for n in widths]
    return Operands(rows(normal(t, k)), made, dy, plan, weights)


def frozen(given: Operands) -> list[Array]:
    """Computes the frozen linears and the gradient of x by the kernels of experts."""
    x, plan, blocks = given.x, given.plan, blocks_of(given.plan)
    slots = plan.num_experts * plan.num_adapters
    off = jnp.zeros((1, slots))
    (settings,) = kernel_settings(off, jnp.zeros((1, slots), jnp.int32), None)

    def terms(rows, transposed):
        for one, p in zip(rows, given.linears, strict=True):
            s = jnp.zeros((x.shape[0], 16), x.dtype)
            shape = p.dense_w.shape[1 if transposed else 2]
            b = jnp.zeros((slots, *((shape, 16) if transposed else (16, shape))))
            yield Term(one, p.dense_w, s, b.astype(x.dtype), settings)

    run = lambda some, transposed: run_expand(
        expand_work(some, plan.expert, blocks, transposed=transposed)
    )
    y = [run([one], False) for one in terms([x] * len(given.linears), False)]
    return [*y, run(list(terms(given.dy, True)), True)]


def linears(given: Operands) -> Any:
    """Computes linears with LoRA, forward and backward."""

    def forward(x, tables):
        return expert_linears(
            x, _with(given.linears, tables), given.plan, implementation="mosaic"
        )

    y, back = jax.vjp(forward, given.x, [(p.a, p.b) for p in given.linears])
    return y, back(tuple(given.dy))


def layer(given: Operands) -> Any:
    """Computes the MLP of a layer, forward and backward."""

    def forward(x, weights, tables):
        *up, down = _with(given.linears, tables)
        plan, kernels = given.plan, {"implementation": "mosaic"}
        rows, s = expert_input(x, up, plan, **kernels)
        h = swiglu(*expert_linears(rows, up, plan, s=s, **kernels))
        return expert_output(h, down, weights, plan, **kernels)

    tables = [(p.a, p.b) for p in given.linears]
    y, back = jax.vjp(forward, given.x, given.weights, tables)
    return y, back(*given.dy)


def _with(linears: Sequence[Projection], tables) -> list[Projection]:
    pairs = zip(linears, tables, strict=True)
    return [dataclasses.replace(p, a=a, b=b) for p, (a, b) in pairs]


def method(case: ExpertCase) -> Callable[[Operands], Any]:
    """Returns what computes a case with LoRA."""
    return layer if case.which == "layer" else linears


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--repeats", type=int, default=20)
    listed = "; ".join(f"{i}: {case.name}" for i, case in enumerate(CASES))
    out.add_argument(
        "--cases",
        type=int,
        nargs="*",
        choices=range(len(CASES)),
        default=range(len(CASES)),
        help=f"indices, by default all ({listed})",
        metavar="I",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    require_gpu("experts")
    end = about(jax.devices()[0].device_kind)
    rows = Rows(args.output_dir, "experts", _table)

    @functools.cache
    def frozen_us(case: ExpertCase) -> float:
        return _measured(case, frozen, args.repeats).median

    for case in (CASES[i] for i in args.cases):
        timing = _measured(case, method(case), args.repeats)
        row = {"case": case.name, **timing.columns("median_us", 1), "ratio": None}
        if case.which != "layer":
            row["frozen_us"] = round(base := frozen_us(case.frozen), 1)
            row["ratio"] = round(timing.median / base, 3)
        rows.add(row | end)
    print(rows.tables())


def _measured(case: ExpertCase, run: Callable, repeats: int) -> Timing:
    given = jax.jit(functools.partial(operands, case))()
    return Timing.of(device_times(jax.jit(run), given, repeats=repeats))


def _table(rows: Sequence[Row]) -> str:
    lines = ["| case | us | frozen, us | ratio |", "|---|---|---|---|"]
    for row in rows:
        cells = row["case"], row["median_us"], row.get("frozen_us"), row["ratio"]
        lines.append(f"| {' | '.join('' if c is None else str(c) for c in cells)} |")
    return "\n".join(lines)
