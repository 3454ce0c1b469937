"""A sweep becomes the same jobs every time, and errors name the place of a mistake."""

import itertools
import math

import pytest

from jaxlora import LoraJob, RunConfig, Sweep, load_run
from jaxlora.cli.main import main
from jaxlora.config import expansion
from jaxlora.config.configuration_names import Namer
from jaxlora.config.run_file import run_config
from jaxlora.errors import ConfigError
from tests import tiny

DEFAULTS = {"data": {"path": "a.jsonl"}, "eval_fraction": 0.2}


def run(parameters: dict | None = None, jobs=None, defaults=DEFAULTS, **sweep):
    values = {"model": "m", "defaults": defaults}
    values |= {} if jobs is None else {"jobs": jobs}
    return run_config(values | {"sweep": {"parameters": parameters or {}} | sweep})


def settings(found: RunConfig, *names: str) -> list[tuple]:
    return [tuple(getattr(job, name) for name in names) for job in found.jobs]


def test_lists_are_a_grid():
    found = run({"rank": [4, 8], "learning_rate": [1e-4, 3e-4]})
    assert settings(found, "rank", "learning_rate") == [
        *itertools.product((4, 8), (1e-4, 3e-4))
    ]
    assert [job.name for job in found.jobs] == [
        "r4-lr1e-4",
        "r4-lr3e-4",
        "r8-lr1e-4",
        "r8-lr3e-4",
    ]
    assert found.sweep is not None and not found.sweep.parameters
    again = found.replace(output_dir="elsewhere")
    assert again.jobs == found.jobs


def test_a_random_search_is_a_function_of_its_seed():
    space = {
        "learning_rate": {
            "distribution": "log_uniform_values",
            "min": 1e-5,
            "max": 1e-2,
        },
        "rank": {"min": 2, "max": 64},
        "dropout": {"distribution": "q_uniform", "min": 0, "max": 0.3, "q": 0.05},
        "batch_size": {"values": [1, 2], "probabilities": [0.9, 0.1]},
    }
    found = run(space, count=300, seed=3)
    assert run(space, count=300, seed=3) == found
    assert run(dict(reversed(space.items())), count=20, seed=3).jobs[0].rank == (
        found.jobs[0].rank
    )
    assert run(space, count=20, seed=3).jobs == found.jobs[:20]  # more may follow
    assert run(space, count=20, seed=4).jobs != found.jobs[:20]
    assert len({job.name for job in found.jobs}) == len(found.jobs) == 300
    logs = sorted(math.log10(job.learning_rate) for job in found.jobs)
    assert -5 <= logs[0] < -4.9 and -2.1 < logs[-1] <= -2
    assert abs(logs[150] + 3.5) < 0.4
    assert {job.rank for job in found.jobs} == set(range(2, 65))
    assert {job.dropout for job in found.jobs} == {
        0,
        0.05,
        0.1,
        0.15,
        0.2,
        0.25,
        0.3,
    }
    assert 240 < sum(job.batch_size == 1 for job in found.jobs) < 300


def test_points_of_ranges_in_a_grid():
    log = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2, "num": 3}
    assert settings(run({"learning_rate": log}), "learning_rate") == [
        (1e-4,),
        (1e-3,),
        (1e-2,),
    ]
    whole = {"distribution": "int_uniform", "min": 3, "max": 5}
    assert settings(run({"rank": whole}), "rank") == [(3,), (4,), (5,)]
    steps = {"min": 0.1, "max": 0.3, "q": 0.1}
    assert settings(run({"dropout": steps}), "dropout") == [(0.1,), (0.2,), (0.3,)]
    powers = {"distribution": "log_uniform_values", "min": 2, "max": 32, "num": 5}
    assert settings(run({"rank": powers}), "rank") == [(2,), (4,), (8,), (16,), (32,)]


