"""The replay of early exit on 208 recorded curves, and the recording of others."""

import json
import math
import pathlib
import random

import pytest

from jaxlora.bench import subjects
from jaxlora.bench.curves.benchmark import read_curves
from jaxlora.bench.curves.record import SPACE, Recording, run_of
from jaxlora.bench.curves.replay import count_losses, replay
from jaxlora.config.sweep_config import ExitRule
from jaxlora.errors import ConfigError
from jaxlora.sweeps.rules import Curve

CURVES = pathlib.Path(__file__).with_name("curves_smollm2.json")
HALVING = ExitRule(type="halving")


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    return read_curves(CURVES)[1]


def test_configurations_that_were_trained_to_their_ends(curves):
    """Of all ranks, rates and schedules, with SmolLM2's shapes."""
    found = json.loads(CURVES.read_text())
    assert found["about"]["model"] == "smollm2-135m"
    assert len(curves) == len(found["configurations"]) == 208
    assert found["settings"] and set(found["settings"]) == set(SPACE)
    assert CURVES.stat().st_size < 100_000
    bests = sorted(curve.best for curve in curves.values())
    assert 4 < bests[0] < 5 and bests[-1] > 10


def test_without_rules_all_run_to_their_ends(curves):
    sound = {n: c for n, c in curves.items() if not diverges(c)}
    found = replay(sound, [], slots=32)
    assert set(found.steps.values()) == {100}
    assert found.losses == {name: curve.best for name, curve in sound.items()}


def diverges(curve: Curve) -> bool:
    losses = [loss for _, loss in curve.points]
    return max(losses[1:]) > losses[0] + 0.1


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_halving_is_its_definition_whatever_the_slots(curves, slots):
    names = [name for name, curve in curves.items() if not diverges(curve)]
    drawn = random.Random(slots).sample(names, 45)
    found = replay({name: curves[name] for name in drawn}, [HALVING], slots)
    alive, steps = list(drawn), dict.fromkeys(drawn, 100)
    for rung in (25, 50):
        alive.sort(key=lambda name: (curves[name].at(rung), drawn.index(name)))
        kept = math.ceil(len(alive) / 2)
        steps |= dict.fromkeys(alive[kept:], rung)
        alive = alive[:kept]
    assert found.steps == steps
    for name in drawn:
        assert found.losses[name] == min(curves[name].until(steps[name] / 100))


def test_what_halving_saves_and_loses(curves):
    """As docs/howto/sweep.md has it, on fewer sweeps."""
    found = count_losses(curves, [HALVING], size=120, slots=32, sweeps=8)
    assert 0.49 < found.saved < 0.53
    assert found.best_lost == 0 and found.mean_regret == 0.0
    early = ExitRule(type="halving", eta=4, first=0.05)
    found = count_losses(curves, [early], size=120, slots=32, sweeps=8)
    assert found.saved > 0.8 and found.top_3_lost > 0


def test_rungs_between_evaluations_are_refused(curves):
    with pytest.raises(ValueError, match="step 13 was not evaluated"):
        replay(curves, [ExitRule(type="halving", eta=4, first=0.125)], slots=4)


def test_the_table(tmp_path, capsys):
    options = ["--sizes", "12", "--sweeps", "1", "--output-dir", str(tmp_path)]
    subjects.run("curves", [str(CURVES), *options])
    table = (tmp_path / "curves.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| halving, eta 4, first 0.1 | 12 | 1 |" in table
    with pytest.raises(ConfigError, match="holds no recorded curves"):
        subjects.run("curves", [__file__])
    with pytest.raises(ConfigError, match="either a file of curves, or --record"):
        subjects.run("curves", [])


def test_a_recording_is_a_sweep_in_which_none_ends_early(tmp_path):
    what = Recording(
        count=9,
        steps=8,
        every=2,
        slots=3,
        records=20,
        microbatch_tokens=512,
        seed=1,
        most_seconds=None,
    )
    config = run_of(what, tmp_path / "model", tmp_path)
    assert len(config.jobs) == 9 and config.sweep.early_exit == ()
    records = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(records) == 20 + 32
    assert {len(json.loads(record)["text"]) for record in records} == {63}
