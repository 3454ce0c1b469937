"""Jobs with several data sets: equal to one file, and the same bits when resumed."""

import itertools
import json
import logging

import numpy as np
import pytest

from jaxlora import LoraJob, Trainer, load_run
from jaxlora.sweeps.files import print_summary
from tests import tiny
from tests.jaxlora.train.runs import TWO_SLOTS, InterruptAt, events_of
from tests.jaxlora.train.test_resume import command, results

JOB = {"rank": 4, "batch_size": 3, "learning_rate": 1e-2, "max_length": 96}
JOB |= {"target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("sets")
    return [
        tiny.write_records(folder / f"{name}.jsonl", count, seed)
        for seed, (name, count) in enumerate([("a", 11), ("b", 6)])
    ]


def test_losses_are_reported_by_set(train, paths, caplog, capsys):
    """The loss of each set is that of a job which is evaluated on it alone."""
    common = JOB | {"data": {"path": paths[0]}, "steps": 2, "eval_every": 1}
    both = LoraJob(name="both", eval_data={"datasets": paths}, **common)
    one = LoraJob(name="one", eval_data={"path": paths[1]}, **common)
    caplog.set_level(logging.INFO, logger="jaxlora")
    found = train([both, one])
    events = [e for e in events_of(found.folder)]
    evals = [e for e in events if e["event"] == "eval"]
    alone = [e["eval_loss"] for e in evals if e["job"] == "one"]
    assert all("eval_loss/a" not in e for e in evals if e["job"] == "one")
    of_both = [e for e in evals if e["job"] == "both"]
    assert len(of_both) == len(alone) == 3
    (prepared,) = (j.prepared for j in found.trainer.jobs if j.name == "both")
    parts = prepared.eval_data.mixture.parts
    weights = [parts[name].num_target_tokens for name in ("a", "b")]
    for event, loss in zip(of_both, alone, strict=True):
        by_set = [event["eval_loss/a"], event["eval_loss/b"]]
        assert by_set[1] == pytest.approx(loss, rel=1e-5)
        assert event["eval_loss"] == pytest.approx(np.average(by_set, weights=weights))
    last = found.progress["both"].last_eval_sets
    assert last == {name: of_both[-1][f"eval_loss/{name}"] for name in ("a", "b")}
    summary = json.loads((found.folder / "summary.json").read_text())
    assert summary["jobs"]["both"]["last_eval_sets"] == last
    loss, a, b = of_both[-1]["eval_loss"], last["a"], last["b"]
    words = f"loss {loss:.3f} (a {a:.3f}, b {b:.3f})"
    print_summary(found.result)
    assert f"both: last held-out {words}" in capsys.readouterr().out
    assert f"both: step 2: held-out {words}" in caplog.text


def test_interrupted_in_the_middle_of_an_epoch(tmp_path, paths):
    """Ends in the same bits; the shares must stay."""
    model = tiny.write_layers(tmp_path / "model", 1)
    data = {"datasets": paths, "mix": "interleave", "probabilities": [0.4, 0.6]}
    job = JOB | {"name": "m", "data": data, "epochs": 2}
    job |= {"eval_fraction": 0.2}
    run = {"model": str(model), "jobs": [job], "window_steps": 1, "dtype": "float32"}
    run |= TWO_SLOTS
    count = itertools.count()

    def make(**changes):
        run_file = tmp_path / f"{next(count)}.json"
        output = {"output_dir": str(tmp_path / run_file.stem)}
        run_file.write_text(json.dumps(run | output | changes))
        return run_file

    whole, stopped = make(), make()
    assert command(whole) == 0
    assert Trainer(load_run(stopped)).train(callbacks=[InterruptAt(2)]).interrupted
    other = data | {"probabilities": [0.9, 0.1]}
    folder = str(tmp_path / stopped.stem)
    changed = make(jobs=[job | {"data": other}], output_dir=folder)
    assert command(changed, "--resume") == 1
    assert command(stopped, "--resume") == 0
    assert results(stopped) == results(whole)
