"""A kernel back end is one entry of a table, and only the table knows its name."""

import ast
import dataclasses
import pathlib
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora import MultiLoraLinear, Routing, SlotShape
from jaxlora.modules.attention import AttentionImplementation
from jaxlora.pallas_kernels import BACKENDS, Backend, LinearShape, multi_lora_linear
from tests.oracle import relative_error

ROOT = pathlib.Path(__file__).parents[2]
# Files whose `implementation` is that of attention or of the gated delta rule.
OTHERS = (
    ROOT / "jaxlora/modules/attention.py",
    ROOT / "jaxlora/modules/gated_delta.py",
    ROOT / "tests/jaxlora/modules/test_triton_gated_delta.py",
)
SHAPE = LinearShape(
    dtype=jnp.float32, in_features=24, out_features=40, rank=8, block_tokens=16
)


def compared_names(path: pathlib.Path) -> set[str]:
    """Names of back ends with which a file compares anything.

    Some are also implementations of attention, and of the gated delta rule, and count
    only beside `implementation`, except in `OTHERS`.
    """
    found = set()
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in BACKENDS):
        return found  # parsing takes most of the time
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            constants = (c for c in ast.walk(node) if isinstance(c, ast.Constant))
            names = {c.value for c in constants if isinstance(c.value, str)}
            names &= set(BACKENDS)
            if names and (path in OTHERS or "implementation" not in ast.unparse(node)):
                names -= set(get_args(AttentionImplementation))
            found |= names
    return found


@pytest.mark.parametrize("folder", ["jaxlora", "pallas_kernels", "scripts", "tests"])
def test_only_the_table_knows_the_names(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        assert not compared_names(path), f"{path}: ask the entry of BACKENDS instead"


def test_a_comparison_with_a_name_is_found(tmp_path):
    path = tmp_path / "caller.py"
    path.write_text(f"implementation in {(*BACKENDS, 'other')}")
    assert compared_names(path) == set(BACKENDS)
    path.write_text("attention == 'xla'")
    assert not compared_names(path)


def test_some_back_end_runs_anywhere():
    assert all(name == backend.name for name, backend in BACKENDS.items())
    assert list(BACKENDS.values())[-1].unsupported(SHAPE) is None


def forward(x, projections, layer, block_adapter, *, w_transposed):
    """Gathers one adapter per token, and keeps nothing for the backward pass."""
    assert not w_transposed
    slot = jnp.repeat(block_adapter, x.shape[0] // block_adapter.shape[0])

    def linear(p):
        s = jnp.einsum("tk,tkr->tr", x, p.a[slot]) * p.scaling[slot][:, None]
        return x @ p.w[layer[0]] + jnp.einsum("tr,trn->tn", s, p.b[slot])

    live = (slot >= 0)[:, None]
    return [jnp.where(live, linear(p), 0) for p in projections], None


def backward(dy, x, projections, s, layer, block_adapter, *, w_transposed):
    """Differentiates `forward`."""
    assert s is None

    def run(x, matrices):
        given = [
            dataclasses.replace(p, a=a, b=b)
            for p, (a, b) in zip(projections, matrices, strict=True)
        ]
        return forward(x, given, layer, block_adapter, w_transposed=w_transposed)[0]

    dx, gradients = jax.vjp(run, x, [(p.a, p.b) for p in projections])[1](dy)
    return dx, [{"a": da, "b": db} for da, db in gradients]


TOY = Backend(
    name="toy",
    forward=forward,
    backward=backward,
    unsupported=lambda shape: "it is 48 wide" if shape.in_features == 48 else None,
    stores_masks=False,
    partitionable=False,
)


@pytest.fixture
def toy(monkeypatch) -> list[str]:
    """Adds `TOY` to the table; returns a list of the passes of it that are called."""
    calls = []

    def counted(kernels):
        def run(*args, **options):
            calls.append(kernels.__name__)
            return kernels(*args, **options)

        return run

    entry = dataclasses.replace(
        TOY, forward=counted(forward), backward=counted(backward)
    )
    monkeypatch.setitem(BACKENDS, "toy", entry)
    return calls


def module(implementation: str) -> MultiLoraLinear:
    layer = MultiLoraLinear(
        24,
        40,
        slots=SlotShape(num_slots=2, rank=8),
        dtype=jnp.float32,
        implementation=implementation,
        rngs=nnx.Rngs(0),
    )
    for slot, rank in enumerate((8, 3)):
        rng = np.random.default_rng(slot)
        a, b = rng.normal(size=(24, rank)), rng.normal(size=(rank, 40))
        layer.load_slot(slot, a, b, scaling=0.5 + slot)
    return layer


def test_a_new_back_end_is_one_entry(toy):
    """The Flax module runs forward and backward with kernels from the table alone."""
    x = jax.random.normal(jax.random.key(0), (64, 24))
    routing = Routing(block_adapter=jnp.array([1, -1, 0, 1]))

    @nnx.jit
    def loss(layer, x):
        return jnp.square(layer(x, routing)).sum()

    got, want = (
        nnx.grad(loss, argnums=(nnx.DiffState(0, nnx.LoRAParam), 1))(module(name), x)
        for name in ("toy", "xla")
    )
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = [relative_error(mine, theirs) for mine, theirs in leaves]
    assert len(errors) == 3 and max(errors) < 1e-5
    assert {"forward", "backward"} == set(toy)


def call(implementation, k=24):
    return multi_lora_linear(
        x=jnp.zeros((16, k)),
        w=jnp.zeros((k, 40)),
        a=jnp.zeros((1, k, 8)),
        b=jnp.zeros((1, 8, 40)),
        scaling=jnp.ones(1),
        block_adapter=jnp.zeros(1, jnp.int32),
        implementation=implementation,
    )


def test_a_layer_that_a_back_end_cannot_run_is_refused(toy):
    message = "'toy' cannot run this layer: it is 48 wide. Use one of: xla."
    with pytest.raises(ValueError, match=message):
        call("toy", k=48)


def test_kernels_that_cannot_be_partitioned_refuse_an_automatic_mesh(toy):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=auto)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda: call("xla"))
        with pytest.raises(
            ValueError, match=r"'toy' under the mesh .* cannot be parti"
        ):
            jax.eval_shape(lambda: call("toy"))
