"""The fused back ends match the definition, and no slot changes another.

They are interpreted on a CPU, where Mosaic's interpreter follows the kernels' threads,
barriers and copies, and its detector finds races between them. On a GPU they are
compiled; see fused.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxlora.pallas_kernels import (
    Dropout,
    Projection,
    dropout_keys,
    mask_words,
    multi_lora_linear,
    multi_lora_linears,
    unpack_mask,
)
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels.fused import back_ends
from tests.pallas_kernels.problems import (
    both_ways,
    given_mask,
    weight_of,
)

BACK_ENDS = back_ends()


@pytest.fixture(params=BACK_ENDS)
def fused(request):
    """Returns a back end, whose kernels can run until the test ends."""
    found = BACK_ENDS[request.param]
    with found.kernels():
        yield found


# Behaviors that do not depend on the kernels are interpreted with Triton's alone.
one_back_end = pytest.mark.parametrize(
    "fused",
    [
        pytest.param(
            name, marks=() if name == "triton" or one.compiled else pytest.mark.grid
        )
        for name, one in BACK_ENDS.items()
    ],
    indirect=True,
)


def on_back_ends(cases, quick):
    """Crosses back ends with cases, by name.

    Args:
        cases: The cases of any back end.
        quick: By back end, the cases that are always interpreted: each property of a
            case is in one of them, on either back end. The others are of the grid.
            Where a back end is compiled, no case takes long.
    """
    return pytest.mark.parametrize(
        ("fused", "case"),
        [
            pytest.param(back_end, case, id=f"{back_end}-{name}", marks=marks)
            for back_end, fused in BACK_ENDS.items()
            for name, case in cases.items()
            for marks in [
                () if fused.compiled or name in quick[back_end] else pytest.mark.grid
            ]
        ],
        indirect=["fused"],
    )


@on_back_ends(
    {
        "mixed": {},
        "fp16 plain": {"rates": None, "dtype": jnp.float16},
        "two chunks": {
            "block": 128,
            "blocks": (1, 1, 0),
            "ranks": (1, 100),
            "rates": (0.1, 0.9),
        },
        "narrow": {
            "k": 192,
            "n": 128,
            "blocks": (0,),
            "ranks": (64,),
            "rates": (0.3,),
        },
        "rank 256": {"blocks": (-1, -1, 0), "ranks": (256,), "rates": (0.5,)},
    },
    quick={
        "mosaic": {"mixed", "fp16 plain", "two chunks"},
        "triton": {"mixed", "fp16 plain"},
    },
)
def test_matches_the_definition(fused, case):
    fused.check(*fused.problem(**case))


@pytest.mark.grid
@pytest.mark.parametrize("name", BACK_ENDS)
@settings(
    max_examples=3,
    deadline=None,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # a case takes seconds
)
@given(
    blocks=st.lists(st.integers(-1, 2), min_size=1, max_size=5),
    ranks=st.tuples(*[st.integers(1, 80)] * 3),
    rates=st.none() | st.tuples(*[st.sampled_from([0.0, 0.1, 0.7])] * 3),
    seed=st.integers(0, 1000),
)
def test_matches_the_definition_for_any_mix(name, blocks, ranks, rates, seed):
    fused = BACK_ENDS[name]
    with fused.kernels():
        options = {"ranks": ranks, "rates": rates, "seed": seed, "n": 128}
        fused.check(*fused.problem(tuple(blocks), **options))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@on_back_ends(
    {"w": False, "w transposed": True},
    quick={"mosaic": {"w transposed"}, "triton": set()},
)
def test_storage_of_base_and_mask_changes_no_bit(fused, case):
    """A mask is given or computed, and NaN in dropped features reaches no adapter."""
    w_transposed = case
    p, rank = fused.problem((2, 0, -1, 1), k=192, n=128)
    mask = given_mask(p)
    given_mask_first = p | {"dropout": mask}, p
    first, second = given_mask_first[::-1] if w_transposed else given_mask_first
    wanted = fused.check(first, rank)
    w, x = np.asarray(p["w"]), np.array(p["x"])
    w = w.T if w_transposed else w
    stack = jnp.asarray(np.stack([np.full_like(w, np.nan), w]))
    dropped = ~np.asarray(jax.jit(unpack_mask, static_argnums=1)(mask.bits, len(x)))
    sick = np.repeat(np.asarray(p["block_adapter"]) == 2, 64)
    x[sick[:, None] & dropped] = np.nan
    x = jnp.asarray(x)
    options = {"layer": jnp.int32(1), "w_transposed": w_transposed}
    y, *gradients = fused.run(second | {"x": x, "w": stack}, rank, **options)
    np.testing.assert_array_equal(y[~sick], wanted[0][~sick])
    for got, want in zip(gradients, wanted[1:], strict=True):
        np.testing.assert_array_equal(got, want)


def _problems_sharing_x(fused, widths, ranks, **options):
    """Yields problems of linears that share x, blocks and token indices."""
    x, drop = None, None
    for i, (n, slot_ranks) in enumerate(zip(widths, ranks, strict=True)):
        p, rank = fused.problem(n=n, ranks=slot_ranks, seed=i, **options)
        x, drop = p["x"] if x is None else x, drop or p["dropout"]
        if drop is not None:
            key = jnp.asarray(np.asarray(drop.key) + np.uint32(i))
            drop = Dropout(key, drop.rate, drop.token_index)
        p["scaling"] = jnp.asarray(np.where(rank > 0, p["scaling"], np.float32(0)))
        yield p | {"x": x, "dropout": drop}, rank


@on_back_ends(
    {
        "three": ((128, 192, 128), ((16, 3), (0, 16), (16, 2)), (0.0, 0.5), False),
        "two": ((128, 128), ((16, 3), (0, 16)), (0.0, 0.5), False),
        "two and given masks": ((128, 128), ((8, 0), (16, 3)), (0.2, 0.5), True),
        "two chunks of ranks and given masks": (
            (128, 128),
            ((8, 0), (100, 3)),
            (0.2, 0.5),
            True,
        ),
        "plain": ((128, 128), ((8, 3), (4, 8)), None, False),
    },
    quick={
        # Linears alone have two chunks of ranks, here and in test_fp8_layer.py.
        "mosaic": {"two and given masks"},
        "triton": {"two"},
    },
)
def test_linears_that_share_x_equal_linears_alone(fused, case):
    """All bits but dx's are the same; dx is rounded once instead of once per linear."""
    widths, ranks, rates, is_given = case
    problems = list(
        _problems_sharing_x(fused, widths, ranks, rates=rates, blocks=(1, -1, 0))
    )
    if is_given:
        problems = [(p | {"dropout": given_mask(p)}, rank) for p, rank in problems]
    x, blocks = problems[0][0]["x"], problems[0][0]["block_adapter"]
    weights = [weight_of(p).astype(x.dtype) for p, _ in problems]

    @functools.partial(jax.jit, static_argnums=2)
    def together(x, matrices, implementation):
        def op(x, matrices):
            made = [
                Projection(
                    a=a,
                    b=b,
                    w=p["w"].astype(x.dtype),
                    rank=rank,
                    **{name: p[name] for name in ("scaling", "bias", "dropout")},
                )
                for (a, b), (p, rank) in zip(matrices, problems, strict=True)
            ]
            return multi_lora_linears(x, made, blocks, implementation=implementation)

        y, vjp = jax.vjp(op, x, matrices)
        return y, *vjp(tuple(weight.astype(x.dtype) for weight in weights))

    matrices = [(p["a"], p["b"]) for p, _ in problems]
    y, dx, gradients = together(x, matrices, fused.implementation)
    for i, (p, rank) in enumerate(problems):
        y_alone, _, da, db = fused.run(p, rank)
        np.testing.assert_array_equal(y[i], y_alone)
        np.testing.assert_array_equal(gradients[i][0], da)
        np.testing.assert_array_equal(gradients[i][1], db)
    _, exact, _ = together(x.astype(jnp.float32), matrices, "xla")
    _, plain, _ = together(x, matrices, "xla")
    assert_as_accurate_as(actual=dx, baseline=plain, exact=np.asarray(exact))