def test_conditions_products_and_settings_that_belong_together():
    found = run(
        {
            "lora_alpha": {"times": "rank", "values": [0.5, 2]},
            "warmup_ratio": {"values": [0.1, 0.2], "when": {"lr_schedule": "linear"}},
            "lr_schedule": ["linear", "constant"],
            "_": [{"rank": 4, "target_modules": ["q_proj"]}, {"rank": 8}],
        }
    )
    wanted = [
        (rank, rank * times, schedule, ratio)
        for times in (0.5, 2)
        for ratios in (0.1, 0.2)
        for schedule in ("linear", "constant")
        for rank in (4, 8)
        if (ratio := ratios if schedule == "linear" else 0.0) or ratios == 0.1
    ]
    names = "rank", "lora_alpha", "lr_schedule", "warmup_ratio"
    assert sorted(settings(found, *names)) == sorted(wanted)
    assert {job.target_modules for job in found.jobs if job.rank == 4} == {("q_proj",)}


def notes(config) -> str:
    return " ".join(note.text for note in config.notes)


def test_equal_configurations_are_one():
    found = run({"rank": [4, 8, 4]})
    assert settings(found, "rank") == [(4,), (8,)]
    assert "1 configurations that equal another one are left out" in notes(found)
    few = run({"rank": [4, 8]}, count=9)
    assert len(few.jobs) == 2
    assert "count is 9, and the space has only 2 different" in notes(few)


def test_each_job_is_varied_and_keeps_its_name():
    found = run({"lora_r": [4, 8]}, [{"name": "a"}, {"name": "b", "seed": 3}])
    assert [job.name for job in found.jobs] == ["a-r4", "a-r8", "b-r4", "b-r8"]
    assert settings(found, "seed", "rank") == [(0, 4), (0, 8), (3, 4), (3, 8)]


def test_names_are_short_plain_and_different():
    found = run(
        {
            "target_modules": [["q_proj", "v_proj"], "all-linear", r".*\.(q|k)_proj"],
            "learning_rate": [1.234e-4, 1.2341e-4],
            "max_grad_norm": [None],
            "keep_best": [True, False],
        }
    )
    names = [job.name for job in found.jobs]
    assert names[:4] == [
        "q_proj_v_proj-lr1.23e-4-keepbeston",
        "q_proj_v_proj-lr1.23e-4-keepbestoff",
        "q_proj_v_proj-lr1.23e-4-keepbeston-2",
        "q_proj_v_proj-lr1.23e-4-keepbestoff-2",
    ]
    assert len(set(names)) == 12


def test_settings_within_data():
    found = run({"data.limit": [10, 20]})
    assert [job.data.limit for job in found.jobs] == [10, 20]
    assert [job.data.path for job in found.jobs] == ["a.jsonl"] * 2
    assert [job.name for job in found.jobs] == ["limit10", "limit20"]


def test_a_list_in_a_job_is_one_job_for_each_value():
    job = {"name": "a", "learning_rate": [1e-4, 3e-4], "target_modules": ["q_proj"]}
    found = run_config({"model": "m", "defaults": DEFAULTS, "jobs": [job]})
    assert [job.name for job in found.jobs] == ["a-lr1e-4", "a-lr3e-4"]
    assert found.sweep is None
    assert "jobs.0.learning_rate is a list of 2 values: one job" in notes(found)


def test_in_python():
    job = LoraJob(name="a", rank=4, **DEFAULTS)
    sweep = Sweep(parameters={"learning_rate": [1e-4, 3e-4]}, early_exit="none")
    found = RunConfig(model="m", jobs=[job], sweep=sweep)
    assert settings(found, "rank", "learning_rate") == [(4, 1e-4), (4, 3e-4)]
    assert found.sweep is not None and found.sweep.early_exit == ()
    with pytest.raises(ConfigError, match=r"RunConfig: jobs\.0\.rank"):
        RunConfig(model="m", jobs=[job], sweep=Sweep(parameters={"rank": [0]}))


def test_a_resolved_run_reads_as_itself():
    found = run({"rank": [4, 8]}, early_exit=["median", {"type": "asha", "eta": 3}])
    assert RunConfig.model_validate(found.model_dump(mode="json")) == found


