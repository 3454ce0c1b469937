"""Requests to a live run: each is answered, and changes no other job."""

import os
import pathlib
import shutil

import pytest

from jaxlora import LoraJob, RunConfig, Trainer, load_run
from jaxlora.errors import ConfigError
from jaxlora.run.folder import read_run_record
from jaxlora.run.live import client
from jaxlora.run.live.mailbox import ControlRequest, Mailbox
from jaxlora.run.live.status_file import read_status
from jaxlora.train import inbox
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.inbox import Inbox
from tests.jaxlora.train.runs import AtWindow, Killed, adapter_bytes, one_slot, outcome

pytestmark = pytest.mark.usefixtures("no_device")


def config_of(model, jobs, folder: pathlib.Path) -> RunConfig:
    first = jobs[0].replace(name="first", steps=8)
    return one_slot(model, folder, [first], checkpoint_every=2)


@pytest.fixture
def run(model, jobs, tmp_path) -> RunConfig:
    return config_of(model, jobs, tmp_path / "run")


@pytest.fixture
def late(jobs) -> LoraJob:
    return jobs[2].replace(name="late", steps=3)


def add(job: LoraJob) -> ControlRequest:
    settings = job.model_dump(mode="json", exclude_unset=True)
    return ControlRequest(action="add", job=job.name, settings=settings)


def stop(name: str, reason: str = "enough") -> ControlRequest:
    return ControlRequest(action="stop", job=name, reason=reason)


class Requester(AtWindow):
    """Makes requests after the first window."""

    def __init__(self, config: RunConfig, *requests: ControlRequest):
        super().__init__(self._make)
        self._box, self._requests = Mailbox(pathlib.Path(config.output_dir)), requests
        self.ids: list[str] = []

    def _make(self, _):
        if not self.ids:
            self.ids = [self._box.post(request) for request in self._requests]

    def answers(self) -> list[tuple[bool, str]]:
        """Takes the answers; a request that has none, or two, is an error."""
        found = [self._box.take_answer(name) for name in self.ids]
        assert None not in found and not self._box.names()
        assert all(self._box.take_answer(name) is None for name in self.ids)
        return [(answer.is_accepted, answer.text) for answer in found]


@pytest.fixture(scope="module")
def alone(model, jobs, tmp_path_factory) -> bytes:
    config = config_of(model, jobs, tmp_path_factory.mktemp("alone"))
    return outcome(config, model).bytes["first"]


def test_requests_are_answered_and_change_no_other_job(run, model, late, alone):
    bad_data = late.data.replace(path="/nowhere.jsonl")
    requester = Requester(
        run,
        add(late),
        add(late.replace(name="First")),
        add(late.replace(name="big", rank=16)),
        add(late.replace(name="wide", target_modules="all-linear")),
        add(late.replace(name="lost", data=bad_data)),
        stop("nobody"),
        ControlRequest(action="add", job="x", settings={"name": "x", "data": 3}),
    )
    result = Trainer(run, model).train(callbacks=[requester])
    answers = requester.answers()
    assert [accepted for accepted, _ in answers] == [True] + [False] * 6
    wanted = (
        "job 'late' has joined the run",
        "a job named 'First' is in this run already",
        "rank 16, and the slots of this run were made for 8",
        "which has no slots in this run. Add the module to slot_targets",
        "/nowhere.jsonl",
        "there is no job 'nobody'",
        "the job to add: data:",
    )
    for (_, text), words in zip(answers, wanted, strict=True):
        assert words in text
    assert [job.name for job in result.jobs] == ["first", "late"]
    assert result.num_compilations == 0  # the run before has compiled the programs
    assert adapter_bytes(run.output_dir)["first"] == alone
    status = read_status(result.output_dir).run
    assert [job.name for job in status.jobs] == ["first", "late"]
    assert status.counts == {"finished": 2} and status.seconds_left == 0


def test_stopping_pausing_and_resuming(run, model, late):
    requester = Requester(
        run,
        ControlRequest(action="pause", job="first", reason="lunch"),
        ControlRequest(action="resume", job="first"),
        stop("first", "good enough"),
    )
    result = Trainer(run, model).train(callbacks=[requester])
    assert [accepted for accepted, _ in requester.answers()] == [True] * 3
    (job,) = result.jobs
    assert (job.progress.status, job.progress.reason) == ("stopped", "good enough")
    assert job.progress.step == 2


def killed_once_it_joined(self, at_border) -> None:
    if len(self.jobs) > 1:
        raise Killed
    change(self, at_border)


def killed_while_data_are_read(self) -> None:
    if self._adds:
        raise Killed


def killed_before_the_answer(self) -> None:
    if self._answers:
        raise Killed


change = JobLifecycle.change