def test_zero_b_is_the_base_layer_to_the_bit(fused):
    p, rank = fused.problem(ranks=(8, 8, 8, 8))
    p |= {"b": jnp.zeros_like(p["b"])}
    y = fused.op(**p, rank=rank)
    other = fused.op(**p | {"dropout": None, "scaling": jnp.zeros(4)}, rank=rank)
    np.testing.assert_array_equal(y, other)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_other_slots_change_no_bit(fused):
    """Slots are renamed, and one of the others diverges."""
    p, rank = fused.problem((2, 0, -1, 2, 1))
    wanted = fused.run(p, rank)
    order = np.array([0, 3, 1, 2])  # new slot i holds old slot order[i]
    place, ordered = np.argsort(order), lambda x: np.asarray(x)[order]
    blocks = np.asarray(p["block_adapter"])
    q = p | {name: ordered(p[name]) for name in ("a", "b", "scaling")}
    q["block_adapter"] = np.where(blocks >= 0, place[blocks], -1).astype(np.int32)
    drop = p["dropout"]
    q["dropout"] = Dropout(ordered(drop.key), ordered(drop.rate), drop.token_index)
    # Slot 0 and its rows diverge; rows of padding must not read it.
    theirs = np.repeat(blocks == 0, 64)[:, None]
    for name in "ab":
        q[name][place[0]] = np.nan
    q["x"] = np.where(theirs, np.inf, p["x"]).astype(p["x"].dtype)
    y, dx, da, db = map(
        np.asarray, fused.run(*jax.tree.map(jnp.asarray, (q, ordered(rank))))
    )
    wanted = [np.asarray(x) for x in wanted]
    mine = ~theirs[:, 0]
    np.testing.assert_array_equal(y[mine], wanted[0][mine])
    np.testing.assert_array_equal(dx[mine], wanted[1][mine])
    for slot in (1, 2):
        np.testing.assert_array_equal(da[place[slot]], wanted[2][slot])
        np.testing.assert_array_equal(db[place[slot]], wanted[3][slot])
    assert not da[place[3]].any(), "an absent slot has a gradient"


