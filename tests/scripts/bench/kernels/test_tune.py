"""The tuner, without the GPU that it measures: its calls are only traced."""

import json

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels.mosaic import tuning
from jaxlora.pallas_kernels.mosaic.hopper import interpreted
from jaxlora.pallas_kernels.triton import launch as tiles
from jaxlora.pallas_kernels.triton.target import interpreted as interpreted_triton
from jaxlora.pallas_kernels.triton.target import present_target
from scripts.bench.kernels import tune
from tests.pallas_kernels import triton_interpreter


@pytest.fixture(scope="module")
def rows():
    """Timings of the smallest products; the second choice is the fastest."""
    times = iter(range(1000))

    def device_time(f, *arrays, repeats):
        number = next(times)
        if number % 2:  # of the two choices of a kernel
            jax.eval_shape(f, *arrays)
        return float((number - 1) % 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "device_time", device_time)
        patch.setattr(tune, "SHAPES", ((128, 256),))
        patch.setattr(tune, "BANDS", (2, 4))
        patch.setattr(tune, "SPLITS", (1, 2))
        with interpreted(plgpu.InterpretGPUParams()):
            return list(tune.tune(tune.mosaic_problems([256], tune.KERNELS), 1))


def test_the_best_choices_are_written(rows, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"other GPU": {"outer 64": {"splits": 8}}}))
    tune.write(path, "this GPU", rows)
    assert json.loads(path.read_text()) == {
        "other GPU": {"outer 64": {"splits": 8}},
        "this GPU": {
            "expand 256 128 256": {"band": 4},
            "outer 128": {"splits": 2},
            "outer 256": {"splits": 2},
        },
    }
    lines = path.with_suffix(".csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows) == 7


def test_the_kernels_read_what_the_tuner_writes(rows, tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    tune.write(path, "this GPU", rows)
    written = json.loads(path.read_text())
    monkeypatch.setattr(tuning, "_table", lambda: written)
    assert tuning.band_for("this GPU", 256, 128, 256) == 4
    assert tuning.splits_for("this GPU", 256, num_sms=132) == 2


def test_tiles_are_written_where_the_kernels_read_them(monkeypatch, tmp_path):
    times = iter([3.0, 2.0, 1.0, 4.0] * 2)
    monkeypatch.setattr(tune, "RANKS", (16,))
    monkeypatch.setattr(tune, "SHAPES", ((128, 256),))
    for kernel, entries in tune.CANDIDATES.items():
        monkeypatch.setitem(tune.CANDIDATES, kernel, entries[:2])

    def device_time(f, given, *, repeats):
        found = next(times)
        if found > 2:  # one of the two tiles of a kernel
            jax.eval_shape(f, given)
        return found

    monkeypatch.setattr(tune, "device_time", device_time)

    with interpreted_triton(triton_interpreter.run):
        target = present_target()
        kernels = ("expand", "dual")
        rows = list(tune.tune(tune.triton_problems([512], kernels), 1))
    path = tmp_path / "tiles.json"
    tune.write(path, tiles.measured_device(target), rows)
    written = tiles.tile_table() | json.loads(path.read_text())
    monkeypatch.setattr(tiles, "tile_table", lambda: written)
    found = tiles.tile_for("expand", target, shape=(512, 128, 256))
    assert found == tiles.to_tile(tune.CANDIDATES["expand"][0])
    assert len(rows) == 4 and rows[0]["median_us"] == 5.0
    assert tiles.tile_for("dual", target, rank=16) == tiles.to_tile(
        tune.CANDIDATES["dual"][1]
    )
