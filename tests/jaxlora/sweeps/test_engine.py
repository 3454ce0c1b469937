"""The driver of a sweep over groups: requests, refusals, and what a worker may do."""

import pathlib
import random
import re
import socket
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from unittest import mock

import pytest

from jaxlora import LoraJob, RunConfig, Sweep
from jaxlora.common import atomic
from jaxlora.config.sweep_config import ExitRule, Metric
from jaxlora.errors import CheckpointError, ConfigError, ProcessError, StorageError
from jaxlora.run.folder import SWEEP_LEDGER, check_folder
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.live.client import send
from jaxlora.run.live.mailbox import ControlRequest, Mailbox
from jaxlora.run.live.status_file import read_status
from jaxlora.run.lock import RunLock
from jaxlora.sweeps import suggesting
from jaxlora.sweeps.engine import driver as driving
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine import transport
from jaxlora.sweeps.engine.driver import Driver
from jaxlora.sweeps.engine.groups import Group, choose, keep_adapter, moves
from jaxlora.sweeps.engine.launch import Launcher, Lost
from jaxlora.sweeps.engine.ledger import Ledger
from jaxlora.sweeps.engine.requests import Requests, clone, pause, resume, stop
from jaxlora.sweeps.engine.run import _open, check_same_sweep
from jaxlora.sweeps.engine.state import SweepState
from jaxlora.sweeps.engine.transport import Workers
from jaxlora.sweeps.suggesting import Suggestions
from tests.jaxlora.sweeps.fake_worker import loss_of

STEPS = 4


def planned(names: str, slot_rank: int, num_slots: int = 1) -> Group:
    own = tuple(names.split())
    return Group(num_slots=num_slots, run={}, slot_rank=slot_rank, names=own)


def made_job(name: str, rank: int, **settings) -> LoraJob:
    given = {"data": {"path": "x"}, "eval_fraction": 0.1, **settings}
    return LoraJob(name=name, rank=rank, **given)


def configurations(ranks: dict[str, int], **priorities: int) -> SweepState:
    jobs = [
        made_job(name, rank, priority=priorities.get(name, 0))
        for name, rank in ranks.items()
    ]
    return SweepState(jobs, [])


def given(state: SweepState, groups: list[Group], free: dict[int, int]) -> list[str]:
    """Gives until nothing fits; returns names with the numbers of their groups."""
    queue, out, free = list(state.queue()), [], dict(free)
    while (chosen := choose(queue, groups, free)) is not None:
        found, number = chosen
        queue.remove(found)
        free[number] -= 1
        out.append(f"{found.name}{number}")
    return out


def test_planned_groups_take_their_own_in_order_and_then_what_is_left():
    groups = [planned("d b a", 8), planned("c e f", 64)]
    state = configurations(dict(a=4, b=8, c=64, d=8, e=16, f=8))
    # The order is that of the plan, not that of the run file.
    assert given(state, groups, {0: 2, 1: 1}) == ["d0", "b0", "c1"]
    # The first group has no more of its own, and c and e do not fit its slots.
    assert given(state, groups, {0: 5}) == ["d0", "b0", "a0", "f0"]
    # The other one takes over the last ones of the first group.
    assert given(state, groups, {1: 6}) == ["c1", "e1", "f1", "a1", "b1", "d1"]
    urgent = configurations(dict(a=4, b=8, c=64, d=8, e=16, f=8), a=1, c=1)
    assert given(urgent, groups, {0: 2, 1: 1}) == ["a0", "c1", "d0"]
    # Later jobs go where they fit; a worker refuses those that fit nowhere.
    late = configurations(dict(a=4, x=8, y=128))
    assert given(late, groups, {0: 9}) == ["a0", "x0"]
    assert given(late, groups, {1: 9}) == ["y1", "x1", "a1"]


def test_a_configuration_moves_only_where_it_fits(make):
    state = configurations(dict(a=64, b=4, c=4))
    groups = [planned("b", 8, num_slots=3), planned("a c", 64)]
    for number, group in enumerate(groups):
        group.is_live = True
        state.apply({"kind": "start", "group": number, "folder": f"groups/{number}-1"})
    for name in "ac":
        state.apply({"kind": "given", "name": name, "group": 1})
    state.apply({"kind": "given", "name": "b", "group": 0})
    assert [found.name for found in moves(state, groups)] == ["c"]


