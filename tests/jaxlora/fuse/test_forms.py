"""Written forms of LoRA are found and rewritten, and near misses are left alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlora
from tests.jaxlora.fuse.forms.form import Form, random_array
from tests.jaxlora.fuse.forms.table import FORMS, NEAR_MISSES
from tests.jaxlora.fuse.found import num_linears
from tests.jaxlora.fuse.generator import arithmetic
from tests.oracle import assert_as_accurate_as

# Every so many forms are also compiled; the others run in NumPy, which is cheaper.
COMPILED = 12
# Every so many forms are also computed in each run of the tests. All are looked for,
# and drawn functions have the same parts; see test_generated.py.
COMPUTED = 6


def both_ways(form: Form, function):
    """Returns a jitted function of (results, gradients of what is trained)."""
    names = list(form.arguments)
    places = [names.index(name) for name in form.trained]

    def both(args):
        def of_trained(*trained):
            changed = dict(zip(places, trained, strict=True))
            return function(*(changed.get(i, arg) for i, arg in enumerate(args)))

        y, vjp = jax.vjp(of_trained, *(args[i] for i in places))
        return y, vjp(jax.tree.map(_cotangent, y))

    return jax.jit(both)


def run(form: Form, function, args):
    """Runs a function; returns (results, gradients of what is trained)."""
    names = list(form.arguments)
    # The gradient of a number is one long sum. How XLA rounds it depends on the CPU.
    is_sum = any(np.ndim(args[names.index(name)]) == 0 for name in form.trained)
    compiled = list(FORMS).index(form.name) % COMPILED == 0 and not is_sum
    return arithmetic.run(
        both_ways(form, function).trace(args), (args,), compiled=compiled
    )


def _cotangent(y):
    return random_array("dy", y.shape, y.dtype)


def run_exactly(form: Form):
    """Runs a form's definition in float32, or in float64 if it is deep."""
    dtype = np.float64 if form.deep else np.float32

    def widened(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return np.asarray(leaf, dtype) if is_float else leaf

    with jax.enable_x64(form.deep):
        args = jax.tree.map(widened, form.args)
        traced = both_ways(form, form.exact).trace(args)
        return arithmetic.run_exactly(traced, (args,))


def check_accuracy(form: Form, actual, baseline, exact) -> None:
    """Each result and gradient obeys the oracle rule."""
    assert jax.tree.structure(actual) == jax.tree.structure(baseline)
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    others = zip(jax.tree.leaves(baseline), jax.tree.leaves(exact), strict=True)
    for (path, leaf), (plain, wanted) in zip(leaves, others, strict=True):
        try:
            assert_as_accurate_as(actual=leaf, baseline=plain, exact=wanted)
        except AssertionError as error:
            where = f"{form.name}, result and gradients of {form.trained}"
            error.add_note(f"in {where}, at {jax.tree_util.keystr(path)}")
            raise


def test_the_table_is_large_enough():
    assert len(FORMS) >= 25 and len(NEAR_MISSES) >= 25


@pytest.mark.parametrize("name", FORMS)
def test_form_is_found(name):
    form = FORMS[name]
    explanation = jaxlora.explain(form.function, *form.args)
    assert num_linears(explanation) == form.sites, f"{explanation}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.grid if i % COMPUTED else ())
        for i, name in enumerate(FORMS)
    ],
)
def test_rewritten_form_has_the_same_results_and_gradients(name):
    form = FORMS[name]
    fused = jaxlora.fuse(form.function, strict=True, implementation="xla")
    actual = run(form, fused, form.args)
    baseline = exact = run(form, form.function, form.args)
    if form.exact is not form.function or form.dtype != jnp.float32 or form.deep:
        exact = run_exactly(form)
    check_accuracy(form, actual, baseline, exact)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name):
    form = NEAR_MISSES[name]
    explanation = jaxlora.explain(form.function, *form.args)
    assert not explanation.sites, f"{explanation}"
    if form.reason is not None:
        reasons = [refusal.reason for refusal in explanation.refusals]
        assert re.search(form.reason, "; ".join(reasons)), reasons
    fused = jaxlora.fuse(form.function, implementation="xla")
    programs = (both_ways(form, f).trace(form.args) for f in (fused, form.function))
    assert arithmetic.is_same(*(traced.jaxpr for traced in programs))


