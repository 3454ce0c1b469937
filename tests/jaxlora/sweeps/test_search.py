"""Suggestions while a sweep runs: from results alone, and the same after a resume."""

import importlib.util
import random

import pytest

from jaxlora import LoraJob, RunConfig, Sweep
from jaxlora.config.job_settings import axes_of
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps import suggesting
from jaxlora.sweeps.suggesting import Suggestions, Tried, suggestions

PARAMETERS = {
    "learning_rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
    "rank": [4, 8, 64],
    "lora_alpha": {"times": "rank", "values": [1, 2]},
    "dropout": {"values": [0.1], "when": {"rank": 64}},
}
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="optuna is an extra"
)


def run(**sweep) -> RunConfig:
    job = {"name": "c", "data": {"path": "a.jsonl"}, "eval_fraction": 0.2}
    settings = {"method": "optuna", "count": 14, "parameters": PARAMETERS} | sweep
    return RunConfig(
        model="m", jobs=[job], max_concurrent_jobs=3, sweep=Sweep(**settings)
    )


class Jobs(dict[str, tuple[LoraJob, JobProgress]]):
    """The jobs of a run, as far as suggestions look at them, by name."""

    def __init__(self, config: RunConfig):
        self.join(*config.jobs)

    def join(self, *jobs: LoraJob) -> None:
        self.update({job.name: (job, JobProgress()) for job in jobs})

    def end(self, job: LoraJob, loss: float, *, stopped_by: str | None) -> None:
        progress = JobProgress(
            status="stopped early" if stopped_by else "finished",
            stopped_by=stopped_by,
            best_eval=loss,
            step=8,
        )
        self[job.name] = job, progress

    @property
    def seen(self) -> list[tuple[LoraJob, JobProgress]]:
        return [*self.values()]

    @property
    def running(self) -> list[LoraJob]:
        return [job for job, progress in self.seen if not progress.is_over]


def test_the_first_ones_are_the_draws_of_a_random_search():
    config = run()
    assert len(config.jobs) == 10
    drawn = run(method="random", count=10)
    assert config.jobs == drawn.jobs
    sweep = config.sweep
    assert sweep.search.count == 14 and list(sweep.search.points) == [
        job.name for job in config.jobs
    ]
    assert [rule.type for rule in sweep.early_exit] == ["asha"]
    assert run(early_exit="median").sweep.early_exit[0].type == "median"
    assert len(run(initial=3).jobs) == 3
    assert (config.slot_rank, config.slot_dropout) == (64, True)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_place_gives_the_settings_that_a_draw_gives(monkeypatch):
    monkeypatch.setattr(suggesting, "check_installed", lambda: None)
    config = run()
    search = Suggestions(config)
    for job in config.jobs:
        _, settings = search.settings_at(search.points[job.name])
        assert LoraJob.model_validate(settings | {"name": job.name}) == job


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"count": None}, "needs a number of configurations"),
        ({"method": "random", "initial": 3}, "initial is of `method: optuna`"),
    ],
)
def test_mistakes(sweep, words):
    with pytest.raises(ConfigError, match=words):
        run(**sweep)


def test_one_job_is_searched():
    job = LoraJob(name="a", data={"path": "a"}, eval_fraction=0.2)
    sweep = Sweep(method="optuna", count=3, parameters={"rank": [4, 8]})
    with pytest.raises(ConfigError, match="searches the settings of one job"):
        RunConfig(model="m", jobs=[job, job.replace(name="b")], sweep=sweep)