class InstantWorkers(Workers):
    """Trains one configuration of each group, to its next rung or end, per call."""

    def __init__(self, dies: int = 0):
        self.held, self.moving, self.verdicts, self.steps = {}, set(), {}, {}
        self.paused, self.stopped, self.ready = set(), {}, []
        self.finished, self.dies, self.killed = set(), dies, []

    def start(self, group, folder):
        self.held[group] = []
        self.ready.append(group)
        return True

    def send(self, group, messages):
        for message in map(m.decode, map(m.encode, messages)):
            match message:
                case m.Begin(run=run):
                    self.names = [job["name"] for job in run["jobs"]]
                case m.Give(name=name, settings=settings):
                    self.held[group].append(name)
                    if settings is not None:
                        self.names.append(name)
                        self.ready.append(group)
                case m.Verdict(name=name):
                    self.verdicts[name] = message
                case m.Ask(action="stop", name=name, reason=reason):
                    self.stopped[name] = reason
                case m.Ask(action="pause", name=name):
                    self.paused.add(name)
                case m.Ask(action="resume", name=name):
                    self.paused.discard(name)
                case m.Ask(action="release", name=name):
                    self.moving.add(name)
                case m.Finish() | m.End():
                    self.finished.add(group)

    def receive(self, timeout):
        out = []
        for group in self.ready:
            facts = [m.JobFacts(name=name, num_steps=STEPS) for name in self.names]
            out.append((group, m.Ready(jobs=tuple(facts))))
        self.ready = []
        for group, held in list(self.held.items()):
            if self.dies or group in self.finished:
                self.dies -= bool(self.dies)
                del self.held[group]
                out.append((group, Lost(reason="it died")))
                continue
            out += [(group, message) for message in self.train(held)]
        return out

    def train(self, held):
        for name in list(held):
            step = self.steps.setdefault(name, 0)
            verdict = self.verdicts.get(name)
            if name in self.moving:
                self.moving.discard(name)
                held.remove(name)
                yield m.Saved(name=name, is_released=True)
            elif name in self.stopped:
                held.remove(name)
                yield self.end(name, "stopped", self.stopped[name])
            elif verdict and verdict.stop and verdict.step == step:
                held.remove(name)
                yield self.end(name, "stopped early", verdict.stop[1])
            elif "bad" in name:
                held.remove(name)
                progress = JobProgress(status="failed", reason="it is bad")
                yield m.Ended(name=name, progress=progress)
            elif not (name in self.paused or (verdict and verdict.waits)):
                if step == STEPS:
                    held.remove(name)
                    yield self.end(name, "finished", "all steps are done")
                    return
                self.steps[name] = step + 1
                point = name, step + 1, loss_of(name, step + 1), self.value(name)
                yield m.Evaluated(number=1, points=(point,))
                return

    def value(self, name):
        """The sweep's metric of answers; None: it has none."""
        return None

    def end(self, name, status, reason):
        progress = JobProgress(
            status=status,
            reason=reason,
            step=self.steps[name],
            best_eval=loss_of(name, self.steps[name]),
            best_metric=self.value(name),
        )
        return m.Ended(name=name, progress=progress)

    def kill(self, group):
        self.killed.append(group)
        self.finished.add(group)

    def close(self):
        self.held.clear()


@pytest.fixture
def make(tmp_path):
    """Returns a function that makes a driver of a sweep in a folder."""

    def driver(
        jobs=4, workers=None, rules=(), search=None, slots=1, groups=2, metric=None
    ):
        found = [made_job(f"c{i}", 2) for i in range(jobs)]
        if search is not None:
            found = search_run().jobs
        settings = [job.model_dump(mode="json") for job in found]
        state, ledger = SweepState(found, rules, metric), Ledger(tmp_path)
        check_same_sweep(state, ledger)
        made = [Group(num_slots=slots, run={"jobs": settings}) for _ in range(groups)]
        workers = workers or InstantWorkers()
        return Driver(tmp_path, state, ledger, workers, made, search)

    return driver


def statuses(driver) -> dict[str, str]:
    found = driver.state.configurations.values()
    return {c.name: c.progress.status for c in found}


def test_halving_over_groups(make):
    driver = make(jobs=9, rules=[ExitRule(type="halving")])
    assert not driver.run()
    names = sorted(driver.state.configurations, key=lambda name: loss_of(name, 1))
    steps = [driver.state.configurations[name].progress.step for name in names]
    assert steps == [4, 4, 4, 2, 2, 1, 1, 1, 1]


