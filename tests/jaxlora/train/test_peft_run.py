"""Jobs trained together end where transformers and peft took each alone.

The golden files are those of tests/golden/make_peft_run.py.
"""

import json
import pathlib

import numpy as np
import pytest

from jaxlora import LoraJob, import_peft, load_model
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.train.job_state import JobState
from tests.golden_base import resized, tied
from tests.jaxlora.train import golden_runs
from tests.jaxlora.train.runs import data_of
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "peft_run"
RECORDS = {n: json.loads((GOLDEN / n / "run.json").read_text()) for n in "abcdefghijk"}


def job_run(name: str, model) -> JobState:
    """The golden job: its samples in its order, from its first weights."""
    record = RECORDS[name]
    samples = tuple(
        TokenizedSample(
            token_ids=np.array(sample["token_ids"], np.int32),
            is_target=np.array(sample["is_target"], bool),
        )
        for batch in record["batches"]
        for sample in batch
    )
    job = LoraJob(
        name=name,
        data={"path": "golden"},
        batch_size=6,
        shuffle=False,
        **record["settings"],
    )
    shapes = linear_shapes(model.config)
    targets = choose_modules(job, model.config).modules
    if job.keeps_start or job.use_vera:
        kernels = {n: model.params[f"{linear_path(n)}.kernel"] for n in targets}
        start = fresh_adapter(job, targets, kernels)
    else:
        start = import_peft(GOLDEN / name / "initial", shapes)
    assert {n: (m.rank, m.lora_alpha) for n, m in targets.items()} == {
        n: (w.rank, w.lora_alpha) for n, w in start.modules.items()
    }
    prepared = PreparedJob(
        settings=job,
        modules=targets,
        start=start,
        train_data=data_of(samples, 40),
        eval_data=None,
    )
    return JobState(prepared, start)


def test_vera_starts_as_in_peft():
    """With the same bits of the matrices and vectors."""
    model = load_model(GOLDEN / "base", dtype="float32")
    found = job_run("f", model).start
    wanted = import_peft(GOLDEN / "f" / "initial", linear_shapes(model.config))
    assert wanted.vera is not None and wanted.vera.is_saved
    np.testing.assert_array_equal(found.vera.a, wanted.vera.a)
    np.testing.assert_array_equal(found.vera.b, wanted.vera.b)
    for name, weights in wanted.modules.items():
        for tensor, array in weights.tensors.items():
            np.testing.assert_array_equal(found.modules[name].tensors[tensor], array)


# The job c has DoRA; d starts by PiSSA, and e by OLoRA; f has VeRA; g trains rows of a
# tied head, and h those of another head; i trains whole copies of embedding and head,
# and j of the embedding of a tied head; k trains the rows of tokens that were added.
RUNS = [
    *(("a",), ("b",), ("b", "a"), ("g", "j"), ("h", "f", "c", "d", "e", "i"), ("k",)),
    *(pytest.param(n, marks=pytest.mark.grid) for n in (("c", "b"), ("d", "e"))),
]


@pytest.fixture(scope="module", params=RUNS, ids="".join)
def trained(request, tmp_path_factory):
    base = GOLDEN / "base"
    if {"g", "j", "k"}.intersection(request.param):
        base = tied(base, tmp_path_factory.mktemp("tied"))
    if "k" in request.param:
        base = resized(base, tmp_path_factory.mktemp("resized"), 2)
    return train_together(request.param, base)


def train_together(names, base=GOLDEN / "base"):
    """Trains jobs: (model, runs, slot table, outcomes of each step)."""
    model = load_model(base, dtype="float32")
    runs = [job_run(name, model) for name in names]
    slots, outcomes = golden_runs.train_together(
        model,
        runs,
        # Less than a global batch: gradients accumulate over microbatches.
        capacity=64,
        # One shape for a and b alone and together, which is compiled once.
        max_concurrent_jobs=max(2, len(runs)),
        slot_rank=8,
        slot_targets="all-linear" if {"a", "b"}.intersection(names) else None,
    )
    return model, runs, slots, outcomes


def test_losses_norms_and_rates(trained):
    for name, outcomes in trained[3].items():
        record = RECORDS[name]
        for ours, theirs in (
            ("loss", "losses"),
            ("grad_norm", "grad_norms"),
            ("learning_rate", "learning_rates"),
        ):
            actual = [getattr(outcome, ours) for outcome in outcomes]
            assert actual == pytest.approx(record[theirs], rel=1e-4, abs=1e-9), theirs


def assert_same_weights(found: np.ndarray, wanted: np.ndarray, where: str) -> None:
    """Compares tensors after 12 steps, whose float32 sums have another order here.

    Adam divides each gradient by its own size, so single elements whose gradients are
    near zero differ more than the tensor, and by another amount on each processor.
    """
    if found.any() or wanted.any():
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, where
    assert relative_error(found, wanted) < 1e-3, where


def test_final_weights(trained):
    model, runs, slots, _ = trained
    for run in runs:
        folder = GOLDEN / run.name / "final"
        wanted = import_peft(folder, linear_shapes(model.config))
        actual = slots.read(run.slot, run.start)
        assert actual.modules.keys() == wanted.modules.keys()
        assert actual.outside.keys() == wanted.outside.keys()
        modules = {"g": 1, "h": 2, "i": 2, "j": 1, "k": 1}
        assert len(actual.outside) == modules.get(run.name, 0)
        for module, own in actual.outside.items():
            others = wanted.outside[module]
            assert own.tokens == others.tokens
            assert_same_weights(own.array, others.array, module)
            first = run.start.outside[module].array
            has_moved = np.abs(own.array - first).max(axis=1) > 1e-3
            assert has_moved.all() or module == "whole_embedding"
        for name, weights in actual.modules.items():
            others = wanted.modules[name]
            assert weights.tensors.keys() == others.tensors.keys()
            if run.settings.keeps_start:
                # The signs of singular vectors are arbitrary; their products are not.
                assert (weights.rank, actual.scaling(weights)) == (
                    others.rank,
                    pytest.approx(wanted.scaling(others)),
                )
                product = weights.a @ weights.b
                assert relative_error(product, others.a @ others.b) < 1e-3
                half = weights.rank // 2
                first = run.start.modules[name]
                np.testing.assert_array_equal(weights.a[:, half:], first.a[:, half:])
                np.testing.assert_array_equal(weights.b[half:], first.b[half:])
                continue
            for tensor, array in weights.tensors.items():
                assert_same_weights(array, others.tensors[tensor], f"{name} {tensor}")
