"""The plan of replicas of different shapes, for GPUs that are not here."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import pytest
import yaml

from jaxlora import LoraJob, RunConfig
from jaxlora.cli.main import main
from jaxlora.config.replicas_config import describe_list
from jaxlora.costs.device_profile import PassCost, estimate
from jaxlora.costs.gpus import parse_machine
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linears
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.mesh import choose
from jaxlora.plan.mesh.candidates import Search
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.mesh.predict import exchanged_bytes, shape_seconds, table_seconds
from jaxlora.plan.replicas import lists
from jaxlora.plan.replicas.kinds import ReplicaModel
from jaxlora.plan.stages import MeshStages, estimated_footprint
from jaxlora.sharding.mesh_sizes import MeshSizes
from scripts.bench.shapes import config_json
from tests import tiny
from tests.jaxlora.costs.test_device_profile import profile
from tests.jaxlora.memory_formula import estimated_by_formula

BLOCK, CAPACITY, MEAN = 128, 1024, 300


@pytest.fixture(scope="module")
def model() -> ReplicaModel:
    config = model_config(config_json("llama-3.2-1b", 4))
    names = (f"layers.{i}.{n}" for i in range(4) for n in linears(config))
    options = DecoderOptions(
        dtype=jnp.dtype(jnp.bfloat16),
        max_segment_tokens=CAPACITY,
        mean_segment_tokens=MEAN,
        attention="triton",  # that of the GPUs
    )
    spec = DecoderSpec(
        config=config,
        options=options,
        slots=SlotShape(num_slots=2, rank=16),
        adapted=tuple(sorted(names)),
    )
    with planned_for(parse_machine("a100-40x16").planned(0.9)):
        rates = this_machine().rates(spec, None)
        return ReplicaModel(
            spec=spec,
            rates=rates,
            free_bytes=3 * 2**30,
            num_gpus=16,
            block_tokens=BLOCK,
            capacity=CAPACITY,
            mean_tokens=float(MEAN),
        )


@pytest.fixture(scope="module")
def kinds(model):
    planned = planned_for(parse_machine("a100-40x16").planned(0.9))
    with estimated_by_formula(), planned:
        return {(kind.tensor, kind.stage): kind for kind in model.kinds()}


def test_kinds_divide_the_model(kinds):
    assert {tensor for tensor, _ in kinds} == {1, 2, 4, 8, 16}
    assert {stage for _, stage in kinds} == {1, 2, 3, 4}  # of four layers
    assert all(kind.num_gpus <= 16 for kind in kinds.values())


@pytest.mark.usefixtures("memory_by_formula")
@pytest.mark.parametrize("tensor, stage", [(1, 1), (4, 1), (2, 2)])
def test_the_longest_sample_is_the_largest_microbatch_that_fits(
    model, kinds, tensor, stage
):
    """By the estimate that a mesh of these sizes is refused by: here, a formula."""
    sizes = MeshSizes(stage=stage, tensor=tensor)
    job = LoraJob(name="job", data={"path": "none"}, steps=1)
    config = RunConfig(model="none", jobs=(job,), mesh=str(sizes))
    with planned_for(parse_machine("a100-40x16").planned(0.9)):
        stages = MeshStages.of(config, model.spec)
        found = estimated_footprint(stages, BLOCK, CAPACITY)
    longest = kinds[tensor, stage].longest
    assert found.total_bytes(longest) <= model.free_bytes
    assert found.total_bytes(longest + BLOCK) > model.free_bytes


def test_more_gpus_hold_longer_samples(kinds):
    lengths = [kinds[tensor, 1].longest for tensor in (1, 2, 4, 8)]
    assert all(a < b for a, b in itertools.pairwise(lengths))


def test_slots_that_cannot_be_divided_have_no_tensor_replicas(model):
    slots = dataclasses.replace(model.spec.slots, outside=(("whole_head", 1),))
    spec = dataclasses.replace(model.spec, slots=slots)
    alike = dataclasses.replace(model, spec=spec, free_bytes=None)
    assert {kind.tensor for kind in alike.kinds()} == {1}


def stages_of(spec, tensor: int) -> MeshStages:
    """A replica of one stage."""
    return MeshStages(
        spec=spec,
        sizes=MeshSizes(tensor=tensor),
        borders=(0, spec.config.num_layers),
        in_flight=1,
    )


@pytest.mark.parametrize("tensor", [1, 2, 8, 16])
def test_a_replica_takes_the_time_of_its_microbatches(model, kinds, tensor):
    """As the trainer's own prediction for a full microbatch."""
    kind = kinds[tensor, 1]
    tokens = min(CAPACITY, kind.longest)
    stages = stages_of(model.spec, tensor)
    cost = shape_seconds(stages, tokens, model.rates).stages[0]
    seconds = cost.forward(tokens, 0.0) + cost.backward(tokens, 0.0)
    own = kind.cost(tokens, tokens * MEAN) - kind.cost.base
    assert own == pytest.approx(seconds)


