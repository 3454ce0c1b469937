"""The replay of early exit, on 208 recorded curves and on those of a run."""

import json
import math
import pathlib
import random

import pytest

from jaxlora.config.sweep_config import ExitRule
from jaxlora.errors import ConfigError
from jaxlora.run.log import METRICS_FILE
from jaxlora.sweeps.rules import Curve
from scripts.bench import __main__ as bench
from scripts.bench.curves.benchmark import read_curves
from scripts.bench.curves.quality import batch_rows, setting_rows, spread_rows
from scripts.bench.curves.replay import count_losses, replay

CURVES = pathlib.Path(__file__).with_name("curves_smollm2.json")
HALVING = ExitRule(type="halving")


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    return read_curves(CURVES)


def test_configurations_that_were_trained_to_their_ends(curves):
    """Of all ranks, rates and schedules, with SmolLM2's shapes."""
    found = json.loads(CURVES.read_text())
    assert found["about"]["model"] == "smollm2-135m"
    assert len(curves) == len(found["configurations"]) == 208
    assert "learning_rate" in found["settings"] and "rank" in found["settings"]
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
    bench.run("curves", [str(CURVES), *options])
    table = (tmp_path / "curves.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| halving, eta 4, first 0.1 | 12 | 1 |" in table
    with pytest.raises(ConfigError, match="holds no curves"):
        bench.run("curves", [__file__])


def test_curves_of_a_run_have_an_end(tmp_path):
    """Those of a configuration that ended early are left out."""
    losses = {"a": (3.0, 2.0), "b": (3.0,)}
    events = [
        {"event": "eval", "job": job, "step": 5 * i, "eval_loss": loss}
        for job, curve in losses.items()
        for i, loss in enumerate(curve)
    ]
    shared = {"time": 1.0, "round": 1, "eval_tokens": 4}
    lines = (json.dumps(event | shared) for event in events)
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    curve = Curve(num_steps=5, step=5, points=((0, 3.0), (5, 2.0)))
    assert read_curves(tmp_path) == {"a": curve}
    (tmp_path / METRICS_FILE).write_text("")
    with pytest.raises(ConfigError, match="no curves with an end"):
        read_curves(tmp_path)


def test_what_settings_are_worth(tmp_path, capsys):
    """By hand: two batch sizes, which have seen as many samples at 20 and 10 steps."""
    points, names = [0, 10, 20], ["batch_size", "learning_rate"]
    rows = [(1, 2e-4, [9, 5, 4]), (1, 5e-3, [9, 6, 3]), (2, 2e-2, [9, 4.5, 1])]
    found = [{"settings": [b, r], "losses": losses} for b, r, losses in rows]
    path = tmp_path / "curves.json"
    recorded = {"points": points, "settings": names, "configurations": found}
    path.write_text(json.dumps(recorded))
    spread = {row["configuration"]: row["over_best"] for row in spread_rows(path)}
    assert list(spread.values()) == [8, 3, 3, 2, 0]
    rate, batch = setting_rows(path)[::-1]
    assert (rate["best_value"], rate["spread"]) == ("1e-2", 3)
    assert (batch["best_value"], batch["spread"]) == (2, 2)
    assert [tuple(row.values()) for row in batch_rows(path)] == [
        (1, 2, 3, 3),
        (2, 1, 1, 4.5),
    ]
    bench.run("curves", [str(CURVES), "--quality"])
    assert "best_value" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no settings beside"):
        spread_rows(tmp_path)