# Sums of products that are cut otherwise, and integers after such sums.
_CHAINED = "slices_of_dropped_attention", "base_in_int8"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _CHAINED else pytest.mark.grid)
        for name in FORMS | NEAR_MISSES
    ],
)
def test_forms_one_after_the_other(name):
    """Each takes what the ones before have computed, in the place of an array."""
    form = (FORMS | NEAR_MISSES)[name]
    place = list(form.arguments).index("x")

    def chained(many):
        total = jnp.zeros(())
        for x, *rest in many:
            rest.insert(place, x + total.astype(x.dtype))
            results = jax.tree.leaves(form.function(*rest))
            total += sum(jnp.sum(y.real).astype(jnp.float32) for y in results) / 100
        return total

    x, rest = form.args[place], form.args[:place] + form.args[place + 1 :]
    found = jaxlora.explain(chained, [(x, *rest)] * 3)
    if name in FORMS:  # what the sums before are part of may be no linear
        assert num_linears(found) >= form.sites, f"{found}"
    else:
        assert not found.sites, f"{found}"


def gradient_of(form: Form):
    """Returns a function that already is the gradient of a form's sum of squares."""

    def gradient(*args):
        def loss(trained):
            return jnp.sum(form.function(**given | trained) ** 2)

        given = dict(zip(form.arguments, args, strict=True))
        return jax.grad(loss)({name: given[name] for name in form.trained})

    return gradient


def test_in_a_gradient_without_dropout_both_passes_are_found():
    """Without dropout, the gradient of x is a linear with a branch too."""
    form = FORMS["textbook"]
    gradient = gradient_of(form)
    assert num_linears(jaxlora.explain(gradient, *form.args)) == 2
    fused = jaxlora.fuse(gradient, implementation="xla")
    actual, baseline = (jax.jit(f)(*form.args) for f in (fused, gradient))
    check_accuracy(form, actual, baseline, baseline)


@pytest.mark.parametrize(
    "name", ["select_of_divided", "mask_multiplied", "mask_as_floats", "flax_dropout"]
)
def test_in_a_gradient_with_dropout_the_forward_pass_is_found(name):
    """The gradient of x reads the mask too, and is refused with a cure."""
    form = FORMS[name]
    gradient = gradient_of(form)
    explanation = jaxlora.explain(gradient, *form.args)
    assert num_linears(explanation) == form.sites, f"{explanation}"
    (reason,) = (refusal.reason for refusal in explanation.refusals)
    assert "call jaxlora.fuse before jax.grad" in reason
    fused = jaxlora.fuse(gradient, implementation="xla")
    actual, baseline = (jax.jit(f)(*form.args) for f in (fused, gradient))
    check_accuracy(form, actual, baseline, baseline)


@pytest.mark.parametrize(
    ("name", "stopped"),
    [("gradient_of_a_stopped", "a"), ("gradient_of_x_stopped", "x")],
)
def test_a_stopped_gradient_stays_zero(name, stopped):
    form = FORMS[name]
    fused = jaxlora.fuse(form.function, strict=True, implementation="xla")
    _, gradients = run(form, fused, form.args)
    of = dict(zip(form.trained, gradients, strict=True))
    assert {n for n, g in of.items() if not np.any(g)} == {stopped}


def test_strict_refuses_a_function_without_a_branch():
    form = NEAR_MISSES["activation_between_a_and_b"]
    fused = jaxlora.fuse(form.function, strict=True)
    with pytest.raises(jaxlora.JaxloraError, match="no linear with a low-rank branch"):
        fused(*form.args)


@pytest.mark.parametrize(
    "name", ["textbook", "select_of_divided", "scan_over_layers", "merged"]
)
def test_results_without_jit(name):
    form = FORMS[name]
    fused = jaxlora.fuse(form.function, strict=True, implementation="xla")
    baseline = form.function(*form.args)
    check_accuracy(form, fused(*form.args), baseline, baseline)
