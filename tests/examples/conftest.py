"""Folders that look like a clone to the examples, with the tiny model in them."""

import logging
import pathlib
import runpy
import shutil
import warnings

import pytest

from jaxlora.train.report import summary

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def written_model(tmp_path_factory) -> pathlib.Path:
    """The folder that `tiny_model.py` writes."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(ROOT / "examples/tiny_model.py"), run_name="__main__")
    return folder / "models" / "tiny"


@pytest.fixture
def clone(written_model, tmp_path, monkeypatch):
    """Runs a test in a folder with the examples and the model.

    The model is there a second time by the name of the tutorial's model. Each example
    has run before: its run folder is not empty.
    """
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in ("tiny", "SmolLM2-135M-Instruct"):
        shutil.copytree(written_model, tmp_path / "models" / name)
    for name in ("sweep", "callbacks", "whole", "broken", "notebook"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    # Each picture takes longer than a training, and other tests look at them.
    monkeypatch.setattr(summary, "plot_losses", lambda *_: None)
    logger = logging.getLogger("jaxlora")
    before = logger.level, logger.propagate, list(logger.handlers)
    with warnings.catch_warnings():  # the command sets up both
        yield tmp_path
    logger.level, logger.propagate, logger.handlers = before
