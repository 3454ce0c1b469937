"""Resuming, and a second trainer, compile nothing that a fresh run did not."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from jaxlora import RunConfig, Trainer
from tests.jaxlora.train import fused
from tests.jaxlora.train.at_window import AtWindow
from tests.jaxlora.train.conftest import TWO_SLOTS
from tests.jaxlora.train.counted_run import counting, interrupt

# How many programs a run has of each function.
RUN = {
    "accumulate": 1,
    "evaluate": 1,
    "optimizer_step": 1,
    "write_slot": 3,
    "read_slot_rows": 1,
}


@pytest.fixture(params=["xla", pytest.param("fused", marks=fused.only_where_it_runs)])
def make_trainer(request, model, jobs, tmp_path):
    """Trainers of runs of three jobs through two slots, with evaluations."""
    settings: dict[str, Any] = TWO_SLOTS
    if request.param == "fused":
        model = fused.wide_model(tmp_path / "wide")
        more = {"microbatch_tokens": 512, "max_concurrent_jobs": 2}
        settings = fused.SETTINGS | more

    def make(name: str, **more) -> Trainer:
        config = RunConfig(
            model=str(model.folder),
            output_dir=str(tmp_path / name),
            jobs=jobs[:3],
            window_steps=1,
            checkpoint_every=1,
            **settings,
            **more,
        )
        return Trainer(config, model)

    return make


def test_a_second_trainer_of_the_same_shapes_compiles_nothing(make_trainer):
    make_trainer("first").train()
    with counting() as (compiled, _):
        second = make_trainer("second").train()
    assert {name: compiled[name] for name in RUN} == dict.fromkeys(RUN, 0)
    assert second.num_compilations == 0


def in_a_new_process(
    run_file: pathlib.Path, cache: pathlib.Path, *how: str, keeps: bool = False
) -> dict:
    """Trains in a process of its own; returns how it ended and what it compiled."""
    settings = {
        "JAXLORA_KEEP_PROGRAMS": str(int(keeps)),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.jaxlora.train.counted_run", run_file, *how],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.grid
def test_a_resumed_run_compiles_what_a_fresh_one_does(make_trainer, tmp_path):
    """And it finds all of that in JAX's cache, where whole programs are not kept."""
    run_file, cache = tmp_path / "cut.json", tmp_path / "cache"
    config = make_trainer("cut").config.model_dump(mode="json")
    run_file.write_text(json.dumps(config))
    first = in_a_new_process(run_file, cache, "interrupt")
    assert {name: first["compiled"].get(name) for name in RUN} == RUN
    assert {f"jit_{name}" for name in RUN} <= set(first["missed"])
    second = in_a_new_process(run_file, cache, "resume")
    assert set(second["statuses"]) == {"finished"}
    assert {name: second["compiled"].get(name) for name in RUN} == RUN
    assert not set(second["missed"]) & {f"jit_{name}" for name in RUN}


def test_resuming_in_the_same_process_compiles_nothing(make_trainer):
    with pytest.raises(RuntimeError, match="stop here"):
        make_trainer("cut").train(callbacks=[AtWindow(interrupt)])
    with counting() as (compiled, _):
        make_trainer("cut").train(resume=True)
    assert {name: compiled[name] for name in RUN} == dict.fromkeys(RUN, 0)


@pytest.mark.grid  # `tests/jaxlora/programs` loads programs, in one process and in two
def test_a_second_process_loads_its_programs(make_trainer, tmp_path):
    """It traces and compiles none of them, and its adapters have the same bits."""
    cache, counts, adapters = tmp_path / "cache", [], []
    for name in ("first", "second"):
        run_file = tmp_path / f"{name}.json"
        config = make_trainer(name).config
        # The first process compiles everything; one linear is enough.
        jobs = [job.replace(target_modules=("down_proj",)) for job in config.jobs]
        config = config.replace(jobs=jobs, slot_targets=("down_proj",))
        run_file.write_text(json.dumps(config.model_dump(mode="json")))
        counts.append(in_a_new_process(run_file, cache, "train", keeps=True))
        weights = (tmp_path / name / "adapters").rglob("adapter_model.safetensors")
        adapters.append([path.read_bytes() for path in sorted(weights)])
    first, second = counts
    assert {name: first["compiled"].get(name) for name in RUN} == RUN
    assert first["num_compilations"] == sum(RUN.values())
    assert not second["compiled"].keys() & set(RUN)
    assert second["num_compilations"] == 0
    assert len(adapters[0]) == 3 and adapters[0] == adapters[1]