def test_without_optuna_the_cure_is_named(monkeypatch):
    monkeypatch.setattr(suggesting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxlora\[optuna\]'"):
        Suggestions(run())


@pytest.fixture
def scripted(monkeypatch):
    """Suggests by a pure function of what was tried, in the place of Optuna."""

    def suggest(axes, seed, number, tried):
        state = [(t.state, t.step, t.cost, sorted(t.place.items())) for t in tried]
        rng = random.Random(repr((seed, number, state)))
        while True:
            yield {
                a.name: rng.random() if a.space.values is None
                else rng.randrange(len(a.space.values))
                for a in axes
            }  # fmt: skip

    monkeypatch.setattr(suggesting, "suggestions", suggest)
    monkeypatch.setattr(suggesting, "check_installed", lambda: None)


def searched(config: RunConfig, interrupt_at: int | None = None) -> list[LoraJob]:
    """Plays a sweep whose jobs end in an order of their own."""
    jobs, search, rng = Jobs(config), Suggestions(config), random.Random(5)
    for number in range(100):
        if not (running := jobs.running):
            return [job for job, _ in jobs.seen]
        job = running[rng.randrange(min(3, len(running)))]
        stopped_by = "asha" if rng.random() < 0.4 else None
        jobs.end(job, rng.random(), stopped_by=stopped_by)
        if number == interrupt_at:
            again = Suggestions(config)
            again.restore(search.saved())
            search = again
        while (found := search.next(jobs.seen, 3)) is not None:
            jobs.join(found)
        assert len(jobs.running) <= 10
    raise AssertionError("it does not end")


def test_a_resumed_search_suggests_the_same(scripted):
    whole = searched(run())
    assert len(whole) == 14 and len({job.name for job in whole}) == 14
    assert len({repr(job.replace(name="x")) for job in whole}) == 14
    for number in (0, 6, 8, 12):
        assert searched(run(), interrupt_at=number) == whole


@pytest.mark.parametrize("place", [{}, {"rank": 3.0}, {"rank": 0.5}, {"dropout": 0.5}])
def test_a_place_off_the_axes_is_refused(scripted, place):
    search = Suggestions(run(parameters={"rank": [4, 8, 16]}, initial=1))
    search.restore({"r16": {"rank": 2.0}})
    with pytest.raises(
        CheckpointError, match=r"r4 was suggested at .* not a point in the"
    ):
        search.restore({"r4": place})


def test_a_space_that_is_exhausted_ends_the_search(scripted):
    config = run(parameters={"rank": [4, 8, 16]}, initial=1)
    found = searched(config)
    assert sorted(job.rank for job in found) == [4, 8, 16]


def test_one_that_does_not_fit_is_left_out(scripted):
    config = run(initial=2, count=5)
    jobs, search = Jobs(config), Suggestions(config)

    assert search.is_open
    left_out = list(iter(lambda: search.next(jobs.seen, 3), None))
    assert not search.is_open
    assert len(left_out) == 3 and len(search.points) == 5


def test_one_that_does_not_fit_is_not_suggested_again(scripted):
    config = run(parameters={"rank": [4, 8, 16]}, initial=1, count=9)
    jobs, asked = Jobs(config).seen, []
    ((first, _),) = jobs
    search = Suggestions(config)
    while (found := search.next(jobs, 3)) is not None:
        asked.append(found.rank)
        assert len(asked) < 9, "it is suggested again and again"
    assert sorted(asked) == sorted({4, 8, 16} - {first.rank})
    again = Suggestions(config)
    again.restore(search.saved())
    assert again.next(jobs, 3) is None


@needs_optuna
def test_optuna_learns_from_results():
    """The suggestions are near the best rate, and the same for the same results."""
    axes = axes_of(run().sweep.search.parameters, [])
    rng = random.Random(0)
    places = [
        {"learning_rate": rng.random(), "rank": i % 3, "lora_alpha": 0, "dropout": 0}
        for i in range(30)
    ]
    tried = [
        Tried(place=p, state="complete", step=9, cost=abs(p["learning_rate"] - 0.8))
        for p in places[:26]
    ]
    tried += [Tried(place=p, state="running") for p in places[26:28]]
    tried += [Tried(place=places[28], state="pruned", step=3, cost=9.0)]
    tried += [Tried(place=places[29], state="pruned")]
    shares = []
    for number in range(30, 50):
        one, two = (next(suggestions(axes, 1, number, tried)) for _ in range(2))
        assert one == two and set(one) == set(places[0])
        shares.append(one["learning_rate"])
    assert len(set(shares)) > 10
    near = sum(abs(share - 0.8) < 0.2 for share in shares)
    assert near > 0.7 * len(shares)
