"""Starts and ends of jobs cost the thread that trains little time.

A sweep of many small jobs would otherwise start and end them one after the other.
"""

import collections
import concurrent.futures
import dataclasses
import threading
import types
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from jaxlora import Trainer
from jaxlora.adapters import settings_table, slots, staged_slots
from jaxlora.adapters.fresh import is_drawn_alone
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.programs.program import Program
from jaxlora.train import open_run
from jaxlora.train.execute import draw_ahead
from jaxlora.train.execute.draw_ahead import DrawAhead
from jaxlora.train.execute.evaluation import Evaluator
from jaxlora.train.execute.executor import Executor
from jaxlora.train.report import plot, stopwatch
from jaxlora.train.report.plot import LossPlot
from jaxlora.train.report.stopwatch import Stopwatch
from tests.jaxlora.run import made_events
from tests.jaxlora.train.runs import two_slots

_SECONDS = 60.0  # a wait that is longer has failed


@pytest.fixture
def counted(monkeypatch):
    """Counts calls by name, and those by other threads than the one that trains."""
    calls, elsewhere = collections.Counter(), collections.Counter()

    def count(owner, attribute, name_of=lambda name, *_: name):
        called = getattr(owner, attribute)

        def counting(*args, **settings):
            is_main = threading.current_thread() is threading.main_thread()
            where = calls if is_main else elsewhere
            where[name_of(attribute, *args)] += 1
            return called(*args, **settings)

        monkeypatch.setattr(owner, attribute, counting)

    count(open_run, "fresh_adapter")
    count(slots, "padded_rows")
    count(slots, "adapter_from_rows")
    count(Executor, "wait")
    count(Program, "__call__", lambda _, program, *args: program.what)
    return calls, elsewhere


def test_a_start_and_an_end_take_few_calls_of_the_thread_that_trains(
    model, jobs, tmp_path, counted
):
    """Eight jobs draw, pad and read beside it, and run three programs each."""
    calls, elsewhere = counted
    some = [
        jobs[1].replace(name=f"j{i}", seed=i, steps=1, eval_fraction=0, eval_every=None)
        for i in range(8)
    ]
    Trainer(two_slots(model, tmp_path / "run", some), model).train()
    assert calls["writing a slot"] == 16  # eight jobs start and leave
    assert calls["reading a slot"] == 8
    beside = {"fresh_adapter": 8, "padded_rows": 8, "adapter_from_rows": 8}
    assert {name: elsewhere[name] for name in beside} == beside
    assert not calls.keys() & beside.keys()
    assert calls["wait"] == 0  # so the devices have work while adapters are read


@pytest.fixture
def trainer(model, jobs, tmp_path):
    return Trainer(two_slots(model, tmp_path / "run", jobs[:4]), model)


def test_weights_that_are_drawn_ahead_are_the_same(trainer):
    ahead = DrawAhead(trainer.slots)
    ahead.begin(trainer.jobs)
    for job in reversed(trainer.jobs):
        (found,), (wanted,) = ahead.take(job), trainer.slots.pad(job.start)
        assert found.shapes == wanted.shapes
        jax.tree.map(np.testing.assert_array_equal, found.rows, wanted.rows)


@pytest.mark.parametrize(
    ("most_jobs", "most_slots", "drawn"), [(8, 3, 3), (2, 3, 2), (8, 0, 1)]
)
def test_what_is_drawn_ahead_is_bounded(
    trainer, monkeypatch, most_jobs, most_slots, drawn
):
    """In jobs and in bytes; the weights of one job are always drawn."""
    monkeypatch.setattr(draw_ahead, "_MOST_JOBS", most_jobs)
    each = 2 * trainer.slots.row_bytes
    monkeypatch.setattr(draw_ahead, "_MOST_BYTES", each * most_slots)
    ahead = DrawAhead(trainer.slots)
    ahead.begin(trainer.jobs)
    assert [*ahead._drawn] == [job.name for job in trainer.jobs[:drawn]]
    for future in ahead._drawn.values():
        (found,) = future.result(_SECONDS)
        tensors = [*found.adapter.by_path().values(), *found.rows.values()]
        assert sum(x.nbytes for x in tensors) <= each
    kept = dict(ahead._drawn)
    ahead.begin([trainer.jobs[0], trainer.jobs[3]])
    assert ahead._drawn[trainer.jobs[0].name] is kept[trainer.jobs[0].name]
    assert trainer.jobs[1].name not in ahead._drawn  # its turn does not come


def test_only_jobs_that_can_start_are_drawn_when_a_run_begins(trainer):
    """In the order in which they start: not those that have ended or are held."""
    ended, first, second, held = trainer.jobs
    second.prepared = dataclasses.replace(
        second.prepared, settings=second.settings.replace(priority=1)
    )
    ended.update(status="finished")
    trainer.pause_job(held.name, "it waits")
    assert trainer._run._first() == [second, first]


@pytest.mark.parametrize(
    ("settings", "is_alone"),
    [
        ({}, True),
        ({"init_lora_weights": "gaussian"}, True),
        ({"use_dora": True}, False),
        ({"init_lora_weights": "olora", "weight_decay": 0}, False),
    ],
)
def test_no_thread_runs_programs_to_draw(jobs, trainer, settings, is_alone):
    """Programs on several devices must start in the same order on all of them."""
    assert is_drawn_alone(jobs[1].replace(**settings)) == is_alone
    job = trainer.jobs[0]
    job.is_drawn_alone = is_alone
    ahead = DrawAhead(trainer.slots)
    ahead.begin([job])
    assert bool(ahead._drawn) == is_alone
    assert ahead.take(job)[0].rows.keys() == trainer.slots.pad(job.like)[0].rows.keys()


