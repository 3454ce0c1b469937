"""The file of measured times: only whole files of this user and device are used."""

import json
import os
import random

import jax.numpy as jnp
import pytest

from jaxlora.common.cache_home import device_path
from jaxlora.costs import device_profile
from jaxlora.costs.device_profile import (
    Kernels,
    LinkRate,
    PassCost,
    PassTime,
    Profile,
    estimate,
    find_profile,
    model_digest,
    parse,
    read_text,
    versions,
    write_profile,
)
from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.errors import ConfigError
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from tests.tiny import CONFIG

KIND = "NVIDIA H100 80GB HBM3"
SPEC = DecoderSpec(
    config=model_config(CONFIG),
    options=DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=64),
)
SPEED = find_speed(KIND)


def profile(spec=SPEC, **changes) -> Profile:
    values = {
        "model": model_digest(spec),
        "description": "llama with 2 layers of width 32",
        "kernels": Kernels.of(spec),
        "remat": "none",
        "rank": 8,
        "num_slots": 2,
        "adapter_bytes": 1000,
        "estimate": estimate(spec, SPEED),
        **versions(),
        "measured": "2026-11-25T12:00:00",
        "passes": (PassTime(tokens=64, squares=100, seconds=0.5),),
        "cost": PassCost(base=1e-3, per_token=1e-5, per_square=1e-9),
        "mape": 0.01,
        "step_seconds": 1e-3,
        "memory": (),
        "link": LinkRate(base_seconds=1e-5, bytes_per_second=1e9),
    }
    return Profile(**values | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxlora" / "profiles"


def test_it_is_read_as_it_was_written():
    assert read_text(KIND) is None
    path = write_profile(KIND, profile())
    assert (
        path == device_path("profiles", KIND)
        and path.name == "nvidia-h100-80gb-hbm3.json"
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert parse(read_text(KIND), KIND) == (profile(),)
    assert read_text("NVIDIA H200") is None


def test_a_later_measurement_replaces_the_earlier_one():
    other = profile(kernels=Kernels.of(SPEC).model_copy(update={"dtype": "bfloat16"}))
    for one in (profile(rank=4), other, profile(rank=16)):
        write_profile(KIND, one)
    assert parse(read_text(KIND), KIND) == (other, profile(rank=16))


def test_the_oldest_measurements_go(monkeypatch):
    many = [profile(model=f"{i}") for i in range(70)]
    monkeypatch.setattr(device_profile, "read_text", lambda _: "")
    monkeypatch.setattr(device_profile, "parse", lambda *_: tuple(many[:69]))
    path = write_profile(KIND, many[69])
    monkeypatch.undo()
    assert parse(path.read_text(), KIND) == tuple(many[6:])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f | {"version": 2}, "its version is 2, and 1 is known"),
        (lambda f: f | {"version": None}, "its version is None"),
        (lambda f: [f], "its version is None"),
        (lambda f: f | {"device": "NVIDIA H200"}, "it is of the device 'NVIDIA H200'"),
        (lambda f: f | {"more": 1}, "more: Extra inputs"),
        (lambda f: f | {"profiles": f["profiles"] * 2}, "two profiles of the same"),
        (lambda f: f | {"profiles": f["profiles"] * 65}, "at most 64 items"),
    ],
)
def test_a_foreign_file_counts_as_missing(damage, said, caplog):
    path = write_profile(KIND, profile())
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert read_text(KIND) is None
    assert said in caplog.text and str(path) in caplog.text


@pytest.mark.parametrize("value", [-1.0, 1e300, float("nan"), float("inf"), "1", None])
@pytest.mark.parametrize("key", ["estimate", "mape", "step_seconds"])
def test_impossible_numbers_are_refused(key, value):
    path = write_profile(KIND, profile())
    file = json.loads(path.read_text())
    file["profiles"][0][key] = value
    with pytest.raises(ValueError, match=key if value == value else "."):
        parse(json.dumps(file), KIND)


def test_damaged_text_never_raises_another_error():
    text = write_profile(KIND, profile()).read_text()
    rng, refused = random.Random(0), 0
    for _ in range(300):
        at, size = rng.randrange(len(text)), rng.randrange(1, 9)
        new = "".join(rng.choices('0123456789{}[]",:e-x', k=rng.randrange(4)))
        try:
            parse(text[:at] + new + text[at + size :], KIND)
        except ValueError:
            refused += 1
    assert refused > 200


def test_files_that_others_may_write_are_not_used(cache, caplog):
    path = write_profile(KIND, profile())
    path.chmod(0o620)
    assert read_text(KIND) is None and "chmod go-w" in caplog.text
    path.chmod(0o600)
    cache.chmod(0o770)
    assert read_text(KIND) is None
    with pytest.raises(ConfigError, match="--output"):
        write_profile(KIND, profile())
    cache.chmod(0o700)
    assert read_text(KIND) is not None
    path.rename(cache / "other.json")
    path.symlink_to(cache / "other.json")
    assert read_text(KIND) is None
    path.unlink()
    os.mkfifo(path)
    assert read_text(KIND) is None  # and it does not wait for a writer


def test_a_large_file_is_not_read(caplog):
    path = write_profile(KIND, profile())
    path.write_text(" " * 2**20 + path.read_text())
    assert read_text(KIND) is None and "bytes" in caplog.text


def test_output_is_a_file_of_its_own(tmp_path):
    path = write_profile(KIND, profile(), tmp_path / "mine.json")
    assert parse(path.read_text(), KIND) == (profile(),)
    assert read_text(KIND) is None


def test_the_profile_of_the_model_and_its_kernels_is_found():
    found, why = find_profile((profile(),), SPEC)
    assert found == profile() and "2026-11-25" in why
    other = DecoderSpec(
        config=model_config(CONFIG | {"intermediate_size": 64}), options=SPEC.options
    )
    assert find_profile((profile(),), other)[0] is None
    fused = profile(kernels=Kernels.of(SPEC).model_copy(update={"attention": "cudnn"}))
    found, why = find_profile((fused,), SPEC)
    assert found is None and "xla attention" in why
    found, why = find_profile((profile(jax_version="0.1"),), SPEC)
    assert found is None and "jax 0.1" in why
    assert find_profile((profile(),), SPEC.with_remat("layer"))[0] is not None


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN_DEVICE])
def test_another_remat_takes_longer_by_the_estimate(speed):
    mine = profile(estimate=estimate(SPEC, speed))
    alike = mine.seconds(SPEC, speed, 1000, 5000)
    assert alike == pytest.approx(1e-3 + 1e-5 * 1000 + 1e-9 * 5000)
    layer = SPEC.with_remat("layer")
    ratio = estimate(layer, speed) / estimate(SPEC, speed)
    assert 1.1 < ratio < 1.6
    assert mine.seconds(layer, speed, 1000, 5000) == pytest.approx(ratio * alike)
