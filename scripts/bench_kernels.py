"""Times LoRA linears on the present GPU, as ratios to the frozen layer through cuBLAS.

Every figure is device time: the sum of a call's kernels as CUPTI counts them, or CUDA
events for torch. The frozen layer is `y = x W` and `dx = dy W'`; everything else also
returns the gradients of A and B. All methods of a case run in one process.

    python scripts/bench_kernels.py --output-dir bench
"""

import argparse
import csv
import dataclasses
import datetime
import functools
import importlib.util
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import Dropout, Projection, dropout_keys, multi_lora_linears

BLOCK = 128  # token rows of a block
FIELDS = (
    "case",
    "method",
    "pass",
    "median_us",
    "p10_us",
    "p90_us",
    "ratio",
    "commit",
    "device",
    "versions",
    "date",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Linears that are timed together.

    Attributes:
        name: What tables call it.
        tokens: T.
        groups: (K, (N, ...)) of linears that share an input.
        ranks: Of the adapters, which share the tokens equally.
        rate: Dropout rate.
    """

    name: str
    tokens: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    ranks: tuple[int, ...] = (16,)
    rate: float = 0.1


_SQUARE = ((4096, (4096,)),)
_LLAMA_8B = (  # q k v; o; gate up; down
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
)
_FOUR = (16,) * 4
CASES = (
    Case("4096x4096, 1 adapter", 8192, _SQUARE),
    Case("4096x4096, 4 adapters", 8192, _SQUARE, _FOUR),
    Case("4096x4096, 4 adapters, no dropout", 8192, _SQUARE, _FOUR, 0.0),
    Case("4096x14336, 4 adapters", 8192, ((4096, (14336,)),), _FOUR),
    Case("14336x4096, 4 adapters", 8192, ((14336, (4096,)),), _FOUR),
    Case("16384 tokens, 4096x4096, 4 adapters", 16384, _SQUARE, _FOUR),
    Case("4096x1024, 4 adapters", 8192, ((4096, (1024,)),), _FOUR),
    Case("Llama-3.1-8B layer, ranks 8 to 64", 8192, _LLAMA_8B, (8, 16, 32, 64)),
    Case("32 adapters of rank 64, 256 tokens each", 8192, _SQUARE, (64,) * 32),
    Case("4 adapters of rank 8", 8192, _SQUARE, (8,) * 4),
    Case("3 adapters of rank 8, one of rank 128", 8192, _SQUARE, (8, 8, 8, 128)),
    Case("4 adapters of rank 128", 8192, _SQUARE, (128,) * 4),
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Quantiles of one function's device time, in microseconds."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(microseconds: list[float]) -> "Timing":
        return Timing(*np.quantile(microseconds, [0.5, 0.1, 0.9]).tolist())


@dataclasses.dataclass(frozen=True)
class Group:
    """Linears that share x; a pytree through `arrays`.

    Attributes:
        x: T K.
        matrices: (w, a, b) of each linear.
        dy: T N of each linear.
    """

    x: jax.Array
    matrices: list[tuple[jax.Array, jax.Array, jax.Array]]
    dy: list[jax.Array]


jax.tree_util.register_dataclass(Group)


@dataclasses.dataclass(frozen=True)
class Routing:
    """What the linears of a case share.

    Attributes:
        scaling, rank: Of each adapter.
        block_adapter: Of each token block.
        rate: Of dropout, one for all adapters; 0: none.
        token_index: The token's index in its adapter's batch.
    """

    scaling: jax.Array
    rank: jax.Array
    block_adapter: jax.Array
    rate: float
    token_index: jax.Array

    def dropout(self, projection: int) -> Dropout | None:
        """Of one projection."""
        if self.rate == 0:
            return None
        g = self.rank.shape[0]
        seed, step = jnp.arange(g), jnp.zeros(g, jnp.int32)
        key = dropout_keys(seed, step, layer=0, projection=projection)
        return Dropout(key, jnp.full(g, self.rate), self.token_index)


def arrays(case: Case) -> tuple[list[Group], Routing]:
    """Random operands of a case."""
    g, t = len(case.ranks), case.tokens
    keys = iter(jax.random.split(jax.random.key(0), 64))
    bf16 = jnp.bfloat16
    live = jnp.arange(max(case.ranks)) < jnp.array(case.ranks)[:, None]

    def matrices(k, n):
        r = max(case.ranks)
        w = jax.random.normal(next(keys), (k, n)) * k**-0.5
        a = jax.random.normal(next(keys), (g, k, r)) * live[:, None] * k**-0.5
        b = jax.random.normal(next(keys), (g, r, n)) * live[:, :, None]
        return w.astype(bf16), a.astype(bf16), b.astype(bf16)

    groups = [
        Group(
            x=jax.random.normal(next(keys), (t, k), bf16),
            matrices=[matrices(k, n) for n in widths],
            dy=[jax.random.normal(next(keys), (t, n), bf16) for n in widths],
        )
        for k, widths in case.groups
    ]
    blocks = jnp.repeat(jnp.arange(g), t // BLOCK // g).astype(jnp.int32)
    routing = Routing(
        scaling=jnp.full(g, 2.0),
        rank=jnp.array(case.ranks, jnp.int32),
        block_adapter=blocks,
        rate=case.rate,
        token_index=jnp.arange(t, dtype=jnp.int32) % (t // g),
    )
    return groups, routing


def frozen(x, matrices, routing):
    """The base layers alone."""
    del routing
    return [x @ w for w, _, _ in matrices]


def ours(implementation, x, matrices, routing):
    """`multi_lora_linears`."""
    made = [
        Projection(
            w=w,
            a=a,
            b=b,
            scaling=routing.scaling,
            rank=routing.rank,
            dropout=routing.dropout(i),
        )
        for i, (w, a, b) in enumerate(matrices)
    ]
    return multi_lora_linears(
        x, made, routing.block_adapter, implementation=implementation
    )


def ragged(x, matrices, routing):
    """`lax.ragged_dot` twice, as in SkyRL tx; without dropout."""
    out = []
    for w, a, b in matrices:
        sizes = jnp.bincount(routing.block_adapter, length=a.shape[0]) * BLOCK
        s = jax.lax.ragged_dot(x, a, sizes) * routing.scaling[0].astype(x.dtype)
        out.append(x @ w + jax.lax.ragged_dot(s, b, sizes))
    return out


def static_slices(x, matrices, routing):
    """A static slice for each adapter; without dropout."""
    out = []
    for w, a, b in matrices:
        rows = jnp.split(x, a.shape[0])
        delta = [
            part @ a[i] @ b[i] * routing.scaling[i].astype(x.dtype)
            for i, part in enumerate(rows)
        ]
        out.append(x @ w + jnp.concatenate(delta))
    return out


def one_by_one(x, matrices, routing):
    """Separate layers for each adapter, as separate jobs would run."""
    rows, num_slots = x.shape[0], matrices[0][1].shape[0]
    out = []
    for i in range(num_slots):
        one = slice(i, i + 1)
        here = slice(i * rows // num_slots, (i + 1) * rows // num_slots)
        alone = Routing(
            scaling=routing.scaling[one],
            rank=routing.rank[one],
            block_adapter=jnp.zeros(rows // num_slots // BLOCK, jnp.int32),
            rate=routing.rate,
            token_index=routing.token_index[here],
        )
        own = [(w, a[one], b[one]) for w, a, b in matrices]
        out.append(ours("xla", x[here], own, alone))
    return [jnp.concatenate(parts) for parts in zip(*out, strict=True)]


METHODS: dict[str, Callable] = {
    "frozen": frozen,
    "jaxlora mosaic": functools.partial(ours, "mosaic"),
    "jaxlora xla": functools.partial(ours, "xla"),
    "ragged_dot, no dropout": ragged,
    "static slices, no dropout": static_slices,
    "a layer for each adapter": one_by_one,
}


def passes(method, groups, routing, *, with_gradient: bool):
    """Outputs of every group and, if asked for, gradients of x, A and B."""
    out = []
    for group in groups:
        weights = [w for w, _, _ in group.matrices]
        adapters = [(a, b) for _, a, b in group.matrices]

        def forward(x, adapters, weights=weights):
            matrices = [(w, *ab) for w, ab in zip(weights, adapters, strict=True)]
            return tuple(method(x, matrices, routing))

        if not with_gradient:
            out.append(forward(group.x, adapters))
            continue
        y, vjp = jax.vjp(forward, group.x, adapters)
        gradients = vjp(tuple(group.dy))
        out.append((y, gradients[0] if method is frozen else gradients))
    return out


def time_jax(
    case: Case, repeats: int, methods: Sequence[str]
) -> Iterator[tuple[str, str, Timing]]:
    """(method, pass, timing) of JAX methods."""
    groups, routing = arrays(case)
    cupti = profiler.Cupti(finalize=False)
    for name in methods:
        for what in ("forward", "both"):
            run = functools.partial(
                passes, METHODS[name], routing=routing, with_gradient=what == "both"
            )
            _, times = cupti.measure(jax.jit(run), iterations=repeats)(groups)
            assert times is not None, "CUPTI saw no kernel"
            yield name, what, Timing.of([1000 * t for t in times])


def time_torch(case: Case, repeats: int) -> Iterator[tuple[str, str, Timing]]:
    """(method, pass, timing) of what torch users run, by CUDA events."""
    import torch

    device, dtype = "cuda", torch.bfloat16
    g, r, rows = len(case.ranks), max(case.ranks), case.tokens // len(case.ranks)

    make = functools.partial(torch.randn, device=device, dtype=dtype)

    def tensors(k, widths):
        x = make(case.tokens, k).requires_grad_()
        matrices = [
            (
                make(n, k) * k**-0.5,
                (make(g, r, k) * k**-0.5).requires_grad_(),
                make(g, n, r).requires_grad_(),
            )
            for n in widths
        ]
        return x, matrices, [make(case.tokens, n) for n in widths]

    def peft(x, w, a, b):
        """As PEFT computes a LoRA linear, one adapter's rows after the other."""
        drop = functools.partial(torch.nn.functional.dropout, p=case.rate)
        delta = [
            torch.nn.functional.linear(
                torch.nn.functional.linear(drop(x[i * rows : (i + 1) * rows]), a[i]),
                b[i],
            )
            for i in range(g)
        ]
        return torch.nn.functional.linear(x, w) + 2.0 * torch.cat(delta)

    offsets = torch.arange(1, g + 1, device=device, dtype=torch.int32) * rows

    def grouped(x, w, a, b):
        """`torch._grouped_mm` twice, as in Megatron-Bridge; without dropout."""
        s = torch._grouped_mm(x, a.transpose(1, 2), offs=offsets)
        delta = torch._grouped_mm(s, b.transpose(1, 2), offs=offsets)
        return torch.nn.functional.linear(x, w) + 2.0 * delta

    groups = [tensors(k, widths) for k, widths in case.groups]
    for name, method in (
        ("torch, as PEFT", peft),
        ("torch.compile, as PEFT", torch.compile(peft)),
        ("torch._grouped_mm, no dropout", grouped),
    ):
        for what in ("forward", "both"):

            def run(method=method, what=what):
                for x, matrices, dy in groups:
                    y = [method(x, *matrix) for matrix in matrices]
                    if what == "both":
                        trained = [z for _, *ab in matrices for z in ab]
                        torch.autograd.grad(y, (x, *trained), dy)

            times = []
            for i in range(repeats + 3):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                if i >= 3:
                    times.append(1000 * start.elapsed_time(end))
            yield name, what, Timing.of(times)


def commit() -> str:
    """The commit that is timed, or `unknown` outside a checkout."""
    out = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return out.stdout.strip() or "unknown"


def versions() -> str:
    """Of what was timed."""
    found = [f"jax {jax.__version__}"]
    if importlib.util.find_spec("torch"):
        import torch

        found.append(f"torch {torch.__version__}")
    return ", ".join(found)


def plot(rows: list[dict], path: Path) -> None:
    """Bars of the ratio of forward and backward, by case and method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    both = [row for row in rows if row["pass"] == "both"]
    cases = list(dict.fromkeys(row["case"] for row in both))
    methods = list(dict.fromkeys(row["method"] for row in both))
    height = 0.8 / len(methods)
    figure, axes = plt.subplots(figsize=(9, 1.1 * len(cases) + 1))
    for i, method in enumerate(methods):
        found = {row["case"]: row["ratio"] for row in both if row["method"] == method}
        at = [j + i * height for j, case in enumerate(cases) if case in found]
        axes.barh(at, [found[c] for c in cases if c in found], height, label=method)
    axes.set_yticks(np.arange(len(cases)) + 0.4, cases)
    axes.set_xlabel("time / frozen layer, forward + backward")
    axes.set_xlim(0, 3)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("bench"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--cases", type=int, nargs="*", help="indices; all by default")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with_torch = not args.no_torch and importlib.util.find_spec("torch") is not None
    about = {
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }
    rows = []
    chosen = range(len(CASES)) if args.cases is None else args.cases
    for case in (CASES[i] for i in chosen):
        base: dict[str, float] = {}
        timings = time_jax(case, args.repeats, args.methods)
        if with_torch:
            timings = (*timings, *time_torch(case, args.repeats))
        for method, what, timing in timings:
            base.setdefault(what, timing.median)
            row = {
                "case": case.name,
                "method": method,
                "pass": what,
                "median_us": round(timing.median, 1),
                "p10_us": round(timing.p10, 1),
                "p90_us": round(timing.p90, 1),
                "ratio": round(timing.median / base[what], 3),
                **about,
            }
            rows.append(row)
            print(
                f"{case.name:42} {method:30} {what:8} {row['median_us']:9} us "
                f"{row['ratio']:6}",
                flush=True,
            )
    with (args.output_dir / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, args.output_dir / "kernels.png")


if __name__ == "__main__":
    main()
