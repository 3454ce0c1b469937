"""The contracts: each adapter as if it were alone, without recompiling, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import RunConfig, load_model
from jaxlora.adapters.optimizer import OptimizerInputs
from jaxlora.adapters.slots import SlotTable
from jaxlora.data.pack import pack_microbatch, split_by_segment_limit
from jaxlora.models.forward import SlotKeys
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.modules.variants.lora import LORA_B
from jaxlora.modules.variants.vera import VERA_B
from jaxlora.scheduler.papers import greedy
from jaxlora.train.execute.feed import TickPacker
from jaxlora.train.execute.layout import Layout
from tests import tiny
from tests.jaxlora.train import fused
from tests.jaxlora.train.mesh_runs import SUM_ROUNDING, write_untied
from tests.jaxlora.train.runs import LINEARS, plan_and_jobs
from tests.oracle import relative_error

# Sums in another order differ by rounding; Adam divides by their root.
ROUNDING = 2e-4
# Jobs that run alone share programs, because compiling takes longest.
ALONE = {"microbatch_tokens": 256}


def assert_same_training(one, other, names):
    for name in names:
        assert one.losses[name] == pytest.approx(other.losses[name], rel=1e-5)
        assert one.evals[name] == pytest.approx(other.evals[name], rel=1e-5)
        ours, theirs = one.adapters[name], other.adapters[name]
        assert ours.keys() == theirs.keys()
        for module, weights in ours.items():
            tensors, others = weights.tensors, theirs[module].tensors
            assert tensors.keys() == others.keys()
            for tensor, array in tensors.items():
                assert relative_error(array, others[tensor]) < ROUNDING
                starts_at_zero = tensor in (LORA_B.name, VERA_B.name)
                assert array.any() or not starts_at_zero, f"{name} did not learn"


@pytest.fixture(scope="module", autouse=True)
def memory_of_runs():
    """Memory is estimated from traces, as for users."""


@pytest.fixture(scope="module")
def model(two_layers):
    """The jobs adapt both of its layers or one."""
    return two_layers


@pytest.fixture(scope="module")
def done():
    """The runs that several tests compare with; each is trained once."""
    return {}


@pytest.fixture
def three(train, jobs, done):
    """The first three jobs, trained together."""
    if "three" not in done:
        done["three"] = train(jobs[:3])
    return done["three"]


@pytest.fixture
def alone(train, done):
    """Trains a job alone."""

    def run(job):
        key = repr(job)
        if key not in done:
            done[key] = train([job], **ALONE)
        return done[key]

    return run


def test_each_job_has_its_own_dropout(train, jobs):
    """Twins in the first and the last slot beside one without dropout."""
    shared = jobs[0].replace(dropout=0.5)
    twins = [shared.replace(name=name) for name in ("first", "plain", "last")]
    twins[1] = twins[1].replace(dropout=0.0)
    found = train(twins).losses
    assert found["first"] == pytest.approx(found["last"], rel=1e-5)
    assert found["first"][0] == pytest.approx(found["plain"][0], rel=1e-5)  # B is 0
    assert found["first"][-1] != pytest.approx(found["plain"][-1], rel=1e-4)


def test_dropout_depends_on_the_seed_and_the_step(train, three, jobs):
    """Jobs that start from the same weights, stay there, and see all data each step."""
    start = three.folder / "adapters" / jobs[0].name
    still = {"learning_rate": 0.0, "shuffle": False, "batch_size": 18, "steps": 2}
    still |= {"eval_fraction": 0.0, "eval_every": None, "init_from": str(start)}
    found = train(
        [
            jobs[0].replace(name=name, dropout=dropout, seed=seed, **still)
            for name, dropout, seed in (("a", 0.5, 1), ("b", 0.5, 2), ("plain", 0.0, 3))
        ]
    ).losses
    first, second = found["plain"]
    assert first == pytest.approx(second, rel=1e-6)
    assert found["a"][0] != pytest.approx(found["a"][1], rel=1e-4)
    assert found["a"][0] != pytest.approx(found["b"][0], rel=1e-4)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.grid), 3])
def test_alone_equals_together(train, three, alone, jobs, count):
    """Other neighbours, slots, packing and accumulation; the same updates."""
    together = three if count == 3 else train(jobs[:count])
    assert together.result.num_compilations <= 7
    for job in jobs[:count]:
        assert_same_training(together, alone(job), [job.name])


@pytest.mark.grid
def test_eight_together_equal_three_and_one(train, three, alone, jobs):
    """Recomputing does not matter either, as this run alone recomputes."""
    together = train(jobs, remat="elementwise")
    assert together.result.num_compilations <= 7
    assert_same_training(together, three, [job.name for job in jobs[:3]])
    for job in jobs[3:5]:
        assert_same_training(together, alone(job), [job.name])


@pytest.mark.grid
def test_an_unstable_job_leaves_the_bounds_of_its_neighbor(train, mesh_jobs):
    """Other packing only rounds differently; steps that are too large magnify that.

    How much depends on the model and the processor, so nothing is asserted of the wild
    job in another packing after its first step. In the same packing both jobs have the
    same bits, so what a larger microbatch changes is the order of sums.
    """
    own = {"name": "steady", "steps": 6, "target_modules": ("v_proj",)}
    steady = mesh_jobs[1].replace(**own)
    changes = {"learning_rate": 0.3, "warmup_steps": 0, "lr_schedule": "constant"}
    wild = steady.replace(
        **changes
        | {"name": "wild", "adam_eps": 1e-8, "max_grad_norm": None, "steps": 20}
    )
    one = train((steady, wild), max_concurrent_jobs=3)
    again = train((steady, wild), max_concurrent_jobs=3)
    other = train((steady, wild), max_concurrent_jobs=3, microbatch_tokens=128)
    for name in ("steady", "wild"):
        assert one.losses[name] == again.losses[name], name
        assert one.norms[name] == again.norms[name], name
        # Nothing is magnified before the first update.
        assert one.losses[name][0] == pytest.approx(other.losses[name][0], rel=1e-6)
        assert one.norms[name][0] == pytest.approx(other.norms[name][0], rel=1e-6)
    assert one.losses["steady"] == pytest.approx(other.losses["steady"], rel=1e-6)
    assert one.norms["steady"] == pytest.approx(other.norms["steady"], rel=SUM_ROUNDING)
    assert_same_training(one, other, ["steady"])
    assert one.progress["wild"].step == other.progress["wild"].step == 20


def test_a_neighbour_that_diverges_changes_nothing(train, jobs):
    wild = jobs[1].replace(name="wild", learning_rate=1e30, warmup_steps=0, steps=50)
    with_wild = train([jobs[0], wild, jobs[2]])
    assert with_wild.progress["wild"].status == "failed"
    assert "is not finite; lower learning_rate" in with_wild.progress["wild"].reason
    assert "wild" not in with_wild.adapters
    alone = train([jobs[0], jobs[2]], max_concurrent_jobs=3)
    assert_same_training(with_wild, alone, [jobs[0].name, jobs[2].name])


def test_a_neighbour_that_finishes_early_changes_nothing(train, alone, jobs):
    short = jobs[1].replace(name="short", steps=1)
    with_short = train([short, jobs[2]], max_concurrent_jobs=3)  # one stays empty
    assert with_short.progress["short"].step == 1
    assert_same_training(with_short, alone(jobs[2]), [jobs[2].name])


def test_same_bits_twice(train, three, jobs):
    one, two = three, train(jobs[:3])
    assert one.bytes == two.bytes
    assert one.losses == two.losses


OTHERWISE = {
    "remat": "mlp",
    "microbatch_tokens": 128,
    "block_tokens": 32,
    "window_steps": 2,
    "packer": "lorafusion",
}


@pytest.mark.parametrize(
    "settings",
    [
        OTHERWISE,
        pytest.param(
            {"remat": "layer", "window_steps": 1, "packer": "greedy"},
            marks=pytest.mark.grid,
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_how_it_runs_does_not_matter(train, three, jobs, settings):
    other = train(jobs[:3], **settings)
    assert_same_training(three, other, [job.name for job in jobs[:3]])


def test_microbatches_in_parts_teach_the_same(train, three, jobs, monkeypatch):
    def in_parts(self, tick, lengths, rows=None):
        (microbatch,) = tick
        return [(m,) for m in split_by_segment_limit(microbatch, 10**6, 2, lengths)]

    monkeypatch.setattr(TickPacker, "split", in_parts)
    names = [job.name for job in jobs[:3]]
    assert_same_training(train(jobs[:3], **OTHERWISE), three, names)


def test_seeds_matter(alone, jobs):
    """The negative control: what keys the streams changes the result."""
    other = jobs[0].replace(seed=5)
    assert alone(jobs[0]).bytes != alone(other).bytes


@pytest.mark.parametrize("window_steps", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_jobs_come_and_go_without_recompiling(train, alone, jobs, window_steps):
    """Eight jobs through three slots, one stopped, one more joining under way."""
    late = jobs[0].replace(name="late", rank=7, learning_rate=1e-3)
    counts = []

    def on_window(trainer):
        counts.append(trainer.layout.num_compilations())
        if len(counts) == 1:
            trainer.stop_job(jobs[1].name)
        if len(counts) == 2:
            trainer.add_job(late)

    outcome = train(
        jobs, max_concurrent_jobs=3, window_steps=window_steps, on_window=on_window
    )
    assert len(set(counts)) == 1
    assert outcome.progress[jobs[1].name].status == "stopped"
    # Other jobs may have had fewer steps by then.
    assert window_steps <= outcome.progress[jobs[1].name].step <= window_steps + 2
    finished = [n for n, p in outcome.progress.items() if p.status == "finished"]
    assert len(finished) == 8 and "late" in finished
    # A job that came into a used slot trains as in a new one.
    assert_same_training(outcome, alone(jobs[7]), [jobs[7].name])
    assert_same_training(outcome, alone(late), ["late"])


# ---- one step, to the bit ------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        "plain",
        "fp8",
        "rows",
        "whole",
        pytest.param("fused", marks=fused.only_where_it_runs),
    ],
)
def bench(request, model, jobs, tmp_path_factory):
    """Three jobs in three slots, and one microbatch that holds some of each.

    The programs of `plain` are those of `train(jobs[:3])`. With `rows`, the first two
    jobs train rows of the embedding and of a head that is not tied to it; with `whole`,
    whole copies of them, beside rows of the last job.
    """
    jobs = jobs[:3]
    settings = {"microbatch_tokens": 512, "block_tokens": 16}
    settings |= {"slot_rank": 8, "slot_targets": LINEARS}
    one_layer = tiny.CONFIG | {"num_hidden_layers": 1}
    if request.param == "fp8":
        settings["quantize_base"] = "fp8"
        folder = tmp_path_factory.mktemp("base") / "one"
        tiny.write_layers(folder, 1)
        model = load_model(folder, dtype="float32", quantize="fp8")
    if request.param == "fused":
        settings = {"microbatch_tokens": 2048} | fused.SETTINGS
        model = fused.wide_model(tmp_path_factory.mktemp("base") / "wide")
    if request.param in ("rows", "whole"):
        folder = tmp_path_factory.mktemp("base") / "untied"
        model = load_model(write_untied(folder, one_layer), dtype="float32")
        both = {"embed_tokens": [67, 73], "lm_head": [36, 67, 40]}
        if request.param == "rows":
            given = both, {"embed_tokens": [68], "lm_head": [67, 37]}, ()
            jobs = [
                job.replace(trainable_token_indices=own)
                for job, own in zip(jobs, given, strict=True)
            ]
        else:
            jobs = [
                jobs[0].replace(modules_to_save=["lm_head"]),
                jobs[1].replace(modules_to_save=["embed_tokens", "lm_head"]),
                jobs[2].replace(trainable_token_indices=both),
            ]
    config = RunConfig(model=str(model.folder), jobs=jobs, **settings)
    plan, runs = plan_and_jobs(config, model)
    spec, [stage] = plan.spec, Layout.of(plan.stages, model.params).stages
    rng = np.random.default_rng(0)
    batches, adapters = {}, {}
    for slot, run in enumerate(runs):
        run.update(status="running", slot=slot, step=2)
        batches[slot] = run.batch(slot, run.progress.step)
        modules = {
            name: dataclasses.replace(
                w,
                tensors=w.tensors
                | {"lora_b": rng.normal(size=w.b.shape).astype(np.float32) * 0.1},
            )
            for name, w in run.start.modules.items()
        }
        adapters[slot] = dataclasses.replace(run.start, modules=modules)
    samples = [s for batch in batches.values() for s in batch.to_schedule()[:2]]
    (microbatch,) = greedy.pack(samples, config.limits).microbatches
    packed = pack_microbatch(microbatch, batches, config.limits)

    def table() -> SlotTable:
        new = SlotTable(spec, stage.steps.write_slot, stage.placement)
        for slot in range(len(runs)):
            new.load(slot, adapters[slot], "adamw")
        return new

    return model, stage, table, packed


KEYS = SlotKeys(seed=np.array([7, 8, 9], np.int32), step=np.array([2, 2, 2], np.int32))


def without(packed, slots):
    """The same rows with some slots' tokens turned into padding."""
    block = len(packed.token_ids) // len(packed.block_adapter)
    gone = np.isin(packed.block_adapter, slots)
    rows = np.repeat(gone, block)
    return dataclasses.replace(
        packed,
        token_ids=np.where(rows, 0, packed.token_ids),
        segment_ids=np.where(rows, -1, packed.segment_ids),
        loss_inputs=jax.tree.map(
            lambda values: np.where(rows, 0, values), packed.loss_inputs
        ),
        block_adapter=np.where(gone, -1, packed.block_adapter),
    )


