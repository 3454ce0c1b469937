"""Layers that a function repeats are analysed once, with the same result."""

import collections
import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
import scipy.optimize

from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.linears import match
from jaxlora.fuse.normal_forms.normal import Normalizer
from tests.jaxlora.fuse.forms import decoder
from tests.jaxlora.fuse.reference_backend import NAME, reference  # noqa: F401

place = importlib.import_module("jaxlora.fuse.place")
COUNT = 14  # layers, of which the middle ones are left out
K, R = 64, 4


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def weights(count=COUNT, width=K):
    one = {"w": shape(K, width), "a": shape(K, R), "b": shape(R, width)}
    return [dict(one, scale=shape(width)) for _ in range(count)]


def lora(x, p):
    return x @ p["w"] + 2.0 * (x @ p["a"]) @ p["b"]


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def with_dropout(x, p, key):
    return x @ p["w"] + 2.0 * (dropped(x, key) @ p["a"]) @ p["b"]


def plain(x, layers):
    for p in layers:
        x = jnp.tanh(lora(x, p)) + x
    return x


def folded_keys(x, layers):
    key = jax.random.key(0)
    for number, p in enumerate(layers):
        inner = jax.random.fold_in(jax.random.fold_in(key, number), 1)
        x = x + jnp.tanh(with_dropout(x, p, inner))
    return x


def split_keys(x, layers):
    keys = jax.random.split(jax.random.key(0), len(layers))
    for number, p in enumerate(layers):
        x = x + jnp.tanh(with_dropout(x, p, keys[number]))
    return x


def shared_mask(x, layers):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
    for p in layers:
        masked = jnp.where(keep, x / 0.9, 0)
        x = x + jnp.tanh(x @ p["w"] + (masked @ p["a"]) @ p["b"])
    return x


def near_misses(x, layers):
    for p in layers:
        x = x + jnp.tanh(x @ p["w"] + jax.nn.relu(x @ p["a"]) @ p["b"])
    return x


def products_used_elsewhere(x, layers):
    for p in layers:
        s = x @ p["a"]
        x = jnp.tanh(x @ p["w"] + s @ p["b"]) + jnp.sin(s).sum()
    return x


def growing_products(x, layers):
    """Each layer scales a sum that is kept, until its product is too long."""
    first, kept = x, x @ layers[0]["w"]
    for p in layers:
        kept = kept * p["scale"]
        x = x + jnp.tanh(kept + (first @ p["a"]) @ p["b"])
    return x


def growing_sums(x, layers):
    total = jnp.zeros_like(x)
    for p in layers:
        total = total + lora(x, p)
        x = jnp.tanh(x)
    return total


def all_results(x, layers):
    found = []
    for p in layers:
        x = x + jnp.tanh(lora(x, p))
        found.append(x)
    return found


def read_at_the_end(x, layers):
    return sum(jnp.sin(y) for y in all_results(x, layers))


def products_read_at_the_end(x, layers):
    total = 0.0
    found = []
    for p in layers:
        s = x @ p["a"]
        found.append(s)
        x = x + jnp.tanh(x @ p["w"] + s @ p["b"])
    return x, sum(s.sum() for s in found) + total


def alternating(x, layers):
    for number, p in enumerate(layers):
        x = jnp.tanh(lora(x, p)) if number % 2 else x + jnp.sin(x @ p["w"])
    return x


def one_differs(x, layers):
    for number, p in enumerate(layers):
        x = jnp.tanh(lora(x, p)) if number != COUNT else jnp.sin(x @ p["w"])
    return x


def neighbours_share(x, layers):
    for p, q in itertools.pairwise(layers):
        x = jnp.tanh(x @ p["w"] + (x @ p["a"]) @ q["b"]) + jnp.sin(x @ q["w"])
    return x


def two_take_turns(x, layers):
    for number in range(COUNT):
        x = x + jnp.tanh(lora(x, layers[number % 2]))
    return x


def the_same_layer(x, layers):
    for _ in range(COUNT):
        x = x + jnp.tanh(lora(x, layers[0]))
    return x


def read_before(x, layers):
    """Each layer reads its own weight; one of these is computed differently."""
    ws = [p["w"] @ p["w"] if n == COUNT else 2 * p["w"] for n, p in enumerate(layers)]
    for w, p in zip(ws, layers, strict=True):
        x = jnp.tanh(lora(x, dict(p, w=w))) + x
    return x


def memory(x, layers):
    """All layers read the same array, so their linears are one call."""
    keys = jnp.sin(x)
    for p in layers:
        x = x + jnp.tanh(lora(keys, p)) * jnp.tanh(lora(x, p))
    return x


def two_behind(x, layers):
    last = x
    for p in layers:
        x, last = jnp.tanh(lora(x, p)) + last, x
    return x


