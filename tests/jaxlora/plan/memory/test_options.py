"""`remat` and the capacity are chosen together, for devices of a described size."""

import dataclasses
import itertools

import pytest

from jaxlora.config import RunConfig
from jaxlora.costs.gpus import find_speed
from jaxlora.costs.stages import decoder_seconds, total
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.memory import estimate
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.memory.estimate import StepBytes, step_bytes
from jaxlora.plan.mesh.candidates import MARGIN, Candidate
from jaxlora.plan.mesh.choose import choose
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.stages import MeshStages
from tests.jaxlora.plan.made_up import search_of
from tests.llama import LLAMA_1B, LLAMA_8B, decoder

SPEED = find_speed("NVIDIA L40S")
SPEC = decoder(LLAMA_8B)
AUTO = Bounds(smallest=1024, largest=16384, unit=1024, sample_tokens=400.0)
CONFIG = RunConfig(
    model="m",
    jobs=[{"name": "a", "data": {"path": "a.jsonl"}}],
    microbatch_tokens="auto",
    remat="auto",
)
# As estimated for Llama-3.1-8B with plain XLA; the estimate has its own tests.
STEP_BYTES = {
    "none": StepBytes(
        kept_by_layer=151792,
        kept_at_ends=8713,
        recomputed=0,
        transient=253056,
        alone=253056,
    ),
    "elementwise": StepBytes(  # as if it saved nothing
        kept_by_layer=151792,
        kept_at_ends=8713,
        recomputed=0,
        transient=253056,
        alone=253056,
    ),
    "mlp": StepBytes(
        kept_by_layer=57488,
        kept_at_ends=8713,
        recomputed=94304,
        transient=253056,
        alone=253056,
    ),
    "layer": StepBytes(
        kept_by_layer=8192,
        kept_at_ends=16905,
        recomputed=135408,
        transient=253056,
        alone=253056,
    ),
}


@pytest.fixture(autouse=True)
def _made_up(monkeypatch):
    monkeypatch.setattr(
        estimate, "step_bytes", lambda spec, *_: STEP_BYTES[spec.options.remat]
    )


def chosen(
    gb: float, bounds: Bounds = AUTO, lengths=(400,) * 64, config: RunConfig = CONFIG
) -> Candidate:
    """Llama-3.1-8B on a GPU of which JAX takes 92 %, less the reserve."""
    available = DeviceMemory(num_bytes=int(gb * 2**30 * 0.92 * 0.95), source="made up")
    here = Machine(num_devices=1, speed=SPEED, memory=available)
    search = search_of(config, SPEC, bounds, here, num_jobs=4, samples=lengths)
    return search.best(config, MARGIN)


def line(gb: float) -> str:
    """Why a `remat` was chosen."""
    available = DeviceMemory(num_bytes=int(gb * 2**30 * 0.92 * 0.95), source="made up")
    here = Machine(num_devices=1, speed=SPEED, memory=available)
    plan = choose(search_of(CONFIG, SPEC, AUTO, here, num_jobs=4))
    (found,) = (n.text for n in plan.notes if n.text.startswith("remat: auto: "))
    return found


@pytest.mark.parametrize(
    ("gb", "remat", "most"),
    [(24, "layer", 2048), (40, "none", 4096), (48, "none", 6144), (80, "none", 16384)],
)
def test_the_fastest_pair_that_fits_is_chosen(gb, remat, most):
    found = chosen(gb)
    assert found.remat == remat and 1024 <= found.tokens <= most
    assert found.fits
    others = [o for o in found.options if o.fits]
    assert found.seconds == min(o.seconds for o in others)
    tokens = [o.tokens for o in found.options]
    assert tokens == sorted(tokens)


def test_small_microbatches_can_cost_more_than_recomputation():
    """Weights are read for each of them, however few tokens there are."""
    tight = dataclasses.replace(AUTO, smallest=64, unit=64, sample_tokens=64.0)
    found = chosen(24, tight, (64,) * 64)
    none, _, mlp, _ = found.options
    assert none.fits and none.tokens < 512 < mlp.tokens
    assert none.seconds > mlp.seconds
    assert found.remat != "none"


def test_the_line_has_the_other_estimates():
    found = line(48)
    assert found.startswith("remat: auto: none with ") and "\n" not in found
    assert found.count(" tokens, about ") == 4 and found.count("times as long") == 3
    assert ", which does not fit" in line(24)


