"""Random functions with and without a low-rank branch, nested in JAX's transforms."""

import dataclasses

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

from tests.jaxlora.fuse.forms.form import K, N, R, T, random_array

KEEP = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices that make a function.

    Attributes:
        layout: For w, a and b, whether they are stored transposed.
        product: How the branch is multiplied: "s" first, "ab" first, or "merged" into
            the weight.
        scaled: The tensors that are scaled.
        minus: Whether the branch is subtracted.
        branch_first: Whether the branch is the first summand.
        bias: Where the bias is added: "none", "before" or "after" the branch.
        dropout: How x is dropped for the branch: "none", "select" or "multiply".
        around: Transforms around the linear, outermost first.
        fault: What makes it another function; "none" if nothing does.
    """

    layout: tuple[bool, bool, bool]
    product: str
    scaled: frozenset[str]
    minus: bool
    branch_first: bool
    bias: str
    dropout: str
    around: tuple[str, ...]
    fault: str


FAULTS = (
    "activation of s",
    "activation of branch",
    "other x",
    "s has a reader",
    "base has a reader",
    "multiplied",
    "scaled by row",
)


def recipes(faults=("none",)):
    """Draws recipes with one of the faults."""
    return st.builds(
        Recipe,
        layout=st.tuples(*[st.booleans()] * 3),
        product=st.sampled_from(["s", "ab", "merged"]),
        scaled=st.frozensets(st.sampled_from(["x", "s", "a", "b", "branch"])),
        minus=st.booleans(),
        branch_first=st.booleans(),
        bias=st.sampled_from(["none", "before", "after"]),
        dropout=st.sampled_from(["none", "select", "multiply"]),
        around=st.lists(
            st.sampled_from(["jit", "remat", "scan", "cond", "vmap"]), max_size=2
        ).map(tuple),
        fault=st.sampled_from(faults),
    )


def arguments(recipe: Recipe):
    """Returns x, w, a, b and the bias, stored as the recipe says."""
    shapes = {"w": (K, N), "a": (K, R), "b": (R, N)}
    weights = [random_array(name, shape) for name, shape in shapes.items()]
    turned = [
        weight.T if is_turned else weight
        for weight, is_turned in zip(weights, recipe.layout, strict=True)
    ]
    return random_array("x", (T, K)), *turned, random_array("bias", (N,))


def linear(recipe: Recipe, x, w, a, b, bias):
    """Computes the linear and, where the fault needs it, a second result."""
    w, a, b = (
        weight.T if is_turned else weight
        for weight, is_turned in zip((w, a, b), recipe.layout, strict=True)
    )
    base = x @ w
    branch, s = _branch(recipe, _dropped(recipe, x), a, b)
    extra = {"s has a reader": s, "base has a reader": base}.get(recipe.fault)
    if recipe.product == "merged" and recipe.fault == recipe.dropout == "none":
        delta = _scaled(recipe, "a", a) @ _scaled(recipe, "b", b)
        y = x @ (w - delta if recipe.minus else w + delta)
        return (y if recipe.bias == "none" else y + bias), extra
    if recipe.bias == "before":
        base = base + bias
    y = _sum(recipe, base, branch)
    return (y + bias if recipe.bias == "after" else y), extra


def _scaled(recipe, name, value):
    return 1.5 * value if name in recipe.scaled else value


def _dropped(recipe, x):
    if recipe.fault == "other x":
        x = jnp.flip(x, 0)
    x = _scaled(recipe, "x", x)
    kept = jax.random.bernoulli(jax.random.key(1), KEEP, x.shape)
    if recipe.dropout == "select":
        return jnp.where(kept, x / KEEP, 0)
    return kept * x / KEEP if recipe.dropout == "multiply" else x


def _branch(recipe, x, a, b):
    a, b = _scaled(recipe, "a", a), _scaled(recipe, "b", b)
    if recipe.product == "ab" and recipe.fault not in FAULTS:
        return _scaled(recipe, "branch", x @ (a @ b)), None
    s = _scaled(recipe, "s", x @ a)
    if recipe.fault == "activation of s":
        s = jnp.tanh(s)
    branch = _scaled(recipe, "branch", s @ b)
    if recipe.fault == "activation of branch":
        branch = jnp.tanh(branch)
    if recipe.fault == "scaled by row":
        branch = branch * jnp.arange(1.0, 1 + x.shape[0])[:, None]
    return branch, s


def _sum(recipe, base, branch):
    if recipe.fault == "multiplied":
        return base * branch
    if recipe.minus:
        return -branch + base if recipe.branch_first else base - branch
    return branch + base if recipe.branch_first else base + branch


def make_function(recipe: Recipe):
    """Returns the function of a recipe: of x, w, a, b and the bias."""

    def function(*args):
        return linear(recipe, *args)

    for name in reversed(recipe.around):
        function = AROUND[name](function)
    return function


def _in_scan(function):
    def outer(x, *weights):
        def body(carry, rows):
            return carry, function(rows, *weights)

        return lax.scan(body, 0, x[None])[1]

    return lambda x, *weights: jax.tree.map(lambda y: y[0], outer(x, *weights))


def _in_cond(function):
    def zeros(*args):
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)

    return lambda x, *weights: lax.cond(
        weights[-1][0] < 1e9, function, zeros, x, *weights
    )


def _in_vmap(function):
    def outer(x, *weights):
        axes = (0, *[None] * len(weights))
        y = jax.vmap(function, in_axes=axes)(jnp.stack([x, 2 * x]), *weights)
        return jax.tree.map(lambda leaf: leaf.sum(0), y)

    return outer


AROUND = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": _in_scan,
    "cond": _in_cond,
    "vmap": _in_vmap,
}