def all_alike(*, step_mask, count) -> OptimizerInputs:
    """Settings that are alike in all three slots."""
    half = jnp.full(3, 0.5)
    return OptimizerInputs(
        step_mask=jnp.array(step_mask),
        count=jnp.full(3, count),
        learning_rate=half / 50,
        rate_ratio=rate_ratios(lambda ratio: half),
        weight_decay=half,
        settings={"adamw": {"b1": half, "b2": half, "eps": half}},
        optimizer=jnp.zeros(3, jnp.int32),
        max_norm=half,
    )


def one_step(bench, packed, spoil=lambda state: state):
    """Gradients, losses, and weights after an optimizer step, by slot."""
    model, stage, table, _ = bench
    slots = table()
    state, out = accumulated(model, stage, spoil(slots.state), slots.settings, packed)
    gradients = jax.tree.map(np.array, state.pending.gradients)
    inputs = all_alike(step_mask=[True, True, True], count=2)
    state, result = stage.steps.step(state, inputs, (), slots.settings["rank"])
    return gradients, *jax.device_get((out, state.params, result))


def accumulated(model, stage, state, settings, packed):
    """The state after a microbatch, and the losses."""
    rows = jax.device_put(packed, stage.placement.sharding(stage.placement.rows))
    pending, out, _ = stage.steps.accumulate(
        model.params, state.params, state.pending, settings, rows, KEYS
    )
    return dataclasses.replace(state, pending=pending), out