def test_other_rungs_are_refused_when_the_sweep_goes_on(make):
    make(rules=[ExitRule(type="halving")])
    with pytest.raises(CheckpointError, match=r"eta 2 and first 0.25 .*eta 3"):
        make(rules=[ExitRule(type="halving", eta=3)])
    make(rules=[])


def test_evaluations_are_known_once_also_without_rules(make, tmp_path):
    """The report draws them, and a driver that continues finds them in the ledger."""
    driver = make(jobs=2, workers=InstantWorkers(dies=1))
    driver.run()
    points = {f"c{i}": [(s, loss_of(f"c{i}", s)) for s in range(1, 5)] for i in (0, 1)}
    assert driver.state.decisions.points == points
    assert make(jobs=2).state.decisions.points == points


def test_requests(make, tmp_path):
    """Each is answered when the ledger has its effect, and repeats change nothing."""
    mailbox, asked, answers = Mailbox(tmp_path), [], {}
    job = {"name": "late", "data": {"path": "x"}}
    requests = [
        ControlRequest(action="pause", job="c1"),
        ControlRequest(action="stop", job="c3", reason="enough"),
        ControlRequest(action="stop", job="nobody"),
        ControlRequest(action="clone", job="c0", settings={"learning_rate": 1e-3}),
        ControlRequest(action="add", job="late", settings=job),
        ControlRequest(action="add", job="c0", settings=job | {"name": "c0"}),
        ControlRequest(action="add", job="bad", settings=job | {"name": "bad"}),
        ControlRequest(action="add", job="x", settings={"name": "x"}),
    ]
    driver, takes = make(), Requests(tmp_path)

    def each_round(driver):
        if not asked:
            asked.extend(map(mailbox.post, requests))
        takes(driver)
        for name in asked:
            if (found := mailbox.take_answer(name)) is not None:
                answers[name] = found

    assert not driver.run(each_round=each_round)
    found = [answers[name] for name in asked]
    accepted = [answer.is_accepted for answer in found]
    assert accepted == [True, True, False, False, True, False, True, False]
    assert "there is no job 'nobody'" in found[2].text
    assert "no state in a group now" in found[3].text
    assert "is in this run already" in found[5].text
    assert "data" in found[7].text
    ends = statuses(driver)
    assert ends.pop("c1") == "waiting"  # it stays paused, and nobody waits for it
    assert ends.pop("c3") == "stopped"
    assert ends.pop("bad") == "failed"
    assert set(ends) == {"c0", "c2", "late"} and set(ends.values()) == {"finished"}
    shown = {j.name: j.progress.status for j in read_status(tmp_path).run.jobs}
    assert shown["c1"] == "paused" and shown["late"] == "finished"
    # The next start continues the paused one, and has the job that was added.
    second = make()
    with pytest.raises(ConfigError, match="has ended: all steps are done"):
        stop(second, "late", "")
    assert send(tmp_path, "resume", "c1").is_accepted
    second.run(each_round=Requests(tmp_path))
    assert statuses(second)["c1"] == "finished"


def copy_of(driver, of: str, **changes) -> str:
    return clone(driver, of, {"learning_rate": 1e-3, **changes})


def test_a_copy_starts_in_the_group_of_its_configuration(make):
    driver = make(jobs=2)
    driver._start_due()
    driver._assign()
    group = driver.state.configurations["c1"].group
    assert copy_of(driver, "c1", name="copy") == "copy"
    with pytest.raises(ConfigError, match=r"copy.*to start as a copy itself"):
        clone(driver, "copy", {"learning_rate": 3e-3})
    with pytest.raises(ConfigError, match="rank: cannot change in a copy"):
        copy_of(driver, "c0", rank=4)
    driver._assign()
    copy = driver.state.configurations["copy"]
    assert copy.group == group  # although it has no free slot
    both = copy, driver.state.configurations["c1"]
    assert not any(map(driver.state.may_leave, both))
    driver.flush()
    facts = m.JobFacts(name="copy", num_steps=STEPS, clone_step=3)
    driver._take([(group, m.Ready(jobs=(facts,)))])
    assert (copy.origin, copy.first_step) == ("c1", 3)
    assert driver.state["copy"].step == 3  # no rung before it waits for the copy
    assert driver._outbox[group] == [m.Ask(action="begin", name="copy")]
    driver._take([(group, m.Saved(name="copy", is_released=False))])
    assert driver.state.may_leave(copy)