def tables_by_ids(x, layers):
    """Whether A and B are chosen alike depends on the numbers of a layer."""
    key = jax.random.key(0)
    for number, p in enumerate(layers):
        tables = jnp.stack([p["a"]] * 3), jnp.stack([p["b"]] * 3)
        ids = [
            jax.random.bits(jax.random.fold_in(key, seed), (8,)) % 3
            for seed in (number, 5)
        ]
        a, b = (table[i] for table, i in zip(tables, ids, strict=True))
        branch = jnp.einsum("tk,tkr,trn->tn", x, a, b)
        x = x + jnp.tanh(x @ p["w"] + branch)
    return x


def segments(x, layers):
    for p, q in zip(layers, [*layers[1:], layers[0]], strict=True):
        parts = [x[:4] @ p["a"] @ p["b"], x[4:] @ q["a"] @ q["b"]]
        x = jnp.tanh(x @ p["w"] + jnp.concatenate(parts))
    return x


FUNCTIONS = (
    plain, folded_keys, split_keys, shared_mask, near_misses, products_used_elsewhere,
    growing_products, growing_sums, all_results, read_at_the_end,
    products_read_at_the_end, alternating, one_differs, neighbours_share,
    two_take_turns, the_same_layer, read_before, memory, two_behind, tables_by_ids,
    segments,
)  # fmt: skip
# In these, the layers are known to be alike.
SHORTENED = {
    "plain", "folded_keys", "split_keys", "shared_mask", "near_misses", "alternating",
    "all_results", "the_same_layer", "memory",
    "growing_sums", "one_differs",
}  # fmt: skip


def text(value):
    return re.sub(r"0x[0-9a-f]+", "0x", str(value))


def summary(function, *arguments, implementation="xla"):
    """Returns what is found in a function, and what is made of it."""
    options = FuseOptions(implementation)
    made = trace_call(function, options, arguments, {}).rewritten
    regions = [(c.plan.name, c.reason, text(c.region.refusals)) for c in made.choices]
    sites = [(s.location, sorted(s.equations), s.names) for s in made.sites]
    return text(made.jaxpr), regions, sites, made.refusals


def in_full(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(match, "find_run", lambda jaxpr: None)
        return summary(*arguments, **options)


@pytest.fixture
def shortened(monkeypatch):
    """The results of analyses of shortened jaxprs: whether they were used."""
    used = []
    expanded = match.expanded

    def noted(*arguments):
        found = expanded(*arguments)
        used.append(found is not None)
        return found

    monkeypatch.setattr(match, "expanded", noted)
    return used


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_same_is_found_as_in_all_layers(function, monkeypatch, shortened):
    arguments = function, shape(8, K), weights(2 * COUNT)
    found = summary(*arguments)
    assert (function.__name__ in SHORTENED) == any(shortened)
    wanted = in_full(monkeypatch, *arguments)
    for one, other in zip(found, wanted, strict=True):
        assert one == other


def unrolled(x, frozen, lora):
    for number in range(len(frozen)):
        x = decoder.layer(x, frozen[number], lora[number])
    return x


def layers_of(count):
    frozen, lora = decoder.make_weights(1)
    first = [jax.tree.map(lambda v: v[0], tree) for tree in (frozen, lora)]
    return decoder.make_x(), [first[0]] * count, [first[1]] * count


def abstract_layers(count):
    return jax.tree.map(lambda v: shape(*v.shape, dtype=v.dtype), layers_of(count))


@pytest.mark.parametrize(
    "is_gradient",
    [
        pytest.param(False, id="forward"),
        pytest.param(True, id="gradient", marks=pytest.mark.grid),
    ],
)
def test_a_decoder_is_read_once(is_gradient, monkeypatch, shortened):
    x, *rest = abstract_layers(COUNT)
    function = unrolled
    if is_gradient:
        function = jax.grad(lambda x, *rest: unrolled(x, *rest).sum())
    found = summary(function, x, *rest)
    assert any(shortened) != is_gradient
    assert found == in_full(monkeypatch, function, x, *rest)


def work(monkeypatch, function, *arguments):
    """Counts equations that are normalized, integer programs and traced kernels."""
    counts = collections.Counter()
    with monkeypatch.context() as patch:

        def counted(owner, name):
            run = getattr(owner, name)

            def call(*arguments, **options):
                counts[name] += 1
                return run(*arguments, **options)

            patch.setattr(owner, name, call)

        counted(Normalizer, "add_equation")
        counted(scipy.optimize, "milp")
        counted(place, "part_call")
        summary(function, *arguments, implementation=NAME)
    return counts


def gated(x, layers):
    for gate, up, down in layers:
        x = x + lora(jax.nn.silu(lora(x, gate)) * lora(x, up), down)
    return x


def test_the_work_does_not_grow_with_the_layers(monkeypatch, reference):  # noqa: F811
    counts = {}
    for count in (12, 80):
        layers = zip(*(weights(count) for _ in range(3)), strict=True)
        counts[count] = work(monkeypatch, gated, shape(8, K), list(layers))
    assert counts[80] == counts[12]
    assert counts[80]["milp"] and counts[80]["part_call"]