def test_nothing_stronger_is_tried_if_the_weakest_has_room():
    [only] = chosen(200).options
    assert (only.remat, only.tokens) == ("none", AUTO.largest)
    assert "a stronger remat would only take longer" in line(200)


def test_a_fixed_capacity_takes_the_weakest_remat_that_fits():
    fixed = dataclasses.replace(AUTO, fixed=8192)
    found = {gb: chosen(gb, fixed) for gb in (40, 48, 80)}
    assert {gb: o.remat for gb, o in found.items()} == {
        40: "layer",
        48: "layer",
        80: "none",
    }
    assert all(o.tokens == 8192 for o in found.values())


def test_if_nothing_fits_the_smallest_is_tried():
    found = chosen(12)
    assert (found.remat, found.tokens, found.fits) == ("layer", 1024, False)


@pytest.mark.parametrize(
    ("heads", "features", "tokens", "lengths", "kib"),
    [
        (9, 64, 8192, (512, 110), 30.14),
        (9, 64, 21504, (512, 110), 53.00),  # sequences of 336 take 384
        (9, 64, 21504, (2048, 600), 111.14),  # 1,408 queries for 1,344
        (32, 128, 12288, (8192, 300), 1584.50),
        (32, 128, 21504, (2048, 600), 436.50),
        (28, 128, 30720, (512, 110), 154.44),
    ],
)
def test_the_scratch_of_cudnn_is_what_xla_reports(
    heads, features, tokens, lengths, kib
):
    """The bytes per token of the backward pass that were compiled on an H200."""
    config = dataclasses.replace(
        LLAMA_1B, num_heads=heads, num_kv_heads=heads, head_dim=features
    )
    scratch = ATTENTIONS["cudnn"].scratch_bytes
    assert scratch is not None
    found = scratch(config, SegmentLengths(*lengths), tokens) / tokens
    assert found / 1024 == pytest.approx(kib, rel=0.025)


def test_a_capacity_has_the_scratch_of_its_own_classes_of_length(monkeypatch):
    """Llama-3.2-1B on an H200, limited to 21.91 GiB, less the reserve.

    A step of 12,288 tokens, whose sequences for attention are longer than those of
    8,192 tokens, took 19.74 GiB beside weights and slots. That is too much.
    """
    limit = int(0.95 * 21.91 * 2**30)
    lengths = dict(max_segment_tokens=2048, mean_segment_tokens=500)
    kernels = dict(implementation="mosaic", attention="cudnn")
    spec = decoder(LLAMA_1B, **lengths, **kernels)
    traced = StepBytes(
        kept_by_layer=80301,
        kept_at_ends=4361,
        recomputed=0,
        transient=28672,
        alone=28672,
    )
    monkeypatch.setattr(estimate, "step_bytes", step_bytes)  # not the fixture
    monkeypatch.setattr(estimate, "_step_bytes", lambda *_: traced)
    stages = MeshStages.of(CONFIG, spec)
    needed = {
        tokens: mesh_stages.estimated_footprint(stages, 64, tokens)
        for tokens in range(1024, 16385, 1024)
    }
    measured = 19.74 * 2**30
    assert measured < needed[12288].stages[0].step_bytes(12288) < 1.05 * measured
    bounds = dataclasses.replace(AUTO, smallest=2048)
    here = Machine(
        num_devices=1,
        speed=SPEED,
        memory=DeviceMemory(num_bytes=limit, source="made up"),
    )
    config = CONFIG.replace(remat="none")
    found = search_of(config, spec, bounds, here).best(config, MARGIN)
    fitting_tokens = [t for t, f in needed.items() if f.total_bytes(t) <= limit]
    assert found.fits and found.tokens == max(fitting_tokens) < 12288


def test_recomputation_costs_what_was_measured_on_an_h200():
    """A step of 8,192 tokens took 1.24 and 1.35 times as long."""
    h200 = find_speed("NVIDIA H200")
    none, mlp, layer = (
        total(decoder_seconds(SPEC.with_remat(remat), h200)).both
        for remat in ("none", "mlp", "layer")
    )
    assert mlp / none == pytest.approx(1.24, abs=0.03)
    assert layer / none == pytest.approx(1.35, abs=0.03)


def test_throughput_of_a_capacity():
    """It grows with the capacity, less and less."""
    config = CONFIG.replace(remat="none")
    largest = chosen(200, lengths=(64,) * 512, config=config)
    times = [largest.at(capacity).seconds for capacity in (1024, 2048, 4096, 8192)]
    gains = [one - other for one, other in itertools.pairwise(times)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)