def with_words(p, index):
    """Gives a problem the same dropout as words of three projections."""
    seed, step = jnp.arange(4), jnp.arange(4, dtype=jnp.int32) + 3
    places = np.array([[[0], [1], [5]], [[3], [2], [0]]], np.int32)
    drop = p["dropout"]

    @jax.jit
    def made(blocks, token_index):
        keys = dropout_keys(seed, step, *places)
        shared = blocks, token_index, p["x"].shape[1]
        return keys[1], mask_words(keys, *shared)[index]

    key, words = made(p["block_adapter"], drop.token_index)
    np.testing.assert_array_equal(key, drop.key)
    return p | {"dropout": Dropout(None, drop.rate, drop.token_index, words)}


def test_words_computed_beforehand_change_no_bit(fused):
    p, rank = fused.problem((1, -1, 0), n=128)
    wanted = fused.run(p, rank)
    for got, want in zip(fused.run(with_words(p, 1), rank), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    y, *_ = fused.run(with_words(p, 2), rank)
    assert not np.array_equal(y, wanted[0]), "another projection has another mask"


def test_words_of_another_layer_are_refused(fused):
    p, rank = fused.problem((1, 0))
    q = with_words(p, 1)
    more = fused.problem((1, 0, 1))[0] | {"dropout": q["dropout"]}
    with pytest.raises(ValueError, match="128 tokens, 4 slots and 256 features, want"):
        fused.run(more, rank)


def test_plain_linears_take_words_too():
    p, _ = BACK_ENDS["mosaic"].problem((1, 0))
    q = with_words(p, 1)
    plain = functools.partial(multi_lora_linear, implementation="xla")
    run = jax.jit(lambda p: plain(**p))
    np.testing.assert_array_equal(run(q), run(p))
    neither = Dropout(None, q["dropout"].rate, q["dropout"].token_index)
    with pytest.raises(ValueError, match="neither a key nor words"):
        plain(**q | {"dropout": neither})


def test_alone_equals_together_to_the_bit(fused):
    p, rank = fused.problem((1, 0, 1, 2, 1))
    y, dx, da, db = fused.run(p, rank)
    alone = np.flatnonzero(np.asarray(p["block_adapter"]) == 1)
    rows = (alone[:, None] * 64 + np.arange(64)).ravel()
    drop = p["dropout"]
    q = p | {
        "x": p["x"][rows],
        "block_adapter": jnp.array([1, 1, 1], jnp.int32),
        "dropout": Dropout(drop.key, drop.rate, drop.token_index[rows]),
    }
    weight = weight_of(p)[rows]

    def forward(x, a, b):
        q_ = q | {"x": x, "a": a, "b": b}
        return fused.op(**q_, rank=rank)

    y_alone, vjp = jax.vjp(forward, q["x"], q["a"], q["b"])
    dx_alone, da_alone, db_alone = vjp(weight.astype(y.dtype))
    np.testing.assert_array_equal(y_alone, y[rows])
    np.testing.assert_array_equal(dx_alone, dx[rows])
    np.testing.assert_array_equal(da_alone[1], da[1])
    np.testing.assert_array_equal(db_alone[1], db[1])


def _unrolled(fused, p, rank):
    def total(x):
        for scale in (1, 2):
            q = p | {"x": x, "w": p["w"] * scale}
            x = fused.op(**q, rank=rank)
        return x.astype(jnp.float32).sum()

    return total


@one_back_end
def test_works_under_jit_and_shard_map(fused):
    p, rank = fused.problem((1, 0), n=128, ranks=(4, 8), rates=(0.1, 0.5))
    gradient = jax.grad(_unrolled(fused, p, rank))
    wanted = gradient(p["x"])
    mesh = jax.make_mesh((1,), ("fsdp",))
    spec = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        gradient, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(sharded)(p["x"]), wanted)


