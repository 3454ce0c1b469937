"""A fused function is traced anew where JAX's settings change what is traced."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals  # JAX only prints them in public
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

import jaxlora
from jaxlora.errors import FuseError
from tests.jaxlora.fuse.forms.form import K, N, R, T, random_array
from tests.jaxlora.fuse.generator.check import settings
from tests.oracle import relative_error

SHAPES = {"x": (T, K), "w": (K, N), "a": (K, R), "b": (R, N)}


def arguments():
    return [random_array(name, shape) for name, shape in SHAPES.items()]


def linear(x, w, a, b):
    return x @ w + 0.5 * (x @ a) @ b


def with_a_key_of_its_own(x, w, a, b):
    key = jax.random.key(0)
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return x @ w + (jnp.where(kept, x / 0.5, 0) @ a) @ b


def with_a_constant(x, w, a, b):
    """The scale is float64 where 64-bit types are enabled."""
    return linear(x, w, a, b) * jnp.asarray(np.pi)


def fuse(function):
    return jaxlora.fuse(function, strict=True, implementation="xla")


CHANGES = {
    "implementation of keys": lambda: jax.default_prng_impl("rbg"),
    "partitionable keys": lambda: jax.threefry_partitionable(
        not jax.config.jax_threefry_partitionable
    ),
    "64-bit types": lambda: jax.enable_x64(True),
    "precision of products": lambda: jax.default_matmul_precision("bfloat16"),
    "promotion of dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
}


@pytest.mark.parametrize("function", [linear, with_a_key_of_its_own, with_a_constant])
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_under_another_setting_is_that_of_the_function(change, function):
    """The program of the first call is not used, and is used again afterwards."""
    args, fused = arguments(), fuse(function)
    with settings():
        before = fused(*args)
        with CHANGES[change]():
            check_same(fused, function, args)
        assert np.array_equal(before, fused(*args))


def check_same(fused, function, args):
    """The fused function has the values and precisions of the original, or raises."""
    try:
        wanted = function(*args)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            fused(*args)
        return
    actual = fused(*args)
    assert actual.dtype == wanted.dtype
    assert relative_error(actual, wanted) < 1e-6
    fresh = jax.make_jaxpr(fuse(function))(*args)
    assert str(jax.make_jaxpr(fused)(*args)) == str(fresh)


def dots(jaxpr):
    """Returns the precision of every product of a jaxpr, at every depth."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            found.append(eqn.params["precision"])
        for inner in core.jaxprs_in_params(eqn.params):
            found += dots(inner)
    return found


HIGHEST = (lax.Precision.HIGHEST,) * 2


@pytest.mark.parametrize("which", ["all", "base", "s", "branch"])
def test_the_precision_that_the_author_gave_is_kept(which):
    def precise(x, w, a, b):
        precision = lambda name: HIGHEST if which in ("all", name) else None
        base = jnp.dot(x, w, precision=precision("base"))
        s = jnp.dot(x, a, precision=precision("s"))
        return base + 0.5 * jnp.dot(s, b, precision=precision("branch"))

    with settings():
        fused = jaxlora.fuse(precise, implementation="xla")
        precisions = dots(jax.make_jaxpr(fused)(*arguments()).jaxpr)
    assert precisions.count(HIGHEST) >= (3 if which == "all" else 1), precisions


@pytest.mark.parametrize("precision", ["highest", "bfloat16"])
def test_the_precision_of_the_setting_is_kept(precision):
    with jax.default_matmul_precision(precision):
        wanted = dots(jax.make_jaxpr(linear)(*arguments()).jaxpr)
        got = dots(jax.make_jaxpr(fuse(linear))(*arguments()).jaxpr)
    assert set(got) == set(wanted)


def test_an_algorithm_of_products_is_kept():
    preset = lax.DotAlgorithmPreset.BF16_BF16_F32

    def coarse(x, w, a, b):
        dot = lambda x, w: jnp.dot(x, w, precision=preset)
        return dot(x, w) + dot(dot(x, a), b)

    with settings():
        fused = jaxlora.fuse(coarse, implementation="xla")
        got = dots(jax.make_jaxpr(fused)(*arguments()).jaxpr)
    assert set(got) == {preset}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4), (4, 1)])
