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
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import Dropout, dropout_keys, multi_lora_linear

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
        shapes: (K, N) of each linear.
        ranks: Of the adapters, which share the tokens equally.
        rate: Dropout rate.
    """

    name: str
    tokens: int
    shapes: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...] = (16,)
    rate: float = 0.1


_LLAMA_8B = (  # q, k, v, o, gate, up, down
    (4096, 4096),
    *[(4096, 1024)] * 2,
    (4096, 4096),
    *[(4096, 14336)] * 2,
    (14336, 4096),
)
CASES = (
    Case("4096x4096, 1 adapter", 8192, ((4096, 4096),)),
    Case("4096x4096, 4 adapters", 8192, ((4096, 4096),), (16,) * 4),
    Case("4096x4096, 4 adapters, no dropout", 8192, ((4096, 4096),), (16,) * 4, 0.0),
    Case("4096x14336, 4 adapters", 8192, ((4096, 14336),), (16,) * 4),
    Case("14336x4096, 4 adapters", 8192, ((14336, 4096),), (16,) * 4),
    Case("16384 tokens, 4096x4096, 4 adapters", 16384, ((4096, 4096),), (16,) * 4),
    Case("4096x1024, 4 adapters", 8192, ((4096, 1024),), (16,) * 4),
    Case("Llama-3.1-8B layer, ranks 8 to 64", 8192, _LLAMA_8B, (8, 16, 32, 64)),
    Case("32 adapters of rank 64, 256 tokens each", 8192, ((4096, 4096),), (64,) * 32),
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


def arrays(case: Case) -> tuple[list[dict], Dropout | None]:
    """(x, w, dy, a, b and routing) of each linear, and the dropout they share."""
    g, t = len(case.ranks), case.tokens
    keys = iter(jax.random.split(jax.random.key(0), 5 * len(case.shapes)))
    r = max(case.ranks)
    live = jnp.arange(r) < jnp.array(case.ranks)[:, None]
    blocks = jnp.repeat(jnp.arange(g), t // BLOCK // g).astype(jnp.int32)
    bf16 = jnp.bfloat16
    linears = []
    for k, n in case.shapes:
        linears.append(
            {
                "x": jax.random.normal(next(keys), (t, k), bf16),
                "w": (jax.random.normal(next(keys), (k, n)) * k**-0.5).astype(bf16),
                "dy": jax.random.normal(next(keys), (t, n), bf16),
                "a": (
                    jax.random.normal(next(keys), (g, k, r)) * live[:, None] * k**-0.5
                ).astype(bf16),
                "b": (
                    jax.random.normal(next(keys), (g, r, n)) * live[:, :, None]
                ).astype(bf16),
                "scaling": jnp.full(g, 2.0),
                "rank": jnp.array(case.ranks, jnp.int32),
                "block_adapter": blocks,
            }
        )
    if case.rate == 0:
        return linears, None
    key = dropout_keys(jnp.arange(g), jnp.zeros(g, jnp.int32), layer=0, projection=0)
    token = jnp.arange(t, dtype=jnp.int32) % (t // g)
    return linears, Dropout(key, jnp.full(g, case.rate), token)


def frozen(x, w, **_):
    """The base layer alone."""
    return x @ w


def ours(implementation, x, w, a, b, scaling, rank, block_adapter, dropout):
    """`multi_lora_linear`."""
    return multi_lora_linear(
        x,
        w,
        a,
        b,
        scaling,
        block_adapter,
        rank=rank,
        dropout=dropout,
        implementation=implementation,
    )


def ragged(x, w, a, b, scaling, rank, block_adapter, dropout):
    """`lax.ragged_dot` twice, as in SkyRL tx; without dropout."""
    del rank, dropout
    sizes = jnp.bincount(block_adapter, length=a.shape[0]) * BLOCK
    s = jax.lax.ragged_dot(x, a, sizes) * scaling[0].astype(x.dtype)
    return x @ w + jax.lax.ragged_dot(s, b, sizes)


def static_slices(x, w, a, b, scaling, rank, block_adapter, dropout):
    """A static slice for each adapter; without dropout."""
    del rank, block_adapter, dropout
    rows = x.shape[0] // a.shape[0]
    delta = [
        (x[i * rows : (i + 1) * rows] @ a[i]) @ b[i] * scaling[i].astype(x.dtype)
        for i in range(a.shape[0])
    ]
    return x @ w + jnp.concatenate(delta)


def one_by_one(x, w, a, b, scaling, rank, block_adapter, dropout):
    """A separate layer for each adapter, as separate jobs would run."""
    rows, blocks = x.shape[0] // a.shape[0], block_adapter.shape[0] // a.shape[0]
    out = []
    for i in range(a.shape[0]):
        mine = slice(i * rows, (i + 1) * rows)
        y = multi_lora_linear(
            x[mine],
            w,
            a[i : i + 1],
            b[i : i + 1],
            scaling[i : i + 1],
            jnp.zeros(blocks, jnp.int32),
            rank=rank[i : i + 1],
            dropout=None
            if dropout is None
            else Dropout(
                dropout.key[i : i + 1],
                dropout.rate[i : i + 1],
                dropout.token_index[mine],
            ),
        )
        out.append(y)
    return jnp.concatenate(out)


METHODS: dict[str, Callable] = {
    "frozen": frozen,
    "jaxlora mosaic": functools.partial(ours, "mosaic"),
    "jaxlora xla": functools.partial(ours, "xla"),
    "ragged_dot, no dropout": ragged,
    "static slices, no dropout": static_slices,
    "a layer for each adapter": one_by_one,
}


def time_jax(case: Case, repeats: int) -> Iterator[tuple[str, str, Timing]]:
    """(method, pass, timing) of every JAX method."""
    linears, dropout = arrays(case)
    cupti = profiler.Cupti(finalize=False)
    for name, method in METHODS.items():

        def layer(linear, with_gradient, name=name, method=method):
            rest = {k: v for k, v in linear.items() if k not in ("x", "a", "b", "dy")}
            if name != "frozen":
                rest["dropout"] = dropout

            def forward(x, a, b):
                return method(x=x, a=a, b=b, **rest)

            operands = linear["x"], linear["a"], linear["b"]
            if not with_gradient:
                return forward(*operands)
            y, vjp = jax.vjp(forward, *operands)
            gradients = vjp(linear["dy"])
            return (y, *(gradients[:1] if name == "frozen" else gradients))

        for what, with_gradient in (("forward", False), ("both", True)):
            run = jax.jit(
                lambda linears, layer=layer, with_gradient=with_gradient: [
                    layer(linear, with_gradient) for linear in linears
                ]
            )
            _, times = cupti.measure(run, iterations=repeats)(linears)
            assert times is not None, "CUPTI saw no kernel"
            yield name, what, Timing.of([1000 * t for t in times])


def time_torch(case: Case, repeats: int) -> Iterator[tuple[str, str, Timing]]:
    """(method, pass, timing) of what torch users run, by CUDA events."""
    import torch

    device, dtype = "cuda", torch.bfloat16
    g, r, rows = len(case.ranks), max(case.ranks), case.tokens // len(case.ranks)

    def tensors(k, n):
        make = functools.partial(torch.randn, device=device, dtype=dtype)
        x = make(case.tokens, k).requires_grad_()
        w = make(n, k) * k**-0.5
        a = (make(g, r, k) * k**-0.5).requires_grad_()
        b = make(g, n, r).requires_grad_()
        return x, w, a, b, make(case.tokens, n)

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

    linears = [tensors(k, n) for k, n in case.shapes]
    for name, method in (
        ("torch, as PEFT", peft),
        ("torch.compile, as PEFT", torch.compile(peft)),
        ("torch._grouped_mm, no dropout", grouped),
    ):
        for what in ("forward", "both"):

            def run(method=method, what=what):
                for x, w, a, b, dy in linears:
                    y = method(x, w, a, b)
                    if what == "both":
                        torch.autograd.grad(y, (x, a, b), dy)

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
        timings = time_jax(case, args.repeats)
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
