"""Two wrong settings at once give our error, and it names both of them."""

import copy
import functools
import math
import pickle
import random
import re

import pytest

from jaxlora import LoraJob, RunConfig, Sweep
from jaxlora.config.clone import CloneOf
from jaxlora.config.data_config import DataConfig
from jaxlora.config.generation_settings import SamplesConfig
from jaxlora.config.replicas_config import ReplicaConfig
from jaxlora.config.run_file import run_config
from jaxlora.config.space import Space
from jaxlora.config.sweep_config import ExitRule, Metric
from jaxlora.errors import ConfigError
from jaxlora.problems import RULE, UNKNOWN

# Where the settings of a class are in a run file, and what is there besides.
PLACES = {
    (): RunConfig,
    ("jobs", 0): LoraJob,
    ("defaults",): LoraJob,
    ("jobs", 0, "data"): DataConfig,
    ("jobs", 0, "data", "datasets", 0): DataConfig,
    ("defaults", "data"): DataConfig,
    ("defaults", "eval_data"): DataConfig,
    ("jobs", 1, "clone_of"): CloneOf,
    ("replicas", 0): ReplicaConfig,
    ("samples",): SamplesConfig,
    ("sweep",): Sweep,
    ("sweep", "metric"): Metric,
    ("sweep", "early_exit", 0): ExitRule,
    ("sweep", "parameters", "rank"): Space,
    ("sweep", "parameters", "data.limit"): Space,
    ("sweep", "parameters", "_both"): Space,
}
# A rule, which may read the other setting; and what only our validators say.
BETWEEN = RULE, "value_error"
MEMBERS = re.compile(
    r"\.((int|float|str|bool)\b|constrained-|literal\[|tuple\[|function)"
)
BASE = {
    "model": "m",
    "jobs": [{"name": "a"}, {"name": "b"}],
    "defaults": {"data": {"path": "a.jsonl"}, "eval_fraction": 0.1},
}
THERE = {
    ("jobs", 0, "data"): {"path": "b.jsonl"},
    ("jobs", 0, "data", "datasets", 0): {"path": "c.jsonl"},
    ("defaults", "eval_data"): {"path": "d.jsonl"},
    ("jobs", 1, "clone_of"): {"job": "a", "step": 1},
    ("replicas", 0): {"microbatch_tokens": 64},
    ("samples",): {"prompts": ["x"]},
    ("sweep", "early_exit", 0): {"type": "halving"},
    ("sweep", "parameters", "rank"): {"values": [4, 8]},
    ("sweep", "parameters", "data.limit"): {"min": 10, "max": 20, "num": 2},
    ("sweep", "parameters", "_both"): {"values": [{"rank": 4, "lora_alpha": 8}]},
}
VALUES = [
    None, True, False, -1, 0, 2, 10**30, 10**400, -0.5, 0.5, 1e308, math.inf, math.nan,
    "", "x", "auto", "none", "a:b", "rank", "embed_tokens", "\ud800", "2e-4",
    [], [None], ["x"], [1, "x"], [[1]], [{}], [{"path": 1}], {}, {"x": 1}, {"x": None},
    {"data.limit": 3}, {"embed_tokens": 1}, {"type": "asha"}, {"values": 3},
]  # fmt: skip


def put(values: dict, place: tuple, key: str, value: object) -> None:
    """Sets a setting, in a place that is filled if it is empty."""
    inside = values
    for i, part in enumerate(place):
        there = THERE.get(place[: i + 1], {})
        empty = [] if place[i + 1 : i + 2] == (0,) else copy.deepcopy(there)
        if isinstance(inside, list):
            if not inside:
                inside.append(empty)
        else:
            inside.setdefault(part, empty)
        inside = inside[part]
    inside[key] = value


def problems_of(changes) -> set[tuple]:
    """Returns the path and the kind of each problem, but not of rules over several."""
    values = copy.deepcopy(BASE)
    for place, key, value in changes:
        put(values, place, key, copy.deepcopy(value))
    try:
        run_config(values)
    except ConfigError as error:
        text = str(error)
        assert not MEMBERS.search(text), text
        assert "data.limit.limit" not in text, text
        return {(p.path, p.kind) for p in error.problems if p.kind not in BETWEEN}
    return set()


def change(rng: random.Random) -> tuple:
    """Returns a place, a setting in it, and a value that it may not have."""
    place = rng.choice(list(PLACES))
    keys = [key for key in PLACES[place].model_fields if (*place, key) not in PLACES]
    return place, rng.choice(keys), rng.choice(VALUES)


def own(found: set[tuple], place: tuple, key: str) -> set[tuple]:
    """Returns the problems of a setting that are found whatever else is wrong."""
    path = *place, key
    return {
        (where, kind)
        for where, kind in found
        if where[: len(path)] == path
        # Names are looked at when the space is sound.
        and not (kind == UNKNOWN and path[:2] == ("sweep", "parameters"))
    }


@pytest.mark.parametrize("num", [300, pytest.param(6000, marks=pytest.mark.grid)])
def test_two_wrong_settings(num):
    alone = functools.cache(lambda one: problems_of([pickle.loads(one)]))
    num_both = 0
    for seed in range(num):
        rng = random.Random(seed)
        pair = change(rng), change(rng)
        paths = [(*place, key) for place, key, _ in pair]
        least = min(map(len, paths))
        if paths[0][:least] == paths[1][:least] or ("jobs",) in paths:
            continue  # one is within the other, or replaces it
        try:
            found = problems_of(pair)
        except Exception as error:
            raise AssertionError(f"{pair}: {error!r}") from error
        wanted = [own(alone(pickle.dumps(one)), *one[:2]) for one in pair]
        assert wanted[0] | wanted[1] <= found, pair
        num_both += all(wanted)
    assert num_both > num / 4