def test_times_are_those_that_were_measured(model):
    """A profile has the time of a microbatch, which the GPUs of a layer divide."""
    rates, seconds = model.rates, PassCost(base=0.01, per_token=1e-5, per_square=1e-9)
    measured = profile(
        model.spec, cost=seconds, estimate=estimate(model.spec, rates.speed)
    )
    rates = dataclasses.replace(rates, profile=measured)
    known = dataclasses.replace(model, rates=rates, free_bytes=None, num_gpus=2)
    kinds = {(kind.tensor, kind.stage): kind for kind in known.kinds()}
    whole, half = kinds[1, 1].cost, kinds[2, 1].cost
    tables = [
        table_seconds(stages_of(model.spec, tensor), model.spec, rates) / CAPACITY
        for tensor in (1, 2)
    ]
    own = seconds.per_token + 0.01 / CAPACITY
    assert whole.per_token == pytest.approx(own + tables[0])
    assert whole.per_square == pytest.approx(seconds.per_square)
    exchanged = rates.exchange_seconds(sum(exchanged_bytes(model.spec, 2)), 2)
    assert half.per_token == pytest.approx(own / 2 + tables[1] + exchanged)
    assert kinds[1, 1].longest == CAPACITY  # its memory is not known


def test_tensor_parallelism_divides_attention_and_adds_exchanges(kinds):
    for tensor in (2, 8, 16):
        kind, whole = kinds[tensor, 1], kinds[1, 1]
        assert kind.cost.per_square < whole.cost.per_square
        assert kind.cost.per_token > whole.cost.per_token / tensor
    inside, across = (kinds[tensor, 1].cost.per_token for tensor in (8, 16))
    assert across > 0.7 * inside  # not half: sixteen are in two machines


def test_a_pipeline_pays_its_ramp_once_a_step(kinds):
    whole, piped = kinds[1, 1], kinds[1, 4]
    assert piped.cost.base > whole.cost.base
    assert piped.cost.per_token < whole.cost.per_token


@pytest.mark.usefixtures("memory_by_formula")
def test_a_model_that_does_not_fit_has_no_replicas(model):
    small = dataclasses.replace(model, free_bytes=2**20)
    with planned_for(parse_machine("a100-40x16").planned(0.9)):
        assert small.kinds() == ()


def write_run(folder, lengths, **settings):
    """Writes a run of jobs with samples of these lengths, in turn."""
    config = config_json("llama-3.2-1b", 2) | {"hidden_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(folder)
    jobs = []
    for name, own in lengths.items():
        data = folder / f"{name}.jsonl"
        texts = [{"text": "a" * (own[i % len(own)] - 1)} for i in range(40)]
        data.write_text("\n".join(map(json.dumps, texts)))
        jobs.append({"name": name, "data": {"path": str(data)}, "max_length": 1024})
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"model": str(folder), "jobs": jobs} | settings))
    return path


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    return write_run(folder, {"short": (60, 200), "long": (150, 900)})


@pytest.mark.usefixtures("memory_by_formula")
def test_plan_prints_and_draws_replicas(run_file, capsys):
    picture = run_file.parent / "replicas.png"
    options = ["--gpu", "a100-40x4", "--replicas", "auto", "--picture", str(picture)]
    assert main(["plan", str(run_file), *options]) == 0
    text = capsys.readouterr().out
    assert "replicas for 4 GPUs: 4 x tensor=1, remat none" in text
    for word in ("lower bound", "saved", "one job after the other", "idle", "alike"):
        assert word in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "needs the rates of the GPUs"),
        (["--gpu", "h100", "--steps", "2"], "--steps is for the plan of a mesh"),
        (
            ["--gpu", "h100", "--price-per-hour", "2"],
            "--price-per-hour is for the plan",
        ),
    ],
)
def test_refusals(run_file, options, message, capsys):
    assert main(["plan", str(run_file), "--replicas", "auto", *options]) == 1
    assert message in capsys.readouterr().err


