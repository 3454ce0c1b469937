"""The training benchmarks, end to end on a tiny model."""

import csv
import dataclasses
import fcntl
import importlib.util
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Limits
from scripts import bench_joint, bench_models, bench_step, bench_step_rows
from scripts.bench_models import SCORES, config_json, random_base
from scripts.bench_step_parts import (
    ATTENTION,
    CUBLAS,
    GAPS,
    HEAD,
    OTHER,
    OWN,
    PARTS,
    Attribution,
)
from scripts.bench_step_parts import FROZEN as PRODUCTS
from scripts.bench_step_rows import FROZEN, PEER, Case
from scripts.bench_tokens import Lengths, full_microbatch
from scripts.bench_training import Setup, Training
from scripts.device_trace import Kernel, busy_ms

TINY = Case(
    model="tiny",
    row=FROZEN,
    num_layers=1,
    num_jobs=2,
    capacity=128,
    block_tokens=32,
    median_tokens=20,
    longest_tokens=40,
    dtype="float32",
    repeats=2,
)


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_step(tmp_path):
    words = "--models tiny --layers 1 --microbatch-tokens 128 --block-tokens 32 "
    words += "--median-tokens 20 --longest-tokens 40 --adapters 2 --repeats 2 "
    words += f"--microbatches 2 --profile --at-once 2 --output-dir {tmp_path} --rows"
    bench_step.main([*words.split(), "jaxlora xla", "jaxlora mosaic"])
    ours, mosaic = table(tmp_path / "steps.csv")
    assert (ours["row"], ours["adapters"], ours["tokens"]) == (
        "jaxlora xla",
        "2",
        "256",
    )
    assert float(ours["step_ms"]) > 0 and float(ours["compile_seconds"]) > 0
    if mosaic["device"] == "":  # no Hopper here
        assert "mosaic cannot run this" in mosaic["skipped"]
    parts = [
        row for row in table(tmp_path / "breakdown.csv") if row["row"] == "jaxlora xla"
    ]
    assert [row["part"] for row in parts] == [*PARTS, GAPS]
    maybe_zero = CUBLAS, OTHER, GAPS  # on a CPU
    assert all(float(row["ms"]) > 0 for row in parts if row["part"] not in maybe_zero)
    assert (tmp_path / "steps.png").exists() and (tmp_path / "breakdown.png").exists()


def test_the_base_alone():
    found = bench_step_rows.measure(TINY)
    assert found["tokens"] == 128
    assert found["p10_ms"] <= found["step_ms"] <= found["p90_ms"]


def test_the_base_alone_has_gradients_from_every_job():
    """Products of zeros draw less power: a base that multiplies them looks too fast."""
    model = model_config(config_json("tiny", 1))
    limits = Limits(capacity=128, block_tokens=32)
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=40)
    setup = Setup(model=model, options=options, limits=limits, num_jobs=0)
    lengths = Lengths(median=20, longest=40)
    batch = full_microbatch(2, limits, lengths, model.vocab_size, seed=0).packed
    base = random_base(setup.spec().base_shapes())
    training = Training(setup, base, batch)

    def gradient(loss_weight):
        weighted = dataclasses.replace(batch, loss_weight=loss_weight)
        (made,) = training.start([weighted])()
        return made

    is_first = np.repeat(batch.block_adapter == 0, limits.block_tokens)
    first = gradient(np.where(is_first, batch.loss_weight, 0))
    second = gradient(np.where(is_first, 0, batch.loss_weight))
    assert jnp.abs(first).max() > 0 and jnp.abs(second).max() > 0
    np.testing.assert_allclose(
        gradient(batch.loss_weight), first + second, rtol=1e-4, atol=1e-6
    )


def test_scores_of_attention_have_the_deviation_that_is_asked_for():
    model = model_config(config_json("tiny"))
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=8)
    base = random_base(DecoderSpec(config=model, options=options).base_shapes())
    x = jax.random.normal(jax.random.key(0), (256, model.hidden_size))  # as of a norm
    e = model.head_dim
    q, k = (x @ base[f"layers.0.self_attn.{name}_proj.kernel"][:, :e] for name in "qk")
    assert (q @ k.T / e**0.5).std() == pytest.approx(SCORES, rel=0.1)


def broken_base(shapes):
    return {k: v.at[..., 0].set(jnp.nan) for k, v in random_base(shapes).items()}


@pytest.mark.parametrize("row", [FROZEN, "jaxlora xla"])
def test_gradients_that_are_not_finite_are_not_timed(row, monkeypatch):
    monkeypatch.setattr(bench_models, "random_base", broken_base)
    found = bench_step_rows.measure(dataclasses.replace(TINY, row=row))
    assert found == {"skipped": "the gradients are not finite"}