def test_a_copy_whose_start_is_not_known_starts_again(make):
    """Its worker is lost before the step is in the ledger, or a checkpoint has it."""
    driver = make(jobs=2)
    driver._start_due()
    driver._assign()
    copy_of(driver, "c1", name="copy")
    driver._assign()
    copy, parent = (driver.state.configurations[n] for n in ("copy", "c1"))
    driver._take([(copy.group, Lost(reason="it died"))])
    assert copy.sources == [] and parent.sources and copy not in driver.state.queue()
    pause(driver, "c1", "enough")
    stop(driver, "c0", "enough")
    stopped = JobProgress(status="stopped")
    driver.note_end(driver.state.configurations["c0"].group, "c0", stopped)
    assert driver.state.is_over()  # both wait for the user
    resume(driver, "c1")
    assert not driver.state.is_over() and not driver.state.copies()
    driver._start_due()
    driver._assign()
    driver._assign()
    assert copy.group == parent.group is not None
    # Where the other one has ended, a worker looks whether a checkpoint has the copy.
    driver.note_end(parent.group, "c1", JobProgress(status="finished"))
    driver._take([(copy.group, Lost(reason="it died"))])
    assert driver.state.queue() == [copy]


def search_run() -> RunConfig:
    """A search over one setting: two draws, and five configurations in all."""
    space = {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}
    job = {"name": "s", "data": {"path": "x"}, "eval_fraction": 0.1}
    sweep = Sweep(
        method="optuna", count=5, initial=2, parameters={"learning_rate": space}
    )
    return RunConfig(model="m", jobs=[job], max_concurrent_jobs=1, sweep=sweep)


def test_a_search_suggests_to_all_groups_and_continues(make, monkeypatch):
    asked = []

    def suggest(axes, seed, number, tried):
        """Suggests by the number of those before, whatever the order of arrival."""
        asked.append([(t.state, t.cost) for t in tried])
        rng = random.Random(number)
        while True:
            yield {axis.name: rng.random() for axis in axes}

    monkeypatch.setattr(suggesting, "suggestions", suggest)
    monkeypatch.setattr(suggesting, "check_installed", lambda: None)
    num_rounds = []

    def is_asked_to_end():
        num_rounds.append(None)
        return len(num_rounds) > 6

    first = make(search=Suggestions(search_run()))
    assert first.run(is_asked_to_end)
    given = list(first.state.configurations)
    assert 2 < len(given) < 5
    # A second start knows what was suggested, and goes on from there.
    second = make(search=Suggestions(search_run()))
    assert list(second.state.configurations) == given
    assert not second.run()
    found = second.state.configurations
    assert list(found)[: len(given)] == given and len(found) == 5
    assert len({c.settings.learning_rate for c in found.values()}) == 5
    assert set(statuses(second).values()) == {"finished"}
    # At most as many are open as there are slots, and the results are known.
    for tried in asked:
        assert sum(state == "running" for state, _ in tried) < 2
    costs = {c.progress.best_eval for c in found.values()}
    assert {cost for _, cost in asked[-1] if cost is not None} <= costs


def test_halving_over_groups_by_a_metric_of_answers(make):
    """A higher value is better, and the losses would say the opposite."""

    class Answering(InstantWorkers):
        def value(self, name):
            return loss_of(name, 1)

    rules, metric = [ExitRule(type="halving")], Metric(name="f1")
    driver = make(jobs=9, rules=rules, metric=metric, workers=Answering())
    assert not driver.run()
    found = driver.state.configurations
    names = sorted(found, key=lambda name: -loss_of(name, 1))
    steps = [found[name].progress.step for name in names]
    assert steps == [4, 4, 4, 2, 2, 1, 1, 1, 1]
    again = make(jobs=9, rules=rules, metric=metric)
    assert again.state.decisions.metrics == driver.state.decisions.metrics
    with pytest.raises(CheckpointError, match=r"metric is f1 .* eval_loss now"):
        make(jobs=9, rules=rules)


def test_a_group_whose_worker_ends_again_and_again_is_given_up(make, monkeypatch):
    driver = make(workers=InstantWorkers(dies=5))
    assert not driver.run() and set(statuses(driver).values()) == {"finished"}
    assert [group.is_given_up for group in driver.groups] == [True, False]
    monkeypatch.setattr(driving, "_MOST_FAILURES", 2)
    with pytest.raises(ProcessError, match=r"all 2 groups .* 2 times.*--resume"):
        make(jobs=5, workers=InstantWorkers(dies=99)).run()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "groups").touch()
    launcher = Launcher((sys.executable, "-c", ""), [{}], [None])
    with pytest.raises(StorageError, match="groups"):
        launcher.start(0, tmp_path / "groups" / "0-1", b"")