WRONG = """model: m
defaults: {data: {path: a.jsonl}, eval_fraction: 2}
jobs:
  - name: a
sweep:
  method: bayes
  keep: 0
  early_exit: {type: median, eta: 4}
  early_terminate: {type: hyperband}
  parameters:
    learning_rate: {min: 3, max: 1}
    rank: {values: [4], max: 3}
    dropout: {distribution: log_uniform, min: 1, max: 2}
    seed: {values: [1, 2], probabilities: [0.3, 0.3]}
"""


def test_all_mistakes_are_named_at_once(tmp_path):
    (tmp_path / "run.yaml").write_text(WRONG)
    with pytest.raises(ConfigError) as found:
        load_run(tmp_path / "run.yaml")
    text = str(found.value)
    for words in (
        "line 2: defaults.eval_fraction: must be less than 1",
        "line 6: sweep.method: must be 'grid', 'random' or 'optuna'",
        "line 7: sweep.keep: ",
        "line 8: sweep.early_exit.0.eta: eta is a setting of halving and asha",
        "line 9: sweep.early_terminate: 'early_terminate' is not a setting here",
        "line 11: sweep.parameters.learning_rate.max: max is 1",
        "line 12: sweep.parameters.rank.max: max is of a range",
        "line 13: sweep.parameters.dropout.distribution: In W&B, the bounds",
        "line 14: sweep.parameters.seed.probabilities: they must add up to 1",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("parameters", "sweep", "words"),
    [
        ({"rank": [0]}, {}, "sweep.parameters.rank: must be greater than 0"),
        ({"name": ["a"]}, {}, "names are made from the values"),
        ({"rnak": [4]}, {}, "parameters.rnak: unknown key 'rnak'. Did you mean 'rank"),
        ({"rank": {"min": 1, "max": 9}}, {}, "set count"),
        ({"rank": {"min": 1, "max": 9}}, {"method": "grid"}, "a grid needs points"),
        ({"rank": [1]}, {"method": "random"}, "set count"),
        ({"rank": [1]}, {"method": "grid", "count": 3}, "count is of a random search"),
        ({"rank": []}, {}, "the list is empty"),
        ({"rank": {"min": 1}}, {}, "max is missing"),
        ({"_": [3]}, {}, "expected a mapping"),
        ({"_": [{"rnk": 3}]}, {}, "unknown key 'rnk'"),
        (
            {"rank": [1], "r": [2]},
            {},
            "sweep.parameters.r: sweep.parameters.rank gives 'rank', too",
        ),
        ({"rank.x": [1]}, {}, "'rank' has no settings within it"),
        ({"data.limt": [1]}, {}, "Did you mean 'limit'"),
        ({"rank": {"values": [1], "when": {"sed": 1}}}, {}, "Did you mean 'seed'"),
        (
            {"rank": {"values": [1], "times": "objective"}},
            {},
            "objective is not a number",
        ),
        ({"model": ["a", "b"]}, {}, "is a setting of the run"),
    ],
)
def test_mistakes(parameters, sweep, words):
    with pytest.raises(ConfigError) as found:
        run(parameters, **sweep)
    assert words in str(found.value)


