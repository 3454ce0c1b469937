"""Norms and gates are computed with the linears around them, as their author wrote."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jaxlora
from jaxlora.fuse.api import FuseOptions, trace_call
from tests.jaxlora.fuse.reference_backend import NAME, reference  # noqa: F401
from tests.jaxlora.fuse.row_functions import SWIGLU, draw
from tests.oracle import assert_as_accurate_as, relative_error

pytestmark = pytest.mark.usefixtures("reference")

SEEDS = range(240)
OFTEN = 40  # one of so many blocks is always drawn; all of them are of the grid
BOTH = "producer and gate"
TRAINED = (21,)  # of these, both passes are compared with float32


def some_of(seeds):
    return [
        pytest.param(seed, marks=pytest.mark.grid if seed % OFTEN else ())
        for seed in seeds
    ]


def choices_of(function, arguments, implementation=NAME):
    options = FuseOptions(implementation)
    return trace_call(function, options, (), arguments).rewritten.choices


def both_passes(function, arguments):
    """Returns the result and all gradients, as a list."""

    def run(arguments):
        y, pull = jax.vjp(lambda a: function(**a), arguments)
        dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, pull(dy.astype(y.dtype))

    return jax.tree.leaves(jax.jit(run)(arguments))


def in_float32(block, arguments):
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arguments)
    return both_passes(dataclasses.replace(block, dtype=jnp.float32), wide)


def parts_of(choices):
    return list(dict.fromkeys(choice.part for choice in choices))


def values_of(variables, part, arguments):
    """Returns the values of variables of a traced block, op by op."""
    jaxpr = part.site.jaxpr
    known = jaxpr.replace(outvars=list(variables))
    leaves = jax.tree.leaves(((), arguments))
    return dict(zip(variables, core.jaxpr_as_fun(known)(*leaves), strict=True))


@pytest.mark.parametrize("seed", some_of(SEEDS))
def test_random_norms_and_gates_keep_their_bits(seed):
    """The functions that kernels are made from compute what the author's do."""
    block = draw(seed)
    arguments = block.arguments()
    choices = choices_of(block, arguments)
    (part,) = parts_of(choices)
    assert part.name == BOTH, [choice.refusal for choice in choices]
    roots = part.site.roots
    wanted = [*(m.x for m in part.makers), *(v for m in part.makers for v in m.inputs)]
    values = values_of(dict.fromkeys([*wanted, *roots]), part, arguments)
    num_rows = part.site.num_tokens
    for maker in part.makers:
        given = maker.arguments(num_rows, values.__getitem__)
        (made,) = maker.expression(*given)
        np.testing.assert_array_equal(made, values[maker.x].reshape(made.shape))
    outputs = [values[root].reshape(num_rows, -1) for root in roots]
    dh = jnp.cos(jnp.arange(outputs[0].size)).reshape(outputs[0].shape)
    dh = dh.astype(block.dtype)
    with jax.disable_jit():  # a compiled call leaves out roundings
        _, pull = jax.vjp(block.gated, *outputs)
        wanted = pull(dh)
    for got, want in zip(part.gate.gradient(*outputs, dh), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("seed", TRAINED)
def test_both_passes_are_as_accurate_as_the_original(seed):
    block = draw(seed)
    arguments = block.arguments()
    fused = jaxlora.fuse(block, implementation=NAME, strict=True)
    each = both_passes(fused, arguments), both_passes(block, arguments)
    exact = in_float32(block, arguments)
    for got, plain, true in zip(*each, exact, strict=True):
        assert_as_accurate_as(actual=got, baseline=plain, exact=true)


def test_frozen_weights_have_gradients_only_if_they_are_asked_for():
    """Those of gate and up are computed again, as their outputs stay in a call."""
    arguments = SWIGLU.arguments()
    fused = jaxlora.fuse(SWIGLU, implementation=NAME, strict=True)

    def size(names):
        loss = lambda some: fused(**(arguments | some)).astype(jnp.float32).sum()
        given = {name: arguments[name] for name in names}
        return str(jax.make_jaxpr(jax.grad(loss))(given)).count("dot_general")

    assert size(("lora", "x")) < size(("lora", "x", "frozen"))


def test_rows_are_isolated_and_bits_are_the_same_twice():
    arguments = SWIGLU.arguments()
    fused = jax.jit(jaxlora.fuse(SWIGLU, implementation=NAME, strict=True))
    clean = fused(**arguments)
    np.testing.assert_array_equal(clean, fused(**arguments))
    bad = arguments["x"].at[1, 3].set(jnp.nan)
    got = fused(**(arguments | {"x": bad}))
    assert jnp.isnan(got[1, 3]).all()
    others = np.ones(got.shape[:2], bool)
    others[1, 3] = False
    np.testing.assert_array_equal(got[others], clean[others])


def plan_of(function, arguments=None):
    found = choices_of(function, arguments or SWIGLU.arguments())
    reasons = [choice.refusal for choice in found if choice.refusal is not None]
    return [part.name for part in parts_of(found)], reasons


def _body(lora, frozen, x, *, norm=None, gate=None, last=None):
    """SWIGLU with other parts."""

    def linear(x, name):
        return x @ frozen[name] + 2 * (x @ lora[name]["a"]) @ lora[name]["b"]

    made = (norm or SWIGLU.made)(x, frozen["gain"])
    outputs = linear(made, "l0"), linear(made, "l1")
    h = (gate or SWIGLU.gated)(*outputs)
    return (last or (lambda y, **_: y))(
        x + linear(h, "last"), h=h, outputs=outputs, made=made
    )


def _with(**parts):
    return lambda lora, frozen, x: _body(lora, frozen, x, **parts)


def test_what_is_read_elsewhere_is_written_by_the_kernels():
    """x of the linears and h are outputs of the call."""
    function = _with(last=lambda y, h, made, **_: (y, h, made))
    assert plan_of(function) == ([BOTH], [])
    arguments = SWIGLU.arguments()
    fused = jaxlora.fuse(function, implementation=NAME)
    for got, want in zip(fused(**arguments), function(**arguments), strict=True):
        assert relative_error(got, want) < 0.02  # XLA leaves out roundings


def test_what_kernels_cannot_compute_is_read_if_something_else_reads_it():
    """The first layer of a decoder reads rows that are looked up in its embedding."""
    order = jnp.array([3, 1, 2, 0, 7, 6, 5, 4])

    def function(lora, frozen, x):
        h = x[:, order]
        return h + SWIGLU(lora, frozen, h)

    assert plan_of(function) == ([BOTH], [])
    fused = jaxlora.fuse(function, implementation=NAME)
    assert_alike(fused, function, SWIGLU.arguments())


@jax.custom_jvp
def _own_gradient(x):
    return x * 2


_own_gradient.defjvps(lambda t, _, x: t * 3)

REFUSED = {
    "outputs are read elsewhere": (
        {"last": lambda y, outputs, **_: (y, outputs[0])},
        ["producer", "producer"],
        "the inputs of its gate are also used elsewhere",
    ),
    "a gate of more": (
        {"gate": lambda g, u: SWIGLU.gated(g, u) * jnp.arange(48.0).astype(g.dtype)},
        ["producer", "producer"],
        "its gate reads more than the outputs of linears that share their input",
    ),
    "an operation that does not lower": (
        {"norm": lambda x, gain: jnp.log1p(SWIGLU.made(x, gain) ** 2) + gain},
        ["gate"],
        "kernels cannot compute log1p on tiles",
    ),
    "wider rows": (
        {"norm": lambda x, gain: jnp.sort(x.astype(jnp.float32)).astype(x.dtype) * 2},
        ["gate"],
        "it reads float32[2,8,32] of sort, and kernels read arrays of bfloat16",
    ),
    "a part of the rows": (
        {"norm": lambda x, gain: x * jnp.cos(x[:, :1, :1]) + gain},
        ["gate"],
        "it reads bfloat16[2,1,1], which varies along a part of the rows or of the "
        "features",
    ),
    "a gradient of its own": (
        {"norm": lambda x, gain: _own_gradient(x) * gain},
        ["gate"],
        "kernels cannot compute custom_jvp_call on tiles",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_cannot_compute_is_left_to_xla(name):
    parts, plans, reason = REFUSED[name]
    found, reasons = plan_of(_with(**parts))
    assert found == plans
    assert reasons == [reason]
    if name == "outputs are read elsewhere":
        fused = jaxlora.fuse(_with(**parts), implementation=NAME)
        assert_alike(fused, _with(**parts), SWIGLU.arguments())


def assert_alike(fused, original, arguments):
    """Compares the results and gradients of functions with roundings in bfloat16."""

    def loss(function, arguments):
        results = jax.tree.leaves(function(**arguments))
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results)

    step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    each = (jax.tree.leaves(step(f, arguments)) for f in (fused, original))
    for got, want in zip(*each, strict=True):
        assert relative_error(got, want) < 0.05


@pytest.mark.parametrize("wrapped", ["scan", "remat", "jit", "norm in jit"])
def test_norms_and_gates_are_found_inside_of_calls(wrapped):
    def function(lora, frozen, x):
        if wrapped == "scan":
            step = lambda x, _: (SWIGLU(lora, frozen, x), None)
            return jax.lax.scan(step, x, length=2)[0]
        if wrapped == "norm in jit":
            return _body(lora, frozen, x, norm=jax.jit(SWIGLU.made))
        wrap = {"remat": jax.checkpoint, "jit": jax.jit}[wrapped]
        return wrap(lambda *args: SWIGLU(*args))(lora, frozen, x)

    assert plan_of(function)[0] == [BOTH]
    if wrapped == "scan":
        fused = jaxlora.fuse(function, implementation=NAME)
        assert_alike(fused, function, SWIGLU.arguments())


def test_adapters_of_their_own_share_a_producer():
    """By vmap over adapters and their rows, as token blocks."""
    arguments = SWIGLU.arguments()
    lora = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), arguments["lora"])
    function = jax.vmap(SWIGLU, in_axes=(0, None, 0))
    found, _ = plan_of(
        lambda lora, frozen, x: function(lora, frozen, x), arguments | {"lora": lora}
    )
    assert found == [BOTH]
