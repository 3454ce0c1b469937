"""The mesh benchmark, end to end on a tiny model and simulated devices."""

import dataclasses
import json
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlora.adapters.adapter import Adapter
from jaxlora.errors import JaxloraError
from jaxlora.models.structure import linears
from jaxlora.profile.training import random_base
from jaxlora.scheduler import Lanes, Pipeline, violations
from jaxlora.scheduler.stream.state import Rules
from scripts.bench import __main__ as bench
from scripts.bench.kernel_times import Kernel, is_exchange
from scripts.bench.mesh import benchmark
from scripts.bench.mesh.cases import Case, Window, samples_of
from scripts.bench.mesh.fixed_ticks import fixed_shape_cost
from scripts.bench.mesh.measure import flops_per_token, measure
from scripts.bench.mesh.results import results

CASE = Case(
    model="tiny",
    mesh="stage=2",
    adapters=(2,),
    num_microbatches=4,
    batch_samples=4,
    microbatch_tokens=128,
    block_tokens=32,
    longest_tokens=60,
    dtype="float32",
    repeats=2,
)
TINY = (
    "--model tiny --layers 1 --adapters 2 --ticks 4 --batch-samples 4 "
    "--microbatch-tokens 128 --block-tokens 32 --longest-tokens 60 --dtype float32 "
    "--repeats 2 --meshes fsdp=2 fsdp=1 --output-dir"
)


def of_kind(found, kind):
    return [row for row in found.rows if row["kind"] == kind]