# ---- replicas: auto in a run file ----------------------------------------------------


@pytest.fixture
def compared(monkeypatch):
    """The candidate that is chosen, and the others."""
    seen, explain = [], choose._reason

    def watched(search, chosen, others):
        seen.extend([chosen, *(one for one in others if one.fits)])
        return explain(search, chosen, others)

    monkeypatch.setattr(choose, "_reason", watched)
    return seen


@pytest.mark.usefixtures("memory_by_formula")
def test_auto_takes_what_is_fastest(tmp_path, compared, capsys):
    settings = {"defaults": {"batch_size": 16}, "replicas": "auto"}
    lengths = {"one": (300, 500), "two": (400,), "three": (200, 900)}
    path = write_run(tmp_path, lengths, **settings)
    assert main(["plan", str(path), "--gpu", "a100-40x2"]) == 0
    _check_fastest(compared, capsys.readouterr().err, is_list=False)


@pytest.mark.usefixtures("memory_by_formula")
def test_auto_takes_devices_that_share_a_sample(tmp_path, compared, capsys):
    """One long sample a step."""
    settings = {"defaults": {"batch_size": 2}, "replicas": "auto"}
    path = write_run(tmp_path, {"one": (16, 1000)}, **settings)
    assert main(["plan", str(path), "--gpu", "a100-40x2"]) == 0
    named = _check_fastest(compared, capsys.readouterr().err, is_list=False)
    assert named == "tensor=2"


@pytest.mark.usefixtures("memory_by_formula")
def test_auto_takes_replicas_of_several_devices(
    tmp_path, compared, capsys, monkeypatch
):
    """Only two devices together hold the few long samples, and PCIe joins them."""
    fits = {1: 896, 2: 1024}

    def largest(search, plan, bounds, limit):
        tokens = fits.get(plan.stages.sizes.tensor, 0)
        return tokens if tokens >= bounds.smallest else None

    monkeypatch.setattr(Search, "largest", largest)
    fitting = lambda search, remat, tensor: fits.get(tensor)
    monkeypatch.setattr(lists, "_fitting_tokens", fitting)
    settings = {"defaults": {"batch_size": 32}, "replicas": "auto"}
    lengths = {name: (*[200] * 15, 1000) for name in ("one", "two", "three", "four")}
    path = write_run(tmp_path, lengths, **settings)
    assert main(["plan", str(path), "--gpu", "l40sx4"]) == 0
    shown = capsys.readouterr()
    named = _check_fastest(compared, shown.err, is_list=True)
    assert "on tensor=2 + 2 x 896 tokens" in named
    assert f"replicas of {named}" in shown.out
    picture = "--picture", str(tmp_path / "plan.png")
    assert main(["plan", str(path), "--gpu", "a100-40x2", *picture]) == 1
    assert "--picture simulates devices that are alike" in capsys.readouterr().err


def _check_fastest(compared, log: str, *, is_list: bool) -> str:
    """Checks the choice and its line in the log, and returns its name."""
    devices = compared[0].plan.config.num_devices
    whole = [one for one in compared if one.plan.config.num_devices == devices]
    found = [one for one in whole if one.plan.config.replicas is not None]
    meshes = [one for one in whole if one.plan.config.replicas is None]
    best, mesh = (min(ways, key=lambda one: one.seconds) for ways in (found, meshes))
    assert best.plan.config.replica_shapes[0].tokens >= 1024
    assert (1.02 * best.seconds < mesh.seconds) == is_list
    chosen = best if is_list else mesh
    assert chosen is compared[0]
    named = describe_list(best.plan.config.replica_shapes)
    if not is_list:
        named = mesh.plan.config.mesh
    (line,) = (text for text in log.splitlines() if " devices: it needs " in text)
    assert f"replicas: auto: {named}" in line
    return named


@pytest.mark.usefixtures("memory_by_formula")
def test_auto_refuses_what_fits_on_no_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Search, "largest", lambda *_: None)
    path = write_run(tmp_path, {"one": (16, 1000)}, replicas="auto")
    assert main(["plan", str(path), "--gpu", "a100-40x2"]) == 1
    assert "needs" in capsys.readouterr().out
