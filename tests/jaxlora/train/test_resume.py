"""A run that is killed or interrupted ends in the same bits as one that is not."""

import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from jaxlora import Trainer, import_peft, load_run
from jaxlora.cli.main import main
from jaxlora.errors import CheckpointError
from jaxlora.models.structure import linear_shapes
from jaxlora.run.folder import read_run_record, write_run_record
from jaxlora.run.log import RunLog
from jaxlora.train.saved.export import export_checkpoint
from tests import tiny
from tests.jaxlora.train import fused
from tests.jaxlora.train.runs import (
    LINEARS,
    AtWindow,
    InterruptAt,
    adapter_bytes,
    events_of,
)
from tests.jaxlora.train.test_start_imports import IMPORTED_BY

# Kills itself at the given line of the metrics, wherever the run is just then: the
# checkpoint of that round is still being written in the background.
KILL = """
import os, signal, sys
from jaxlora.models.structure import linear_shapes
from jaxlora.run.log import RunLog
left, write = int(sys.argv[2]), RunLog._write
def count(self, line):
    global left
    write(self, line)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
RunLog._write = count
from jaxlora.cli.main import main
sys.exit(main(["train", sys.argv[1], *sys.argv[3:]]))
"""

# Kills itself in the middle of the second checkpoint, when a later step has ended.
KILL_IN_WRITE = """
import json, os, signal, sys, threading
from jaxlora.run.log import RunLog
from jaxlora.train.saved import checkpoint
left, write, goes_on = 2, RunLog._write, threading.Event()
def sync(folder, sync_files=checkpoint.sync_files):
    global left
    left -= 1
    if left == 0:
        goes_on.wait()
        # safetensors writes into such a file, and renames it at the end.
        (folder / "tensors.safetensors").rename(folder / ".tmpR0nn1K")
        os.kill(os.getpid(), signal.SIGKILL)
    sync_files(folder)
def note(self, line):
    write(self, line)
    event = json.loads(line)
    if event["event"] == "step" and event["round"] >= 5:
        goes_on.set()
checkpoint.sync_files, RunLog._write = sync, note
from jaxlora.cli.main import main
sys.exit(main(["train", sys.argv[1]]))
"""

# Ends at the line of the metrics that has the first step, and says which programs were
# compiled until then and which modules were imported.
FIRST_STEP = """
import gc, json, os, sys
import jax
from jaxlora.run.log import RunLog
compiled = []
def on_duration(event, seconds, **names):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(names.get("fun_name", "?"))
jax.monitoring.register_event_duration_secs_listener(on_duration)
def end(self, line, write=RunLog._write):
    if b'"event": "step"' in line:
        from jaxlora.programs.program import wait_until_kept
        wait_until_kept()
        assert gc.isenabled()
        print(json.dumps({"compiled": compiled, "modules": [*sys.modules]}), flush=True)
        os._exit(0)
    write(self, line)
RunLog._write = end
from jaxlora.cli.main import main
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    """Run files of the same run in other output folders."""
    folder = tmp_path_factory.mktemp("resume")
    model = tiny.write_layers(folder / "model", 1)
    jobs = []
    for i, (batch_size, targets) in enumerate([(3, ["q_proj"]), (2, LINEARS)]):
        jobs.append(
            {
                "name": f"job{i}",
                "data": {"path": tiny.write_records(folder / f"{i}.jsonl", 20, i)},
                "target_modules": targets,
                "batch_size": batch_size,
                "rank": 2 + i,
                "dropout": 0.1,
                "steps": 6 + 3 * i,
                "learning_rate": 0.01,
                "max_length": 96,
                "eval_fraction": 0.1,
                "eval_every": 4,
                "seed": i,
            }
        )

    def make(name: str, **settings) -> pathlib.Path:
        run = {
            "model": str(model),
            "output_dir": str(folder / name),
            "microbatch_tokens": 256,
            "block_tokens": 16,
            "dtype": "float32",
            "checkpoint_every": 2,
            "jobs": jobs,
        }
        path = folder / f"{name}.json"  # JSON is YAML
        path.write_text(json.dumps(run | settings))
        return path

    return make


def killed(run_file, *arguments, program: str = KILL) -> None:
    """Trains in a process of its own, which kills itself."""
    ended = trained(program, run_file, *arguments)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def trained(program: str, *arguments) -> subprocess.CompletedProcess[str]:
    """Trains in a process of its own."""
    # With as many devices as here, it finds the programs of this process.
    env = os.environ | {
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
        "JAX_NUM_CPU_DEVICES": str(jax.config.jax_num_cpu_devices),
        # No test patches the code of these processes: one traces, the others load.
        "JAXLORA_KEEP_PROGRAMS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def command(run_file, *arguments) -> int:
    """Trains in this process; returns the exit status of `jaxlora`."""
    return main(["train", str(run_file), *arguments])


def test_the_second_start_compiles_nothing_and_imports_what_it_needs(make_run):
    """Each small program would take 20 to 100 ms on a GPU, orbax half a second."""
    ends = [trained(FIRST_STEP, make_run(name)) for name in ("cold", "again")]
    assert [one.returncode for one in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert "jaxlora: error" not in ends[1].stderr and "loaded" in ends[1].stderr
    found = json.loads(ends[1].stdout)
    assert found["compiled"] == []
    assert (IMPORTED_BY.keys() & {*found["modules"]}) <= {"tensorboardX"}


@pytest.fixture
def signal_at(monkeypatch):
    """Sends this process a signal at the given line of the metrics."""

    def prepare(line: int, signal_name: str) -> None:
        left, write = itertools.count(line - 1, -1), RunLog._write

        def count(self, text):
            write(self, text)
            if next(left) == 0:
                os.kill(os.getpid(), getattr(signal, signal_name))

        monkeypatch.setattr(RunLog, "_write", count)

    return prepare


def results(run_file):
    """The adapters' bytes, and the losses of every step and evaluation."""
    folder = pathlib.Path(json.loads(run_file.read_text())["output_dir"])
    losses = [
        (e["event"], e["job"], e["step"], e.get("loss", e.get("eval_loss")))
        for e in events_of(folder, "step", "eval")
    ]
    return adapter_bytes(folder), losses