def test_a_row_is_not_stopped_for_waiting_but_for_what_it_takes_itself(
    tmp_path, monkeypatch
):
    waits = []

    def flock(file, how):
        assert how == fcntl.LOCK_EX
        waits.append(signal.getitimer(signal.ITIMER_REAL)[0])

    monkeypatch.setattr(bench_step_rows.fcntl, "flock", flock)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with (tmp_path / "turn").open("w") as file:
            bench_step_rows.take_turn(file)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert waits == [0]  # the timer stands still
    assert 900 < left <= 1000


def test_a_failed_row_says_why():
    trace = ["Traceback (most recent call last):", "    return run()", "  ^^^^^"]
    why = "jax.errors.JaxRuntimeError: INTERNAL: out of memory"
    behind = ["=== Source Location Trace: ===", "xla/pjrt/status_utils.cc:146"]
    assert bench_step.reason([*trace, "ValueError: first", why, *behind]) == why
    assert bench_step.reason(["Killed"]) == "Killed"
    assert not bench_step.reason([])


def test_a_row_that_takes_too_long_is_skipped(tmp_path):
    (tmp_path / "turn").touch()
    found = bench_step.measure_alone(TINY, 0.01, str(tmp_path / "turn"))
    assert found == {"skipped": "it took more than 0.01 s"}


def test_ratios():
    rows = [
        {"model": "m", "row": FROZEN, "tokens_per_second": 30},
        {"model": "m", "row": PEER, "tokens_per_second": 10},
        {"model": "m", "row": "jaxlora xla", "tokens_per_second": 20},
        {"model": "m", "row": "jaxlora mosaic", "skipped": "no Hopper"},
    ]
    bench_step.with_ratios(rows)
    assert [row["time_over_adapters_off"] for row in rows] == [1.0, 3.0, 1.5, None]
    assert [row["speed_over_peft"] for row in rows] == [3.0, 1.0, 2.0, None]


@pytest.mark.live
@pytest.mark.filterwarnings("default")  # torch and its friends warn of much
@pytest.mark.parametrize("row", [PEER, "peft, padded", "torch, adapters off"])
def test_peers(row):
    found = bench_step_rows.measure(dataclasses.replace(TINY, row=row))
    if importlib.util.find_spec("peft") is None:
        assert "not installed" in found["skipped"]
    else:
        assert found["tokens"] == 128 and found["step_ms"] > 0


JOINT = (
    "--model tiny --layers 1 --implementation xla --jobs 1 2 --step-tokens 64 "
    "--median-tokens 20 --longest-tokens 40 --microbatch-tokens 128 "
    "--block-tokens 32 --repeats 2 --dtype float32 --output-dir"
)


def test_joint(tmp_path):
    bench_joint.main([*JOINT.split(), str(tmp_path)])
    one, two = table(tmp_path / "joint.csv")
    assert (one["alone_microbatches"], one["together_microbatches"]) == ("1", "1")
    assert (two["alone_microbatches"], two["together_microbatches"]) == ("2", "1")
    assert float(two["speedup"]) > 0
    assert (tmp_path / "joint.png").exists()


def test_joint_stops_at_gradients_that_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_joint, "random_base", broken_base)
    with pytest.raises(SystemExit, match=r"num_jobs=1.*gradients are not finite"):
        bench_joint.main([*JOINT.split(), str(tmp_path)])
    assert not (tmp_path / "joint.csv").exists()


@pytest.mark.parametrize("num_jobs", [1, 3, 8])
def test_a_full_microbatch_has_no_padding(num_jobs):
    limits = Limits(capacity=256, block_tokens=32)
    lengths = Lengths(median=15, longest=30)
    drawn = full_microbatch(num_jobs, limits, lengths, 50, seed=0)
    assert drawn.num_tokens == 256
    assert (np.asarray(drawn.packed.segment_ids) >= 0).all()
    assert set(np.asarray(drawn.packed.block_adapter).tolist()) == set(range(num_jobs))
    assert all(len(s.token_ids) >= 2 and s.is_target.any() for s in drawn.samples)


def kernel(name, start_ms=0.0, ms=1.0):
    return Kernel(name=name, instruction="", module="", start_ms=start_ms, ms=ms)


def test_kernels_that_are_known_by_name():
    attribution = Attribution({}, rank=16)
    wanted = {
        "lora_expand_outer_mosaic_gpu_kernel": PRODUCTS,
        "lora_shrink": OWN,
        "lora_outer": OWN,
        "cudnn_sdpa_bprop": ATTENTION,
        "nvjet_sm90_tst_256x128_64x4": CUBLAS,
        "nvjet_sm90_tss_256x128_64x4": HEAD,
        "something_else": OTHER,
    }
    assert {name: attribution.part(kernel(name)) for name in wanted} == wanted


def test_busy_time_counts_overlaps_once():
    kernels = [
        kernel("a", 0, 4),
        kernel("b", 1, 1),
        kernel("c", 3, 3),
        kernel("d", 9, 1),
    ]
    assert busy_ms(kernels) == 7