def test_works_under_remat_and_scan_over_a_stack(fused):
    if not fused.takes_remat:
        pytest.skip("remat refuses the interpreter's callbacks")
    p, rank = fused.problem((1, 0), n=128, ranks=(4, 8), rates=(0.1, 0.5))
    stack = jnp.stack([p["w"], p["w"] * 2])

    def total(x):
        @jax.checkpoint
        def body(h, layer):
            q = p | {"x": h, "w": stack, "layer": layer}
            return fused.op(**q, rank=rank), None

        return jax.lax.scan(body, x, jnp.arange(2))[0].astype(jnp.float32).sum()

    got, want = (
        jax.jit(jax.grad(f))(p["x"]) for f in (total, _unrolled(fused, p, rank))
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("num_slots", "num_blocks", "block"), [(256, 300, 64), (5, 512, 128)]
)
def test_many_adapters_and_many_rows(fused, num_slots, num_blocks, block):
    """One case has 256 adapters, and one has 65,536 rows."""
    if not fused.compiled:
        pytest.skip("the interpreter would take hours")
    rng = np.random.default_rng(0)
    p, rank = fused.problem(
        tuple(rng.integers(-1, num_slots, num_blocks).tolist()),
        k=256,
        n=384,
        ranks=tuple(rng.integers(1, 65, num_slots).tolist()),
        rates=tuple(rng.choice([0.0, 0.1, 0.5], num_slots).tolist()),
        block=block,
    )
    low = p | {name: p[name].astype(jnp.bfloat16) for name in "ab"}
    exact = p | {name: p[name].astype(jnp.float32) for name in ("x", "w", "bias")}
    op = functools.partial(multi_lora_linear, implementation="xla")
    plain, wanted = (both_ways(lambda **q: op(**q), q) for q in (low, exact))
    for got, base, want in zip(fused.run(p, rank), plain, wanted, strict=True):
        assert_as_accurate_as(
            actual=got,
            baseline=jnp.asarray(base).astype(got.dtype),
            exact=np.asarray(want, np.float64),
        )


@one_back_end  # both have one rule
def test_vmap_gives_the_values_of_a_loop(fused):
    p, rank = fused.problem((0,), n=128, ranks=(4,), rates=None)
    run = lambda x: fused.op(**p | {"x": x}, rank=rank)
    xs = jnp.stack([p["x"], -2 * p["x"]])
    backward = lambda x: fused.run(p | {"x": x}, rank)
    jax.eval_shape(jax.vmap(backward), xs)  # it has the same rule
    mapped = jax.vmap(run)(xs)
    looped = [run(x) for x in xs]
    jax.tree.map(
        lambda got, *each: np.testing.assert_array_equal(got, np.stack(each)),
        mapped,
        *looped,
    )