@pytest.fixture(scope="module")
def whole(make_run):
    """The results of a run that nothing stopped, by steps of a window."""
    out = {}
    for window_steps in (1, 4):
        run_file = make_run(f"whole{window_steps}", window_steps=window_steps)
        assert command(run_file) == 0
        out[window_steps] = results(run_file)
    return out


@pytest.mark.parametrize(
    ("window_steps", "kills"),
    [
        pytest.param(1, (2,), marks=pytest.mark.grid),
        # Another test always kills in the middle of a write.
        pytest.param(4, (), marks=pytest.mark.grid),
        pytest.param(4, (14,), marks=pytest.mark.grid),
        pytest.param(1, (2, 9, 8, 6), marks=pytest.mark.grid),
        pytest.param(4, (14, 13, 3), marks=pytest.mark.grid),
    ],
    ids=["every step", "once", "windows", "every step, more", "windows, more"],
)
def test_killed_again_and_again(make_run, whole, window_steps, kills):
    """kill -9 at points that fall before, in and after checkpoints, and in windows.

    Wherever the checkpoint under way was complete, a kill falls right after the next
    one has begun; wherever it was not, earlier. None comes after the last window.
    """
    name = f"killed{window_steps}_{len(kills)}"
    run_file = make_run(name, window_steps=window_steps)
    killed(run_file, "9")
    for line in kills:
        killed(run_file, str(line), "--resume")
    assert command(run_file, "--resume") == 0
    assert results(run_file) == whole[window_steps]


def test_killed_in_the_middle_of_a_write(make_run, whole):
    """Training is past the checkpoint by then; the one before it is used."""
    run_file = make_run("written", window_steps=1)
    killed(run_file, program=KILL_IN_WRITE)
    folder = pathlib.Path(json.loads(run_file.read_text())["output_dir"])
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names[0] == "2" and names[1].startswith("4.orbax-checkpoint-tmp")
    assert events_of(folder)[-1]["round"] >= 5
    assert command(run_file, "--resume") == 0
    assert results(run_file) == whole[1]


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM"])
def test_interrupted(make_run, whole, signal_at, capsys, signal_name):
    """Finishes what is in flight, writes a checkpoint; no step is done twice."""
    run_file = make_run(f"interrupted_{signal_name}", checkpoint_every=None)
    signal_at(8, signal_name)
    assert command(run_file) == 130
    printed = capsys.readouterr()
    assert "finishing what is in flight, then writing a checkpoint" in printed.err
    assert "Continue with --resume" in printed.out
    assert command(run_file, "--resume") == 0
    assert results(run_file) == whole[4]


@pytest.fixture(scope="module")
def fused_run(make_run, tmp_path_factory):
    """Makes run files for fused kernels, cuDNN's attention and bfloat16."""
    model = tiny.write_model(tmp_path_factory.mktemp("wide"), config=fused.CONFIG)
    settings = fused.SETTINGS | {"dtype": "bfloat16", "microbatch_tokens": 512}

    def make(name: str) -> pathlib.Path:
        return make_run(name, model=str(model), window_steps=2, **settings)

    return make