LOG = {"distribution": "log_uniform_values"}
BIG = 10**400


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rank": {"min": 1.2, "max": 1.7}}, "rank: there is no whole number"),
        (
            {"dropout": {"distribution": "int_uniform", "min": 0.1, "max": 0.9}},
            "dropout: there is no whole number",
        ),
        ({"rank": {"min": 1, "max": 9, "q": 0.5}}, "q=0.5 is not a whole number"),
        ({"rank": {"min": 1.5, "max": 3.5, "q": 4}}, "no multiple of q=4.0"),
        ({"lora_alpha": {"min": 1, "max": 4, "q": 1e30}}, "no multiple of q=1e+30"),
        ({"lora_alpha": {"min": 1, "max": 4, "q": 1e-300}}, "q=1e-300 is too small"),
        ({"_": [{"rank": 4, "r": 8}]}, "_.0.r: 'rank' and 'r' are two names of"),
        ({"_": [{"rank": 4}], "lora_r": [8]}, "lora_r: sweep.parameters._ gives"),
        ({"_a": [{"r": 4}], "_b": [{"rank": 8}]}, "_b.0.rank: sweep.parameters._a"),
        (
            {"lora_alpha": {"times": "rank", "values": [2]}, "_": [{"lora_alpha": 8}]},
            "_.0.lora_alpha: sweep.parameters.lora_alpha gives",
        ),
        ({"rank": {"values": [2], "when": {"steps": 1, "max_steps": 2}}}, "two names"),
        (
            {
                "rank": {"values": [2], "times": "steps"},
                "steps": {"values": [2], "times": "r"},
            },
            "rank and steps follow from each other",
        ),
        ({"rank": {"values": [2], "times": "lora_r"}}, "rank follows from itself"),
        (
            {
                "rank": {"values": [2], "when": {"steps": 2}},
                "steps": {"values": [2], "when": {"rank": 2}},
            },
            "rank and steps follow from each other",
        ),
        (
            {"lora_alpha": {"min": 1, "max": 1.7e308} | LOG},
            "must be from -1e+300 to 1e+300",
        ),
        ({"lora_alpha": {"min": -BIG, "max": 2}}, "must be from -1e+300 to 1e+300"),
        ({"lora_alpha": {"min": 1, "max": math.nan}}, "must be a finite number"),
        ({"lora_alpha": {"min": 1, "max": 4, "q": math.inf}}, "must be a finite"),
        ({"lora_alpha": {"min": 1, "max": 4, "q": BIG}}, "q: expected a number"),
        ({"rank": {"values": [math.inf], "times": "batch_size"}}, "must be a finite"),
        ({"rank": {"values": [math.nan], "times": "batch_size"}}, "must be a finite"),
        ({"rank": {"values": [BIG], "times": "lora_alpha"}}, "rank: must be a finite"),
        ({"rank": [BIG]}, "rank: must be less than or equal to"),
        ({"rank": [1e308]}, "rank: expected a smaller whole number"),
        (
            {"data": [{"path": "b", "max_samples": 7}], "data.limit": [5]},
            "data.limit: sweep.parameters.data gives 'data.limit', too",
        ),
        (
            {"_": [{"data": {"path": "b", "limit": 7}}], "data.max_samples": [5]},
            "data.max_samples: sweep.parameters._ gives 'data.limit', too",
        ),
        ({"data.limit.x": [1]}, "no part of data.limit can be varied"),
        ({"rank": {"values": [1], "times": "data.limit.x"}}, "no part of data.limit"),
        ({"rank": {"values": [1], "when": {"data.limit.x": 1}}}, "no part of"),
        ({"rank": {"values": [1], "times": "data"}}, "times: data is not a number"),
        ({"data.": [1]}, "unknown key ''"),
    ],
)
def test_values_that_cannot_be_had(parameters, words):
    with pytest.raises(ConfigError) as found:
        run(parameters, count=3)
    assert words in str(found.value)
    assert "jobs.0.name" not in str(found.value)  # the sweep would have named it


def test_a_list_in_a_job_and_a_parameter_are_not_of_one_setting():
    with pytest.raises(ConfigError, match=r"parameters.r: jobs.0.rank gives 'rank'"):
        run({"r": [2]}, [{"name": "a", "rank": [4, 8]}])


def test_values_are_within_their_range():
    found = run({"rank": {"min": 1.2, "max": 4.9}}, count=40)
    assert {job.rank for job in found.jobs} == {2, 3, 4}
    found = run({"dropout": {"min": 0.1, "max": 0.95, "q": 0.3}}, count=40)
    assert {job.dropout for job in found.jobs} == {0.3, 0.6, 0.9}
    found = run({"lora_alpha": {"min": 1e-300, "max": 1e300} | LOG}, count=40)
    logs = sorted(math.log10(job.lora_alpha) for job in found.jobs)
    assert logs[0] < -200 and logs[-1] > 200 and abs(sum(logs) / 40) < 100
    found = run(
        {"warmup_steps": {"min": 0.05, "max": 0.2, "times": "steps"}, "steps": [1000]},
        count=40,
    )
    assert all(50 <= job.warmup_steps <= 200 for job in found.jobs)