def assert_slot_equal(one, other, slot):
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours[slot], theirs[slot])


@pytest.mark.parametrize("slot", range(3))
def test_absent_neighbours_change_no_bit(bench, slot):
    packed = bench[-1]
    assert set(packed.block_adapter.tolist()) == {-1, 0, 1, 2}
    others = [g for g in range(3) if g != slot]
    assert_slot_equal(
        one_step(bench, packed), one_step(bench, without(packed, others)), slot
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sick", range(3))
def test_a_diverged_neighbour_changes_no_bit(bench, sick, bad):
    """In weights, gradients and losses; forward, backward and in the optimizer."""

    def spoil(state):
        params = {k: jnp.array(v).at[sick].set(bad) for k, v in state.params.items()}
        return dataclasses.replace(state, params=params)

    healthy = one_step(bench, bench[-1])
    spoiled = one_step(bench, bench[-1], spoil)
    for slot in {0, 1, 2} - {sick}:
        assert_slot_equal(healthy, spoiled, slot)
        assert spoiled[1].is_finite[slot]
    assert not spoiled[1].is_finite[sick]
    assert not spoiled[3].is_finite[sick]
    assert not np.isfinite(spoiled[3].norm[sick])


def test_a_batch_that_is_not_finite_leaves_its_slot_as_it_is(bench):
    """Also one whose gradient is; and the next batch starts afresh."""
    _, stage, table, _ = bench
    slots = table()
    sick = jnp.array([True, False, True])

    def spoil(state):
        gradients = jax.tree.map(
            lambda g, p: jnp.ones_like(g) * p.any(range(1, p.ndim), keepdims=True),
            state.pending.gradients,
            state.params,
        )
        pending = dataclasses.replace(
            state.pending, gradients=gradients, is_finite=sick
        )
        return dataclasses.replace(state, pending=pending)

    before = jax.tree.map(np.array, slots.state.params)
    inputs = all_alike(step_mask=[True, True, False], count=2)
    state, result = stage.steps.step(
        spoil(slots.state), inputs, (), slots.settings["rank"]
    )
    assert np.isfinite(result.norm).all()
    assert result.is_finite.tolist() == [True, False, True]
    for path, now in state.params.items():
        # Where the adapter has no module, its tables stay zero.
        assert np.array_equal(now[0], before[path][0]) != before[path][0].any()
        np.testing.assert_array_equal(now[1], before[path][1])
        for moments in state.optimizer_state.values():
            assert not moments[path][1].any()
        assert not state.pending.gradients[path][1].any()
    assert state.pending.is_finite.all()


def test_a_later_microbatch_hides_none_that_was_not_finite(bench):
    model, stage, table, packed = bench
    slots = table()
    healthy = [False, True, True]
    pending = dataclasses.replace(slots.state.pending, is_finite=jnp.array(healthy))
    state = dataclasses.replace(slots.state, pending=pending)
    state, out = accumulated(model, stage, state, slots.settings, packed)
    assert out.is_finite.all()
    assert state.pending.is_finite.tolist() == healthy


def test_a_slot_without_a_whole_batch_stays_as_it_is(bench):
    model, stage, table, packed = bench
    slots = table()
    before = jax.tree.map(np.array, slots.state.params)
    state, _ = accumulated(model, stage, slots.state, slots.settings, packed)
    gradients = jax.tree.map(np.array, state.pending.gradients)
    inputs = all_alike(step_mask=[True, False, True], count=0)
    state, _ = stage.steps.step(state, inputs, (), slots.settings["rank"])
    for path, table_now in state.params.items():
        np.testing.assert_array_equal(table_now[1], before[path][1])
        kept = state.pending.gradients[path]
        np.testing.assert_array_equal(kept[1], gradients[path][1])
        assert not kept[0].any()
        assert not state.optimizer_state["mu"][path][1].any()
    # Slot 1 adapts every linear, so every table that it uses has something to keep.
    for path, gradient in gradients.items():
        assert gradient[1].any() == before[path][1].any(), path
