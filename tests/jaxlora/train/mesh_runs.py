"""Runs on meshes of simulated devices; tests share them, as compiling takes long."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.hf.load import load_model
from tests import tiny
from tests.jaxlora.train.runs import Outcome, outcome
from tests.oracle import relative_error

CONFIG = tiny.CONFIG | {"num_hidden_layers": 2}
# All runs on one mesh have the same shapes, so they share one set of programs. With
# slots on every linear, these would take twice as long to compile.
SHAPE = {
    "microbatch_tokens": 128,
    "block_tokens": 16,
    "max_concurrent_jobs": 4,
    "slot_rank": 8,
    "slot_targets": r".*down_proj|.*\.0\..*q_proj|.*\.1\..*v_proj",
    "slot_dropout": True,
    "window_steps": 2,
    "checkpoint_every": None,
    "dtype": "float32",
}
# Meshes add the same float32 numbers in another order. Losses and norms are sums of
# hundreds of numbers, each with a relative rounding error of 6e-8. Adam divides each
# gradient by its own magnitude, so it magnifies the error of gradients near zero.
SUM_ROUNDING = 2e-6
ADAM_ROUNDING = 5e-5


def write_untied(folder: pathlib.Path, config: dict) -> pathlib.Path:
    """Writes a model with a head of its own, equal to its embedding."""
    tiny.write_model(folder, config=config | {"tie_word_embeddings": False})
    path = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder


class MeshRuns:
    """Trains jobs on meshes; every run has its own folder.

    Attributes:
        tied: Folder of a model of two layers.
        untied: Folder of the same model with a head of its own, equal to its embedding.
        three_layers: Folder of a model with three layers and a head of its own.
    """

    def __init__(self, folder: pathlib.Path):
        """Writes the models into a folder, where the runs will be too."""
        self.tied = tiny.write_model(folder / "tied", config=CONFIG)
        self.untied = write_untied(folder / "untied", CONFIG)
        three = CONFIG | {"num_hidden_layers": 3}
        self.three_layers = write_untied(folder / "three", three)
        self.model = load_model(self.tied, dtype="float32")
        self._folder, self._count = folder, iter(range(1000))
        self._done: dict[str, Outcome] = {}

    def config(self, mesh: str, jobs: Sequence[LoraJob], **settings: Any) -> RunConfig:
        """Returns the settings of a run in a new folder."""
        own = {
            "model": str(self.tied),
            "output_dir": str(self._folder / f"run{next(self._count)}"),
        }
        return RunConfig(mesh=mesh, jobs=tuple(jobs), **SHAPE | own | settings)

    def train(
        self,
        mesh: str,
        jobs: Sequence[LoraJob],
        *,
        on_window: Callable[[Trainer], None] | None = None,
        **settings: Any,
    ) -> Outcome:
        """Trains jobs on a mesh, whose devices read the weights from the disk."""
        return outcome(self.config(mesh, jobs, **settings), on_window=on_window)

    def once(self, mesh: str, jobs: Sequence[LoraJob], **settings: Any) -> Outcome:
        """Like `train`, but the same run is trained only once in a session."""
        key = repr((mesh, tuple(jobs), sorted(settings.items())))
        if key not in self._done:
            self._done[key] = self.train(mesh, jobs, **settings)
        return self._done[key]


def assert_same_on_meshes(one: Outcome, other: Outcome) -> None:
    """Checks that two runs differ by no more than the order of sums explains."""
    assert one.progress.keys() == other.progress.keys()
    for name, progress in one.progress.items():
        ends = progress.status, progress.step
        assert ends == (other.progress[name].status, other.progress[name].step), name
        for kind in ("losses", "norms", "evals"):
            ours, theirs = getattr(one, kind)[name], getattr(other, kind)[name]
            assert ours == pytest.approx(theirs, rel=SUM_ROUNDING), (name, kind)
    assert one.adapters.keys() == other.adapters.keys()
    for name, modules in one.adapters.items():
        assert modules.keys() == other.adapters[name].keys()
        for module, weights in modules.items():
            theirs = other.adapters[name][module].tensors
            assert weights.tensors.keys() == theirs.keys(), (name, module)
            for kind, array in weights.tensors.items():
                error = relative_error(array, theirs[kind])
                assert error < ADAM_ROUNDING, (name, module, kind)
            if "lora_b" in theirs:
                assert weights.b.any(), f"{name} did not learn in {module}"


def assert_empty_slot(trainer: Trainer, slot: int) -> None:
    """Checks that a slot of a trainer is empty on every stage."""
    for table in trainer.slots.tables:
        for kind, tables in table.kept.items():
            for path, array in tables.items():
                assert not np.asarray(array[slot]).any(), (kind, path)
        for path, gradients in table.state.pending.gradients.items():
            assert not np.asarray(gradients).any(), path
        assert np.asarray(table.state.pending.is_finite).all()
        assert not np.asarray(table.settings["scaling"])[:, slot].any()