def test_products_and_conditions_see_what_they_follow_from():
    """In whatever order they are written."""
    parameters = {
        "lora_alpha": {"times": "rank", "values": [2]},
        "dropout": {"values": [0.1], "when": {"lora_alpha": 48}},
        "rank": {"times": "batch_size", "values": [2, 3]},
        "batch_size": [8],
        "data.limit": [5],
        "data": [{"path": "b"}],
        "seed": {"times": "data.limit", "values": [2]},
    }
    for order in (list(parameters), list(reversed(parameters))):
        found = run({name: parameters[name] for name in order})
        wanted = [(16, 32, 0.0), (24, 48, 0.1)]
        assert settings(found, "rank", "lora_alpha", "dropout") == wanted
        assert {(job.data.path, job.data.limit) for job in found.jobs} == {("b", 5)}
        assert {job.seed for job in found.jobs} == {2 * 5}
    found = run(
        {
            "warmup_steps": {"times": "data.limit", "values": [2]},
            "data": [{"path": "b", "limit": 7}, {"path": "c", "max_samples": 9}],
        }
    )
    assert settings(found, "warmup_steps") == [(14,), (18,)]


MANY = list(range(1, 1001))


@pytest.mark.parametrize(
    ("parameters", "sweep", "words"),
    [
        ({"rank": [4]}, {"count": 10**9}, "count: there would be 1,000,000,000 conf"),
        ({"rank": [4]}, {"count": 10**9, "method": "optuna"}, "count: there would be"),
        (
            {"dropout": {"min": 0, "max": 0.5, "q": 1e-12}},
            {"method": "grid"},
            "would be 500,000,000,001 configurations, and a run has at most 100,000",
        ),
        ({"dropout": {"min": 0, "max": 0.5, "num": 10**9}}, {}, "1,000,000,000 conf"),
        (
            {"steps": {"distribution": "int_uniform", "min": 1, "max": 10**9}},
            {},
            "1,000,000,000 conf",
        ),
        ({"rank": MANY, "seed": MANY, "steps": MANY}, {}, "1,000,000,000 conf"),
        ({"rank": [4]}, {"groups": 10**9}, "groups: must be less than or equal to"),
        ({"rank": [4]}, {"groups": [2, "fsdp=9999999"]}, "groups have 10,000,001 dev"),
    ],
)
def test_too_many_are_refused_before_one_is_made(monkeypatch, parameters, sweep, words):
    made = []
    make = expansion.with_settings
    count = lambda *args: made.append(args) or make(*args)
    monkeypatch.setattr(expansion, "with_settings", count)
    with pytest.raises(ConfigError) as found:
        run(parameters, **sweep)
    assert words in str(found.value)
    assert len(made) < 20


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (3, "no value of rank in the sweep is that: 1, 2. (given: 3)"),
        ("x", "no value of rank in the sweep is that"),
        ([3, 5], "no value of rank in the sweep is that"),
        ([], "the list is empty. Give the values that the setting must have."),
    ],
)
def test_conditions_that_are_never_met_are_refused(wanted, words):
    alpha = {"values": [2], "when": {"r": wanted}}
    with pytest.raises(ConfigError) as found:
        run({"lora_alpha": alpha, "rank": [1, 2]})
    place = "run: sweep.parameters.lora_alpha.when.r: "
    assert str(found.value).startswith(place)
    assert words in str(found.value).replace("of r in", "of rank in")


def test_lists_of_all_jobs_are_counted_before_one_is_made(monkeypatch):
    monkeypatch.setattr(expansion._Expander, "_distinct", lambda *_: [])
    jobs = [{"name": f"j{i}", "rank": MANY} for i in range(300)]
    with pytest.raises(ConfigError, match=r"jobs.0: there would be 300,000 conf"):
        run_config({"model": "m", "defaults": DEFAULTS, "jobs": jobs})