def test_an_adapter_is_read_as_it_was_though_its_slot_changes(trainer):
    """Only so many wait on the devices; the next call waits for one of them."""
    job, other = trainer.jobs[0], trainer.jobs[1]
    start, other_start = job.start, other.start
    trainer.slots.load(1, start, "adamw")
    may_read = threading.Event()
    trainer.slots._room = threading.Semaphore(1)
    table = trainer.slots.tables[0]
    begin = table.begin_reading

    def slow(slot, like):
        read = begin(slot, like)
        return lambda: (may_read.wait(_SECONDS), read())[1]

    table.begin_reading = slow
    first = trainer.slots.begin_reading(1, job.like)
    trainer.slots.clear(1)
    trainer.slots.load(1, other_start, "adamw")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(trainer.slots.begin_reading, 1, other.like)
        assert not first.done() and not second.done()
        may_read.set()
        found = first.result(_SECONDS), second.result(_SECONDS).result(_SECONDS)
    for adapter, wanted in zip(found, (start, other_start), strict=True):
        assert adapter.fingerprint() == wanted.fingerprint()


def test_a_copy_that_cannot_be_queued_takes_no_room(trainer, monkeypatch):
    """Otherwise, a later one would wait for it forever."""
    job, slots = trainer.jobs[0], trainer.slots
    before = slots._room._value
    with monkeypatch.context() as patched:
        patched.setattr(slots.tables[0], "begin_reading", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            slots.begin_reading(1, job.like)
    assert slots._room._value == before


@pytest.mark.parametrize(
    ("copy_bytes", "room"), [(1, 8), (1 << 26, 4), (1 << 28, 1), (1 << 30, 1)]
)
def test_copies_that_wait_on_the_devices_are_bounded(copy_bytes, room):
    table = Mock(spec=SlotTable, copy_bytes=copy_bytes)
    assert staged_slots._MOST_UNREAD == 8
    assert StagedSlots([], [table])._room._value == room


def test_settings_of_many_slots_are_put_on_the_devices_at_once(trainer, monkeypatch):
    puts, put = [], settings_table.put
    monkeypatch.setattr(
        settings_table, "put", lambda tree, where: puts.append(tree) or put(tree, where)
    )
    for slot, job in enumerate(trainer.jobs[:2]):
        trainer.slots.load(slot, job.start, "adamw")
    (table,) = trainer.slots.tables
    assert not puts
    for key, values in table.settings.items():
        np.testing.assert_array_equal(values, table.settings_on_host()[key])
    assert len(puts) == 1 and {"scaling", "rank"} <= puts[0].keys()


def test_evaluations_are_queued_before_the_host_waits(
    model, jobs, tmp_path, monkeypatch
):
    """The devices do not idle while the held-out samples are packed."""
    order = []
    for owner, name in ((Executor, "wait"), (Evaluator, "begin")):
        called = getattr(owner, name)

        def noting(*args, name=name, called=called):
            order.append(name)
            return called(*args)

        monkeypatch.setattr(owner, name, noting)
    Trainer(two_slots(model, tmp_path / "run", jobs[:2]), model).train()
    assert order == ["begin", "wait"] * (len(order) // 2) and len(order) > 2


def test_a_block_within_another_counts_for_itself(monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(stopwatch, "time", clock)
    watch = Stopwatch()
    now[0] = 1.0
    with watch.on("training"):
        now[0] = 5.0
        with watch.on("evaluation"):
            now[0] = 7.0
        now[0] = 8.0
        with pytest.raises(OSError), watch.on("evaluation"):
            now[0] = 8.5
            raise OSError
    assert watch.seconds() == {"training": 5.0, "evaluation": 2.5, "other": 1.0}
    now[0] = 9.0
    with watch.on("exports"):
        now[0] = 9.04
    assert str(watch) == "training 5.0, evaluation 2.5, other 1.5"


def test_a_run_says_what_its_time_went_to(model, jobs, tmp_path, caplog):
    caplog.set_level("INFO", "jaxlora")
    trainer = Trainer(two_slots(model, tmp_path / "run", jobs[:1]), model)
    trainer.train()
    assert [r for r in caplog.records if r.message.startswith("seconds since")]
    every = {"training", "evaluation", "starting jobs", "ending jobs", "exports"}
    assert every <= trainer._run.watch.seconds().keys()


def test_the_picture_does_not_wait_for_its_library(tmp_path, monkeypatch):
    """It is imported beside training, and once."""
    begun = []
    monkeypatch.setattr(plot, "in_background", begun.append)
    follows = LossPlot(tmp_path)
    assert not begun
    for _ in range(3):
        follows.on_event(made_events.window(1))
    assert begun == [plot._import_library]


@pytest.mark.parametrize(("every", "reserved"), [(None, 0), (1, 0), (2, 1)])
def test_memory_of_a_snapshot_is_reserved_before_the_first(
    model, jobs, tmp_path, monkeypatch, every, reserved
):
    """Not beside it, as the host would hold both."""
    calls = []
    monkeypatch.setattr(
        StagedSlots, "reserve_snapshot", lambda self: lambda: calls.append(self)
    )
    config = two_slots(model, tmp_path / "run", [jobs[1].replace(steps=3)])
    Trainer(config.replace(checkpoint_every=every), model).train()
    assert len(calls) == reserved
