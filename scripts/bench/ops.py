"""Times the operations around the linears of a training step.

These are the loss head, attention by each implementation, norm, MLP activation and
rotary positions, at the sizes of Llama-3.1-8B and a microbatch of 8,192 tokens, forward
and forward + backward. Device time is the sum of a call's kernels as CUPTI counts them.
Wall time also has what CUPTI does not count, such as filling memory with zeros.

Prints a table. With --output-dir, writes parts.csv. Needs a GPU.

    jaxlora bench ops --output-dir bench
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import (
    about,
    device_times,
    dicts_table,
    require_gpu,
    write_csv,
)
from jaxlora.bench.shapes import LARGE, config_json
from jaxlora.bench.tokens import TARGET_SHARE, Lengths
from jaxlora.hf.config import model_config
from jaxlora.modules.attention import (
    AttentionImplementation,
    compiler_options,
    packed_attention,
)
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.loss import target_nll
from jaxlora.modules.mlp import swiglu
from jaxlora.modules.norm import rms_norm
from jaxlora.modules.rope import apply_rope
from jaxlora.modules.triton_attention import triton_unsupported

MODEL = model_config(config_json(LARGE))
T, D, F, V = 8192, MODEL.hidden_size, MODEL.intermediate_size, MODEL.vocab_size
HEADS, KV_HEADS = MODEL.num_heads, MODEL.num_kv_heads
HEAD_DIM = MODEL.head_dim
LONGEST = 2048


@dataclasses.dataclass(frozen=True)
class Part:
    """An operation to time.

    Attributes:
        name: Name in tables.
        run: The function of `args` and `frozen`.
        args: Arguments that get gradients.
        frozen: Arguments without gradients.
        options: Compiler options.
    """

    name: str
    run: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]
    frozen: tuple[jax.Array, ...] = ()
    options: dict[str, bool] = dataclasses.field(default_factory=dict)

    def forward(self, args, frozen) -> jax.Array:
        """Returns the result."""
        return self.run(*args, *frozen)

    def both(self, args, frozen) -> tuple:
        """Returns the result and the gradients of `args`."""
        out, vjp = jax.vjp(lambda *args: self.run(*args, *frozen), *args)
        return out, vjp(jnp.ones_like(out))


def random(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Makes a random array in bfloat16."""
    return scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def losses() -> Iterator[Part]:
    """Yields the head with the loss of target rows."""
    is_target = jax.random.uniform(jax.random.key(2), (T,)) < TARGET_SHARE
    labels = jax.random.randint(jax.random.key(3), (T,), 0, V)

    def loss(hidden, head):
        return target_nll(hidden, head, labels, is_target).sum()

    head = random(1, D, V, scale=0.03)
    yield Part("loss", loss, (random(0, T, D),), (head,))


def attentions() -> Iterator[Part]:
    """Yields packed attention of ragged samples, by each implementation."""
    lengths = Lengths(longest=LONGEST).fill(T, np.random.default_rng(0))
    segment_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    shapes = ((T, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    args = tuple(random(i, *shape) for i, shape in enumerate(shapes))
    names: list[AttentionImplementation] = ["xla"]
    if triton_unsupported(dtype=jnp.bfloat16, head_dim=HEAD_DIM) is None:
        names.append("triton")
    if cudnn_unsupported(dtype=jnp.bfloat16, head_dim=HEAD_DIM) is None:
        names.append("cudnn")
    for name in names:
        attend = functools.partial(
            packed_attention,
            segment_ids=jnp.asarray(segment_ids),
            lengths=SegmentLengths(LONGEST, T // len(lengths)),
            implementation=name,
        )
        options = compiler_options(name)
        yield Part(f"attention, {name}", attend, args, options=options)


def elementwise() -> Iterator[Part]:
    """Yields norm, activation and rotary positions."""
    scale = jnp.ones(D, jnp.bfloat16)
    yield Part("norm", lambda x: rms_norm(x, scale, 1e-5), (random(0, T, D),))
    yield Part("silu and product", swiglu, (random(0, T, F), random(1, T, F)))
    cos, sin = (random(i, T, HEAD_DIM // 2).astype(jnp.float32) for i in (1, 2))
    turn = lambda x: apply_rope(x, cos, sin)
    yield Part("rotary positions of q", turn, (random(0, T, HEADS, HEAD_DIM),))


def timed(run: Callable, args: tuple, repeats: int) -> dict[str, float]:
    """Measures the medians of device time and wall time, in microseconds."""
    device = device_times(run, *args, repeats=repeats)
    wall = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        wall.append(1e6 * (time.perf_counter() - began))
    return {
        "device_us": round(statistics.median(device), 1),
        "wall_us": round(statistics.median(wall), 1),
    }


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("ops", __doc__)
    add_output_dir(out)
    out.add_argument("--repeats", type=int, default=10)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    require_gpu("ops")
    rows = []
    for part in (*losses(), *attentions(), *elementwise()):
        for what, run in (("forward", part.forward), ("both", part.both)):
            compiled = jax.jit(run, compiler_options=part.options)
            times = timed(compiled, (part.args, part.frozen), args.repeats)
            rows.append({"part": part.name, "pass": what, **times})
    print(dicts_table(rows))
    if args.output_dir:
        end = about(jax.devices()[0].device_kind)
        write_csv(args.output_dir / "parts.csv", [row | end for row in rows])