def test_a_call_under_another_mesh_is_sharded_over_it(sizes):
    def on_the_mesh(x, w, a, b):
        x = lax.with_sharding_constraint(x, PartitionSpec("data"))
        return jnp.tanh(x), linear(x, w, a, b)

    fused = jaxlora.fuse(on_the_mesh, implementation="xla")
    x, *weights = arguments()
    args = x[: T // 4 * 4], *weights
    for size in sizes:
        devices = np.array(jax.devices()[:size])
        axis_types = (jax.sharding.AxisType.Auto,)
        with jax.set_mesh(Mesh(devices, ("data",), axis_types=axis_types)):
            got, want = (jax.jit(lambda *a, f=f: f(*a)) for f in (fused, on_the_mesh))
            got, want = got(*args), want(*args)
        assert got[0].sharding == want[0].sharding
        assert relative_error(got[1], want[1]) < 1e-6


def three_layers(x, ws, as_, bs):
    """Each result has a name, and is read by the backward pass of its tanh."""
    for i in range(3):
        y = x @ ws[i] + 0.5 * (x @ as_[i]) @ bs[i]
        x = jnp.tanh(checkpoint_name(y, "y"))
    return x


POLICIES = {
    "by name": jax.checkpoint_policies.save_only_these_names("y"),
    "products": jax.checkpoint_policies.dots_saveable,
    "products without a batch": (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("place", ["remat of fused", "fused remat"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_of_remat_keeps_the_results_of_fused_linears(policy, place):
    """A fused linear is one product for `dots_saveable`, and its result has a name.

    The original keeps the base and the branch of each, where products are kept.
    """
    shapes = {"x": (T, K), "ws": (3, K, K), "as": (3, K, R), "bs": (3, R, K)}
    args = [random_array(name, shape) for name, shape in shapes.items()]
    args[0] = args[0][: T - 1]  # so that no argument has the shape of a result
    remat = lambda function: jax.checkpoint(function, policy=POLICIES[policy])
    orders = (remat, fuse) if place == "fused remat" else (fuse, remat)
    fused = orders[1](orders[0](three_layers))
    got, want = (
        saved(function, args).count((T - 1, K))
        for function in (fused, remat(three_layers))
    )
    assert got >= min(want, 3), (got, want)
    assert got == 0 or policy != "nothing"


def saved(function, args):
    """The shapes of the values that a function keeps for its backward pass."""
    residuals = saved_residuals(function, *args)
    return [
        aval.shape for aval, source in residuals if "from the argument" not in source
    ]


def test_a_name_inside_of_a_linear_is_kept():
    """A policy that keeps s by its name keeps it, also of a fused linear, by block."""

    def named(x, w, a, b):
        s = checkpoint_name(x @ a, "s")
        return jnp.tanh(x @ w + 0.5 * s @ b)

    policy = jax.checkpoint_policies.save_only_these_names("s")
    fused = jaxlora.fuse(named, implementation="xla")
    remats = (
        jax.checkpoint(lambda *a, f=f: f(*a), policy=policy) for f in (fused, named)
    )
    got, want = (
        [shape for shape in saved(remat, arguments()) if math.prod(shape) == T * R]
        for remat in remats
    )
    assert len(got) == len(want) == 1


def test_values_of_a_number_are_traced_once():
    """A Python float is traced as in `jax.jit`, not as a constant.

    A function whose Python code reads the number, say in an `if`, cannot be traced so.
    A limit of the number of traces would suit it as well: what must not happen is that
    a scale that changes at every step is traced at every step.
    """
    calls = []

    def scaled(x, w, a, b, scale):
        calls.append(scale)
        return x @ w + scale * (x @ a) @ b

    fused, args = jaxlora.fuse(scaled, implementation="xla"), arguments()
    for step in range(10):
        got, want = fused(*args, step / 10), linear(*args)
        assert got.dtype == want.dtype
    assert len(calls) <= 2


def test_a_number_that_decides_what_is_computed_is_still_read():
    def chosen(x, w, a, b, scale):
        return x @ w + scale * (x @ a) @ b if scale > 0 else x @ w

    fused, args = jaxlora.fuse(chosen, implementation="xla"), arguments()
    for scale in (1.0, 0.0, 2.0):
        assert relative_error(fused(*args, scale), chosen(*args, scale)) < 1e-6


def test_a_number_keeps_its_weak_type():
    """2.0 does not turn a bfloat16 sum into float32."""

    def scaled(x, w, a, b, scale):
        return x @ w + scale * (x @ a) @ b

    args = [arg.astype(jnp.bfloat16) for arg in arguments()]
    assert jaxlora.fuse(scaled)(*args, 2.0).dtype == jnp.bfloat16


EFFECTS = {
    "print": lambda x: jax.debug.print("{}", x.sum()),
    "callback": lambda x: jax.debug.callback(lambda x: None, x),
    "ordered print": lambda x: jax.debug.print("{}", x.sum(), ordered=True),
    "input and output": lambda x: jax.experimental.io_callback(
        lambda x: None, None, x, ordered=True
    ),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_an_effect_happens_once_or_is_refused(effect):
    """It is neither dropped nor doubled; a refusal names it."""
    seen = []

    def with_effect(x, w, a, b):
        EFFECTS[effect](x)
        jax.debug.callback(lambda: seen.append(1))
        return linear(x, w, a, b)

    with contextlib.suppress(FuseError):
        jax.block_until_ready(jaxlora.fuse(with_effect)(*arguments()))
        jax.effects_barrier()
        assert len(seen) == 1
        return
    with pytest.raises(FuseError, match="side effects"):
        jaxlora.fuse(with_effect)(*arguments())


def test_a_collective_is_no_side_effect():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, w, a, b):
        y = linear(x, w, a, b)
        total = lax.psum(jnp.sum(y**2), "data")
        return y / total + lax.axis_index("data")

    def mapped(function):
        specs = (rows, whole, whole, whole)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=rows)

    x, *weights = arguments()
    args = x[: T // 2 * 2], *weights
    got, want = (jax.jit(mapped(f))(*args) for f in (fuse(local), local))
    assert relative_error(got, want) < 1e-6