def test_a_lost_worker_leaves_no_temporary_files(make, tmp_path):
    """Nobody else writes to its folder again; nor after a driver that was killed."""
    place = tmp_path / "groups" / "0-1" / "adapters"

    class Dying(InstantWorkers):
        def start(self, group, folder):
            if folder == place.parent:
                leave(place / ".c0.0123abcd.jaxlora-tmp")
            return super().start(group, folder)

    make(workers=Dying(dies=1)).run()
    assert place.is_dir() and not list(place.iterdir())
    left = [
        leave(p / ".status.json.0123abcd.jaxlora-tmp") for p in (place.parent, tmp_path)
    ]
    _open(tmp_path, resume=True).close()
    assert not any(path.exists() for path in left)


def leave(folder: pathlib.Path) -> pathlib.Path:
    """Makes the temporary folder of a process that was killed."""
    folder.mkdir(parents=True)
    (folder / "jaxlora.txt").write_text(atomic._MARK_TEXT)
    return folder


def test_a_silent_worker_is_killed_and_a_wrong_setting_ends_the_sweep(
    make, monkeypatch
):
    monkeypatch.setattr(driving, "_SILENT_SECONDS", -1.0)
    workers = InstantWorkers()
    with pytest.raises(ProcessError):
        make(workers=workers).run()
    assert set(workers.killed) == {0, 1}

    class Refusing(InstantWorkers):
        def train(self, held):
            if held == ["c0"]:
                yield m.Failed(reason="rank is 9", is_final=True)
            yield from super().train(held)

    monkeypatch.undo()
    workers = Refusing()
    driver = make(workers=workers)
    with pytest.raises(ConfigError, match="group 0 cannot train: rank is 9"):
        driver.run()
    assert workers.finished == {0, 1}  # asked to save what they have done


def test_a_driver_that_was_stopped_kills_no_worker(make, monkeypatch):
    """Their signs of life are still to be read."""
    driver = make()
    driver._start_due()
    now = driving.time.monotonic()
    for group in driver.groups:
        group.beat = now
    monkeypatch.setattr(driving.time, "monotonic", lambda: now + 1000)
    driver._start_due()
    assert not driver._workers.killed
    later = now + 1000 + driving._STOPPED_SECONDS
    for seconds in (-61, -1, 1):  # rounds go on, and nothing comes
        monkeypatch.setattr(driving.time, "monotonic", lambda at=later + seconds: at)
        assert not driver._workers.killed
        driver._start_due()
    assert driver._workers.killed == [0, 1]


DOOR = """
import json, sys
from multiprocessing.connection import Client
door = json.load(sys.stdin)
link = Client(tuple(door["address"]), "AF_INET", bytes.fromhex(door["key"]))
link.send_bytes(b"%d" % door["number"])
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a worker; it returns the driver's end."""
    made = []

    def workers(code: str) -> Workers:
        made.append(Workers(Launcher((sys.executable, "-I", "-c", code), [{}], [None])))
        assert made[-1].start(0, tmp_path / "groups" / "0-1")
        return made[-1]

    yield workers
    for one in made:
        one.close()


def all_of(workers: Workers) -> list:
    """Returns what comes until the worker is lost."""
    found = []
    while not (found and isinstance(found[-1], Lost)):
        found += [message for _, message in workers.receive(1.0)]
    return found


def test_a_worker_that_reads_nothing_does_not_block_its_driver(start):
    """Its messages wait, in their order, until it does."""
    code = f"{DOOR}sys.stdin.read(); import time; time.sleep(0.3)\n"
    code += "while link.recv_bytes() != b'Finish {}': pass\n"
    workers = start(code + "link.send_bytes(b'Alive {}')")
    long = m.Ask(action="stop", name="c0", reason=10_000 * "x")
    for _ in range(1000):  # 10 MB: more than a connection has room for
        workers.send(0, [long])
    workers.send(0, [m.Finish()])
    found = all_of(workers)
    assert found[0] == m.Alive() and "ended with 0" in found[1].reason


