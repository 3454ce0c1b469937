"""Tests the command line of `jaxlora data show`."""

import json

import pytest
import yaml

from jaxlora.cli.main import main
from tests import tiny


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": "Hi", "completion": "Yes"}))
    return str(path)


@pytest.fixture
def run_file(tmp_path, path):
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG))
    jobs = [
        {"name": name, "data": {"path": path, "prompt": "q", "chat": chat}}
        for name, chat in (("plain", False), ("chat", True))
    ]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model": str(folder), "jobs": jobs}))
    return str(file)


def test_a_file(path, capsys):
    assert main(["data", "show", path, "--prompt", "q", "--chat"]) == 0
    assert "user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yes" in capsys.readouterr().out


def test_jobs_of_a_run_file(run_file, capsys):
    assert main(["data", "show", run_file]) == 0
    out = capsys.readouterr().out
    assert out.count("record 1: ") == 2 and out.count("trained on\nHi[[Yes") == 1
    prompt = "jobs.chat.data.prompt=Say {{ q }}"
    assert main(["data", "show", run_file, "--job", "chat", prompt]) == 0
    out = capsys.readouterr().out
    assert out.count("record 1: ") == 1 and "user\nSay Hi<|im_end|>" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["FILE", "--job", "x"], "--job x names a job of a run file, and"),
        (["RUN", "--job", "x"], "has no job named 'x'. Give one of: plain, chat."),
        (["RUN", "--loss-on", "all"], "--loss-on is for a file of data, and"),
        (["FILE", "--kind", "x"], "data.kind"),
        (["FILE"], "a.jsonl: records have the fields q, completion; expected"),
        (["FILE", "a=1"], "a=1 is a setting of a run file, and"),
        (["RUN", "jobs.plan.data.limit=1"], "no job 'plan'. Did you mean 'plain'?"),
        (["missing.jsonl"], "missing.jsonl: no such file or folder"),
    ],
)
def test_mistakes(path, run_file, capsys, arguments, error):
    names = {"FILE": path, "RUN": run_file}
    assert main(["data", "show", *(names.get(a, a) for a in arguments)]) == 1
    assert error in capsys.readouterr().err