@pytest.fixture(scope="module")
def fused_whole(fused_run):
    """The results of a fused run that nothing stopped."""
    run_file = fused_run("fused_whole")
    assert command(run_file) == 0
    return results(run_file)


@fused.only_where_it_runs
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT"])
def test_a_fused_run_resumes_with_the_same_bits(
    fused_run, fused_whole, signal_at, capsys, signal_name
):
    """The second checkpoint has begun by then, so the first one is complete."""
    run_file = fused_run(f"fused_{signal_name}")
    if signal_name == "SIGKILL":
        killed(run_file, program=KILL_IN_WRITE)
    else:
        signal_at(16, signal_name)
        assert command(run_file) == 130
    assert command(run_file, "--resume") == 0
    assert "resumed after round" in capsys.readouterr().err
    assert results(run_file) == fused_whole


def test_exports_from_a_checkpoint(make_run, tmp_path):
    """Running jobs are exported as they are; ended ones as the run exported them."""
    run_file = make_run("exported", checkpoint_every=1, window_steps=1)
    config = load_run(run_file)
    longer = config.jobs[1].replace(steps=40)
    config = config.replace(jobs=(config.jobs[0], longer))
    trainer = Trainer(config)

    class Enough(Exception):
        pass

    def stop(trainer):
        if trainer.jobs[0].progress.status == "finished" and trainer.jobs[1].has_slot:
            raise Enough  # a checkpoint is written before it leaves

    with pytest.raises(Enough):
        trainer.train(callbacks=[AtWindow(stop)])
    wanted = trainer.slots.read(1, trainer.jobs[1].start).modules
    run_dir = pathlib.Path(config.output_dir)
    export_checkpoint(run_dir, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job0", "job1"]
    own = run_dir / "adapters" / "job0"
    for path in own.iterdir():
        assert (tmp_path / "job0" / path.name).read_bytes() == path.read_bytes()
    got = import_peft(tmp_path / "job1", linear_shapes(trainer.model.config))
    assert got.modules.keys() == wanted.keys()
    for name, weights in wanted.items():
        assert (got.modules[name].a == weights.a).all()
        assert (got.modules[name].b == weights.b).all()


def test_refuses_what_is_not_its_own(make_run, tmp_path, compiled_when_called):
    run_file = make_run("own", checkpoint_every=2, window_steps=2)
    config = load_run(run_file)

    assert Trainer(config).train(callbacks=[InterruptAt(2)]).interrupted
    with pytest.raises(CheckpointError, match=r"already holds a run\. Resume it"):
        Trainer(config).train()

    def resume(**changes):
        Trainer(config.replace(**changes)).train(resume=True)

    job = config.jobs[0]
    for jobs, message in [
        ((config.jobs[0],), "job 'job1' is in run.json but not in this run"),
        (
            (job.replace(rank=3), config.jobs[1]),
            "job 'job0': rank is 2 in run.json and 3 now, but must not change",
        ),
    ]:
        with pytest.raises(CheckpointError, match=message):
            resume(jobs=jobs)
    other = tiny.write_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="the base model is another one"):
        resume(model=str(other))
    tiny.write_records(pathlib.Path(job.data.path), 20, seed=9)
    with pytest.raises(CheckpointError, match="job 'job0': data_fingerprint is"):
        resume()
    empty = tmp_path / "empty"
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        resume(output_dir=str(empty))


def test_resumes_on_another_day(make_run, tmp_path):
    """A chat template that prints the date; a resumed run prints the first day's."""
    config = load_run(make_run("dated", checkpoint_every=1, window_steps=1))
    model = tiny.write_model(tmp_path / "dated")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ strftime_now('%d %B %Y') }}\n" + tiny.CHATML
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    job = config.jobs[0]
    job = job.replace(data=job.data.replace(chat=True))
    config = config.replace(model=str(model), jobs=(job,))

    assert Trainer(config).train(callbacks=[InterruptAt(2)]).interrupted
    folder = pathlib.Path(config.output_dir)
    record = read_run_record(folder)
    assert record is not None
    then = dataclasses.replace(record, started="2020-02-03T04:05:06")
    write_run_record(folder, then)
    with pytest.raises(CheckpointError, match="data_fingerprint is"):
        Trainer(config).train(resume=True)  # the date is in the data
    write_run_record(folder, record)
    first_day = datetime.datetime.fromisoformat(record.started)
    chat = Trainer(config).reader.tokenizer.chat
    assert chat.render([]).startswith(first_day.strftime("%d %B %Y"))