def test_a_worker_that_does_not_connect_or_sends_something_else_is_lost(start):
    (lost,) = all_of(start("print('no such module'); raise SystemExit(3)"))
    assert re.search(
        r"ended with 3; .*worker.log ends with: no such module", lost.reason
    )
    (lost,) = all_of(start(f"{DOOR}link.send_bytes(b'Ended {{}}'); link.recv_bytes()"))
    assert "signal 9" in lost.reason
    (lost,) = all_of(start(f"{DOOR}link.send(print); link.recv_bytes()"))  # pickled
    assert "signal 9" in lost.reason


def test_a_worker_that_stops_amid_a_message_does_not_block_its_driver(start):
    code = f"{DOOR}import os; os.write(link.fileno(), bytes([0, 0, 0, 99, 1]))\n"
    workers = start(code + "link.recv_bytes()")
    while not workers._workers[0].is_connected:
        assert workers.receive(0.1) == []
    assert workers.receive(0.1) == []
    workers.kill(0)
    assert "signal 9" in all_of(workers)[0].reason


def test_nobody_connects_without_the_key(start):
    """Nor does somebody who says nothing keep the worker out."""
    workers = start(f"{DOOR}link.send_bytes(b'Alive {{}}')")
    address = workers._listener.address
    with socket.create_connection(address), pytest.raises(AuthenticationError):
        Client(address, "AF_INET", b"guessed")
    assert [type(one) for one in all_of(workers)] == [m.Alive, Lost]


def test_somebody_who_says_nothing_is_sent_away(start, monkeypatch):
    monkeypatch.setattr(transport, "_DOOR_SECONDS", 1)
    workers = start(f"{DOOR}link.recv_bytes()")
    with socket.create_connection(workers._listener.address) as silent:
        silent.settimeout(10)
        while silent.recv(100):  # the challenge, and then the end
            pass


def test_a_worker_that_cannot_be_killed_loses_its_connection(start, monkeypatch):
    """It may be on a host that nobody reaches, and would go on for ever."""
    code = f"{DOOR}\ntry: link.recv_bytes()\nexcept EOFError: raise SystemExit(7)"
    workers = start(code)
    worker = workers._workers[0]
    while not worker.is_connected:
        assert workers.receive(0.1) == []
    process = worker.process
    worker.process = mock.Mock(ending=lambda seconds: Lost(reason="it was killed"))
    workers.kill(0)
    assert all_of(workers) == [Lost(reason="it was killed")]
    assert "ended with 7" in process.ending(10.0).reason
    late = Client(workers._listener.address, "AF_INET", workers._key)
    late.send_bytes(b"0")
    with pytest.raises(EOFError):
        late.recv_bytes()


def test_closing_while_somebody_connects(start):
    workers = start(DOOR)
    accept = [one for one in threading.enumerate() if one.name == "accept"][-1]
    workers._is_closed = True
    socket.create_connection(workers._listener.address).close()
    accept.join(10.0)
    workers.close()


def test_an_adapter_that_was_moved_before_a_kill_is_found(tmp_path):
    """The driver may die between the move and the record of the end."""
    folder = tmp_path / "groups" / "0-1" / "adapters" / "c0"
    assert keep_adapter(tmp_path, "c0", folder) is None
    for text in ("first", "again"):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(text)
        assert keep_adapter(tmp_path, "c0", folder) == "adapters/c0"
    assert keep_adapter(tmp_path, "c0", folder) == "adapters/c0"
    assert (tmp_path / "adapters" / "c0" / "weights").read_text() == "again"


def test_the_ledger_drops_a_record_that_was_cut_short(make, tmp_path):
    make().run()
    path = tmp_path / SWEEP_LEDGER
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "given", "na')
    ledger = Ledger(tmp_path)
    assert path.read_bytes() == whole
    ledger.append([{"kind": "begin"}])
    ledger.close()
    assert Ledger(tmp_path).records[-1] == {"kind": "begin"}
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(CheckpointError, match="line 1 is not a record"):
        Ledger(tmp_path)


def test_a_run_of_one_process_leaves_a_sweep_alone(make, tmp_path):
    """Without groups, the same run file would begin anew in the same folder."""
    make()
    for resumes in (False, True):
        with pytest.raises(CheckpointError, match=r"several groups.*with sweep.groups"):
            check_folder(tmp_path, resume=resumes)


def test_two_drivers_on_one_folder_are_refused(tmp_path):
    with (
        RunLock(tmp_path),
        pytest.raises(CheckpointError, match="is in use by"),
        RunLock(tmp_path),
    ):
        raise AssertionError("two drivers have the folder")
