"""The comparison of training with the fused kernels and without."""

import json

from scripts import convergence, demo


def test_the_run_is_the_demos_with_more_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "has_gpu", lambda: True)
    data = {name: ("train", "val") for name in (*demo.ASPECTS, "code")}
    run = demo.run_file(tmp_path / "model", data, "")
    longer = convergence.lengthened(run, 200)
    assert longer["defaults"]["steps"] == 200
    for job, old in zip(longer["jobs"], run["jobs"], strict=True):
        gone = {"eval_data", "epochs"}
        assert job == {key: value for key, value in old.items() if key not in gone}
    assert not {"epochs", "eval_every", "keep_best"} & longer["defaults"].keys()


def test_losses_are_read_and_compared(tmp_path, monkeypatch):
    def run(command, check):
        way = "fused" if "fused" in command[-1] else "plain"
        folder = tmp_path / way
        folder.mkdir()
        more = 0.5 if way == "fused" else 0.0
        steps = [
            {"event": "step", "job": "a", "step": i, "loss": 10 - i + more * (i == 3)}
            for i in range(1, 21)
        ]
        lines = map(json.dumps, [{"event": "window", "round": 1}, *steps])
        (folder / "metrics.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(convergence.subprocess, "run", run)
    losses = {way: convergence.train({}, way, tmp_path) for way in convergence.WAYS}
    assert losses["plain"]["a"][3] == 7 and losses["fused"]["a"][3] == 7.5
    text = convergence.differences(losses)
    assert "20 steps, losses apart 0.0250 in the mean, 0.5000 at most" in text
    assert "mean of the last 2: -9.5000 fused, -9.5000 plain" in text
    convergence.plot(losses, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()