@pytest.mark.parametrize(
    ("place", "method", "kill"),
    [
        (Inbox, "_finish_adds", killed_while_data_are_read),
        (Inbox, "deliver", killed_before_the_answer),
        (JobLifecycle, "change", killed_once_it_joined),
    ],
)
def test_an_added_job_outlives_a_kill(
    run, model, late, alone, monkeypatch, place, method, kill
):
    """The resumed run has it, though its run file does not, and answers."""
    requester = Requester(run, add(late))
    with monkeypatch.context() as patch:
        patch.setattr(place, method, kill)
        with pytest.raises(Killed):
            Trainer(run, model).train(callbacks=[requester])
    result = Trainer(run, model).train(resume=True)
    assert [job.name for job in result.jobs] == ["first", "late"]
    assert {job.progress.status for job in result.jobs} == {"finished"}
    assert [accepted for accepted, _ in requester.answers()] == [True]
    assert adapter_bytes(run.output_dir)["first"] == alone
    record = read_run_record(result.output_dir)
    assert record is not None and record.added == ["late"]
    # The settings are a run file, with the job and without `auto`.
    settings = load_run(result.output_dir / "settings.yaml")
    assert [job.name for job in settings.jobs] == ["first", "late"]
    assert settings.jobs[0] == run.jobs[0] and settings.dtype == "float32"
    assert "auto" not in (settings.implementation, settings.attention)
    again = Trainer(settings, model).train(resume=True)
    assert [job.progress for job in again.jobs] == [j.progress for j in result.jobs]


def test_a_run_that_ends_takes_the_last_requests(run, model, late):
    """A job that was asked for in the last window still joins."""
    requester = Requester(run, add(late))
    requester._call = lambda trainer: (
        trainer.jobs[0].progress.step == 8 and (Requester._make(requester, trainer))
    )
    result = Trainer(run, model).train(callbacks=[requester])
    assert [accepted for accepted, _ in requester.answers()] == [True]
    assert [job.progress.status for job in result.jobs] == ["finished"] * 2


def test_a_folder_that_others_may_use_is_refused(run, model):
    (pathlib.Path(run.output_dir) / "control").mkdir(parents=True, mode=0o700)
    (pathlib.Path(run.output_dir) / "control").chmod(0o777)
    with pytest.raises(ConfigError, match="may be used by other users"):
        Trainer(run, model).train()


def test_a_run_that_ended_with_a_paused_job_continues(run, model, alone):
    pause = ControlRequest(action="pause", job="first")
    (job,) = Trainer(run, model).train(callbacks=[Requester(run, pause)]).jobs
    assert job.progress.status == "paused"
    answer = client.send(pathlib.Path(run.output_dir), "resume", "first")
    assert answer.is_accepted
    (job,) = Trainer(run, model).train(resume=True).jobs
    assert job.progress.status == "finished"
    assert adapter_bytes(run.output_dir)["first"] == alone


MAKE = {
    "folder": pathlib.Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/dev/zero"),
}


def test_what_is_no_request_ends_nobody(run, model, caplog):
    """Neither the live run nor the one that resumes; it stays where it is."""
    made = []

    class Maker(Requester):
        def _make(self, trainer):
            if self.ids:
                return
            super()._make(trainer)
            control = trainer.output_dir / "control"
            for number, make in enumerate(MAKE.values()):
                other = f"{number + 9:020d}-{'0' * 16}.request.json"
                for name in (other, f"{self.ids[number]}.answer.json"):
                    make(control / name)
                made.append(control / other)

    pause = ControlRequest(action="pause", job="first")
    requester = Maker(run, *[stop(f"nobody{i}") for i in range(len(MAKE))], pause)
    (job,) = Trainer(run, model).train(callbacks=[requester]).jobs
    assert job.progress.status == "paused"
    for path in made:
        assert f"{path} is ignored" in caplog.text
    answer = client.send(pathlib.Path(run.output_dir), "resume", "first")
    assert answer.is_accepted
    (job,) = Trainer(run, model).train(resume=True).jobs
    assert job.progress.status == "finished"
    assert len(made) == len(MAKE) and all(map(os.path.lexists, made))


def test_many_requests_take_little_time_of_a_window(run, model, alone, monkeypatch):
    """A few are taken at a time."""
    taken = []
    requester = Requester(run, *[stop(f"nobody{i}") for i in range(30)])
    take = Inbox._new

    def note_taken(self):
        new = take(self)
        taken.append(len(new))
        return new

    monkeypatch.setattr(inbox, "_MAX_OPEN", 4)
    monkeypatch.setattr(Inbox, "_new", note_taken)
    Trainer(run, model).train(callbacks=[requester])
    assert max(taken) <= 4 and sum(taken) == 30
    assert [accepted for accepted, _ in requester.answers()] == [False] * 30
    assert adapter_bytes(run.output_dir)["first"] == alone


def test_a_job_that_is_added_again(run, model, late):
    """It counts as added if its settings are the same, and is refused otherwise."""

    class Again(Requester):
        def _make(self, trainer):
            if not self.ids:
                self.ids = [self._box.post(self._requests[0])]
            elif len(self.ids) == 1 and len(trainer.jobs) == 2:
                self.ids += [self._box.post(request) for request in self._requests[1:]]

    requester = Again(run, add(late), add(late), add(late.replace(steps=2)))
    result = Trainer(run, model).train(callbacks=[requester])
    assert [job.name for job in result.jobs] == ["first", "late"]
    (_, added), (_, again), (is_accepted, other) = requester.answers()
    assert "has joined the run" in added and "with these settings" in again
    assert not is_accepted and "is in this run already" in other


def test_a_removed_folder_of_requests_is_made_again(run, model, caplog):

    def remove(trainer):
        if trainer.round == 2:
            shutil.rmtree(trainer.output_dir / "control")

    class Late(Requester):
        def _make(self, trainer):
            if trainer.round > 4:
                super()._make(trainer)

    requester = Late(run, stop("first"))
    (job,) = Trainer(run, model).train(callbacks=[AtWindow(remove), requester]).jobs
    assert job.progress.status == "stopped"
    assert requester.answers()[0][0]
    assert "the folder of requests was removed" in caplog.text