def test_a_pipeline(tmp_path):
    found = results(tmp_path)
    measure(CASE, found)
    assert not of_kind(found, "skipped"), found.rows
    (row,) = of_kind(found, "window")
    assert row["simulated_bubble_percent"] < 100
    # The work is the same, so the bubbles tell which of the two took longer.
    is_slower = row["seconds"] > row["simulated_seconds"]
    assert is_slower == (row["bubble_percent"] > row["simulated_bubble_percent"])
    idle = [100 - percent for percent in row["busy_percent_by_stage"]]
    assert sum(idle) / 2 == pytest.approx(row["bubble_percent"], abs=0.02)
    names = [row["pass"] for row in of_kind(found, "pass")]
    assert names == ["F0"] * 4 + ["FB1"] * 4 + ["B0"] * 4 + ["transfer"]
    lines = (tmp_path / "mesh.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found.rows
    tables = (tmp_path / "mesh.md").read_text()
    assert "| stage=2 | 2 | " in tables and "### compile" in tables


@pytest.fixture
def in_this_process(monkeypatch):
    """Measures cases here, and lets those of one device end early."""

    def alone(case, folder, limit):
        if case.mesh == "fsdp=1":
            return "it took more than 1 s"
        measure(case, results(folder))
        return None

    monkeypatch.setattr(benchmark, "measure_alone", alone)
    monkeypatch.setattr(benchmark, "devices", lambda: (8, "cpu", "cpu"))


def test_fsdp(tmp_path, in_this_process, capsys):
    bench.run("mesh", [*TINY.split(), str(tmp_path)])
    found = results(tmp_path)
    (step,) = of_kind(found, "step")
    assert (step["mesh"], step["gpus"], step["adapters"]) == ("fsdp=2", 2, 2)
    assert step["temp_gib"] >= 0
    (window,) = of_kind(found, "window")
    assert window["ticks"] > 1 and window["tokens"] >= 4 * 128
    (skipped,) = of_kind(found, "skipped")
    assert (skipped["mesh"], skipped["reason"]) == ("fsdp=1", "it took more than 1 s")
    printed = capsys.readouterr().out
    assert "| fsdp=1 | the rest | it took more than 1 s |" in printed


def test_all_meshes_are_compiled_before_they_are_measured(
    tmp_path, in_this_process, monkeypatch
):
    compiled = []
    monkeypatch.setattr(
        benchmark, "compile_all", lambda cases, limit: compiled.append(cases)
    )
    arguments = [*TINY.split(), str(tmp_path), "--parts", "step"]
    bench.run("mesh", [*arguments, "--compile", "only"])
    assert [case.mesh for case in compiled[0]] == ["fsdp=2", "fsdp=1"]
    assert compiled[0][0].parts == ("step",) and not results(tmp_path).rows


def test_ratios_are_to_one_device():
    def window(mesh, gpus, speed, adapters=4):
        return {
            **{"kind": "window", "model": "m", "layers": 1, "capacity": 8},
            **{"mesh": mesh, "gpus": gpus, "adapters": adapters, "ticks": 5},
            **{"no_ops": 0, "tokens": 100, "seconds": 2.5},
            **{"tokens_per_second_gpu": speed, "peak_percent": 61.5},
        }

    found = results(None)
    for row in (
        window("stage=2", 2, 20.0),
        window("fsdp=1", 1, 25.0),
        window("fsdp=1", 1, 40.0, adapters=2),
        window("stage=2", 2, 20.0, adapters=2),
    ):
        found.add(row)
    made = found.tables()
    assert "| stage=2 | 4 | 5 | 0 | 100 | 2.5 | 20.0 | 0.800 | 61.5 |" in made
    assert "| stage=2 | 2 | 5 | 0 | 100 | 2.5 | 20.0 | 0.500 | 61.5 |" in made


def test_a_window_has_all_samples_by_the_rules():
    case = dataclasses.replace(CASE, mesh="stage=3", microbatch_tokens=512)
    lanes = Lanes(pipeline=Pipeline.one_f_one_b(3))
    window = Window.of(case, 6, [Adapter(modules={})] * 2, lanes)
    samples = samples_of(window.jobs)
    assert sum(sample.num_tokens for sample in samples) >= 6 * 512
    assert not violations(window.schedule, samples, distance=3)
    more = Window.of(case, 12, [Adapter(modules={})] * 2, lanes)
    for slot, job in window.jobs.items():  # the first samples do not depend on it
        assert job.num_steps < more.jobs[slot].num_steps
        assert job.prepared.lengths(0) == more.jobs[slot].prepared.lengths(0)


def test_a_stream_of_a_kind_of_jobs_by_the_rules_of_the_run():
    kind = "1 job ten times 3 others"
    case = dataclasses.replace(CASE, adapters=(4,), kinds=(kind,))
    lanes = Lanes(pipeline=Pipeline.one_f_one_b(2))
    cost = fixed_shape_cost(case.microbatch_tokens, 2)
    rules = Rules(limits=case.limits, lanes=lanes, cost=cost)
    window = Window.of_kind(case, kind, [Adapter(modules={})] * 4, rules)
    assert [len(job.prepared.train_data.samples) for job in window.jobs.values()] == [
        160, 16, 16, 16,
    ]  # fmt: skip
    assert window.jobs[0].num_steps == 20
    assert window.schedule.limits == rules.limits
    assert not violations(window.schedule, samples_of(window.jobs), distance=2)
    with pytest.raises(ValueError, match="has 4 jobs, and adapters="):
        dataclasses.replace(case, adapters=(2,))


def test_speeds_over_the_stream_that_takes_padding_for_tokens():
    found = results(None)
    for share, seconds in ((1.0, 3.0), (0.3, 2.0)):
        found.add(
            {"kind": "stream", "model": "m", "layers": 1, "capacity": 8, "gpus": 2}
            | {"mesh": "stage=2", "jobs": "1 job", "padding_share": share}
            | {"ticks": 5, "no_ops": 0, "seconds": seconds, "predicted_seconds": None}
        )
    made = found.tables()
    assert "| stage=2 | 1 job | 0.3 | 5 | 0 | 2.0 | 1.500 |" in made


def test_a_case_goes_to_its_process_as_json():
    case = dataclasses.replace(CASE, adapters=(4,), kinds=("4 jobs",))
    assert Case.from_json(case.to_json()) == case
    with pytest.raises(
        ValueError, match=r"adapters=\(5,\) must be numbers from 1 to 4"
    ):
        dataclasses.replace(CASE, adapters=(5,))


def test_operations_of_a_token():
    """Each weight of a linear takes two operations forward and two backward."""
    spec = dataclasses.replace(CASE.plan().spec, adapted=())
    found = linears(spec.config).values()
    products = 4 * 2 * sum(x.in_features * x.out_features for x in found)
    head = 0.3 * 4 * spec.config.hidden_size * spec.config.vocab_size
    assert flops_per_token(spec, 0) == pytest.approx(products + head)
    assert flops_per_token(spec, 100) > flops_per_token(spec, 10) > products + head


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    began = time.monotonic()
    reason = benchmark.measure_alone(CASE, tmp_path, limit=0.1)
    assert reason == "it took more than 0.1 s"
    assert time.monotonic() - began < 10


def test_one_device_is_too_few():
    wanted = ["stage=2", "fsdp=2", "tensor=2", "fsdp=1"]
    assert benchmark.default_meshes(2) == wanted
    with pytest.raises(JaxloraError, match="there is 1 here"):
        benchmark.default_meshes(1)


def test_weights_do_not_depend_on_their_placement():
    shapes = {
        "layers.0.self_attn.q_proj.kernel": jax.ShapeDtypeStruct((8, 4), np.float32),
        "norm.scale": jax.ShapeDtypeStruct((8,), np.float32),
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    here = random_base(shapes)
    there = random_base(shapes, lambda path, shape: place)
    for path, array in there.items():
        assert array.sharding == place
        np.testing.assert_array_equal(array, here[path])


def test_copies_between_devices_are_exchanges():
    def kernel(name, instruction=""):
        times = {"start_ms": 0.0, "ms": 1.0, "module": ""}
        return Kernel(name=name, instruction=instruction, **times)

    for name in ("ncclDevKernel_AllGather_RING_LL", "MemcpyP2P"):
        assert is_exchange(kernel(name))
    assert is_exchange(kernel("memcpy", "all-gather-start.3"))
    assert not is_exchange(kernel("MemcpyD2D")) and not is_exchange(kernel("fusion"))
