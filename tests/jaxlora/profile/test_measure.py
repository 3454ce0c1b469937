"""`jaxlora profile`, end to end on a tiny model, and the plan that uses it."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from jaxlora.cli.main import main
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.costs.device_profile import parse, read_text
from jaxlora.forecast import plan_run
from jaxlora.forecast.report import print_plan
from jaxlora.plan.mesh.predict import SLOT_SECONDS
from jaxlora.profile.measure import Settings, fit_link
from jaxlora.profile.pass_times import padding_share
from jaxlora.scheduler import AffineCost, padded_tokens
from jaxlora.scheduler.calibrate import TimePoint
from tests import tiny


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("tokens", "longest"), [(8192, 2048), (512, 512), (192, 500)])
def test_sizes_ascend_and_determine_a_fit(quick, tokens, longest):
    settings = Settings(
        model="m", microbatch_tokens=tokens, longest_tokens=longest, adapters=1
    )
    sizes = list(settings.sizes())
    capacities = [limits.capacity for limits, _ in sizes]
    assert capacities == sorted(set(capacities)) and capacities[-1] == tokens
    assert len(sizes) > 1
    for limits, lengths in sizes:
        assert limits.capacity % 64 == 0 and max(lengths) <= limits.capacity
        assert len(set(lengths)) > 1


def test_a_link_is_fitted():
    rng = np.random.default_rng(0)
    sizes = (2**20, 2**24, 2**26)
    seconds = [(2e-5 + n / 4e11) * rng.uniform(0.98, 1.02) for n in sizes]
    found = fit_link(sizes, seconds)
    assert found.bytes_per_second == pytest.approx(4e11, rel=0.05)
    assert found.base_seconds == pytest.approx(2e-5, rel=0.2)
    flat = fit_link(sizes, [1e-3, 1e-3, 1e-3])
    assert flat.bytes_per_second > 0 and flat.base_seconds >= 0


def test_the_share_of_padding_is_a_median_within_0_and_1():
    cost = AffineCost(base=1e-3, per_token=1e-6, per_square=1e-9)

    def padded(share):
        seconds = cost(500, 9000) + share * 300 * cost.per_token
        return 300, TimePoint(tokens=500, squares=9000, seconds=seconds)

    for shares, found in (((0.3, 0.4, 0.9), 0.4), ((-1,), 0), ((2, 3), 1), ((), 1)):
        assert padding_share([*map(padded, shares)], cost) == pytest.approx(found)
    assert padding_share([padded(0.5)], dataclasses.replace(cost, per_token=0.0)) == 1


def test_a_plan_uses_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny.write_model(
        tmp_path / "model", config={**tiny.CONFIG, "num_hidden_layers": 1}
    )
    data = tiny.write_records(tmp_path / "a.jsonl", 12, 0)
    options = "--quick --microbatch-tokens 128 --longest-tokens 60 --block-tokens 32"
    more = "--adapters 2 --rank 4"
    assert main(["profile", str(folder), *options.split(), *more.split()]) == 0
    assert "tokens/s" in capsys.readouterr().out
    (profile,) = parse(read_text("cpu"), "cpu")
    assert [p.tokens for p in profile.passes] == [64, 64, 128, 128]
    assert profile.link is not None  # between simulated devices
    assert profile.step_seconds > 0
    assert [m.tokens for m in profile.memory] == [64, 128]

    job = LoraJob(
        name="a", data=DataConfig(path=data), rank=4, max_length=60, batch_size=4
    )
    config = RunConfig(
        model=str(folder),
        jobs=[job],
        output_dir=str(tmp_path / "out"),
        microbatch_tokens=128,
        block_tokens=32,
    )
    planned = plan_run(config, steps=2)
    microbatches = planned.whole.schedule.microbatches
    squares = [sum(s.num_tokens**2 for s in m) for m in microbatches]
    full, half = (profile.cost(n, np.mean(squares) * n / 128) for n in (128, 64))
    rows = [padded_tokens(m, planned.plan.config.limits) for m in microbatches]
    padding = sum(128 - n for n in rows) * (1 - profile.padding)
    expected = len(microbatches) * full - padding * (full - half) / 64
    expected += 2 * profile.step_seconds * 0.5  # of two slots, one is left
    expected += 2 * SLOT_SECONDS  # the job starts and ends
    assert planned.time is not None
    assert planned.time.together == pytest.approx(expected, rel=1e-6)
    assert any("measured here" in note.text for note in planned.plan.notes)
    console = Console(record=True, width=200)
    print_plan(planned, console)
    assert "`jaxlora profile` measured on" in console.export_text()