def test_lists_of_a_job_are_counted_too():
    job = {"name": "a", "rank": MANY, "seed": MANY, "steps": MANY, "shuffle": 3}
    with pytest.raises(ConfigError, match=r"jobs.0: there would be 1,000,000,000") as e:
        run_config({"model": "m", "defaults": DEFAULTS, "jobs": [job]})
    assert "jobs.0.shuffle: expected true or false" in str(e.value)


def test_replicas_are_counted_before_they_are_listed():
    replicas = [{"microbatch_tokens": 64, "count": 10**9}]
    jobs = [{"name": "a"}]
    values = {"model": "m", "defaults": DEFAULTS, "jobs": jobs, "replicas": replicas}
    with pytest.raises(ConfigError) as found:
        run_config(values)
    assert str(found.value) == (
        "run: replicas.0.count: must be less than or equal to 65536 (given: 1000000000)"
    )


def test_a_small_space_is_exhausted_whatever_is_wanted(monkeypatch):
    drawn = []
    draw = expansion.draw
    monkeypatch.setattr(expansion, "draw", lambda *a: drawn.append(a) or draw(*a))
    assert len(run({"rank": [4, 8]}, count=100_000).jobs) == 2
    assert len(drawn) < 50_000


def test_names_are_found_at_once():
    """Each of the names that would be equal gets the number after the last one."""

    class Taken(set):
        num_asked = 0

        def __contains__(self, name):
            self.num_asked += 1
            return super().__contains__(name)

    namer = Namer()
    namer._taken = taken = Taken()
    names = [namer.name("same", {}, []) for _ in range(1000)]
    assert names[:3] == ["same", "same-2", "same-3"] and len(set(names)) == 1000
    assert taken.num_asked < 3000


def test_a_problem_of_a_part_is_in_the_place_of_that_part(tmp_path):
    text = """model: m
defaults: {eval_fraction: 0.1}
jobs:
  - name: a
    data:
      path: a.jsonl
      split: 3
sweep:
  parameters:
    data.limit: [0, 5]
"""
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as found:
        load_run(tmp_path / "run.yaml")
    path = tmp_path / "run.yaml"
    assert str(found.value).splitlines() == [
        f"{path}, line 7: jobs.0.data.split: expected text, in quotes if need be "
        "(given: 3)",
        f"{path}, line 10: sweep.parameters.data.limit: must be greater than 0 "
        "(given: 0)",
    ]


def test_configurations_need_held_out_records():
    with pytest.raises(ConfigError, match="job 'c1' has none: set eval_fraction"):
        run({"rank": [4]}, defaults={"data": {"path": "a"}})


def test_the_command_lists_the_configurations(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 4)
    tiny.write_model(tmp_path / "model")
    text = f"""model: {tmp_path / "model"}
defaults: {{data: {{path: {tmp_path / "a.jsonl"}}}, eval_fraction: 0.5}}
sweep: {{parameters: {{rank: [4, 8], learning_rate: [1e-4, 3e-4]}}}}
"""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["sweep", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4 configurations, early exit: halving" in shown
    assert "r8-lr3e-4" in shown and "learning_rate" in shown
    path.write_text(text[: text.index("sweep")] + "jobs: [{name: a}]\n")
    assert main(["sweep", str(path), "--dry-run"]) == 1
    assert "has no sweep" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_python_does_not_print(sign):
    """Only from Python; YAML refuses them when it is read."""
    number = sign * 10**5000
    small = {"values": [number, 2], "times": "batch_size"}
    for sweep in (
        {"parameters": {"rank": [number, 4]}},
        {"parameters": {"_": [{"rank": number}, {"rank": 4}]}},
        {"parameters": {"rank": small}},
        {"parameters": {"lora_alpha": {"min": 1, "max": number}}, "count": 2},
        {"groups": [number]},
    ):
        jobs = [{"name": "a", **DEFAULTS}]
        with pytest.raises(ConfigError, match=r"must be|expected a|within 1e"):
            RunConfig(model="m", jobs=jobs, sweep=sweep)
    with pytest.raises(ConfigError, match=r"must be|expected a"):
        RunConfig(model="m", jobs=[{"name": "a", "rank": [number, 4], **DEFAULTS}])
