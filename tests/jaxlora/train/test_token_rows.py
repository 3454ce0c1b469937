"""Trained rows of tokens in a run, each job as if it were alone."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import (
    LoraJob,
    import_peft,
    merge_adapter,
)
from jaxlora.adapters.files.gguf_export import export_gguf
from jaxlora.adapters.files.peft_export import PREFIX
from jaxlora.adapters.slots import SlotTable
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.models.slot_modules import EMBEDDING, TOKEN_ROWS
from jaxlora.models.structure import linear_shapes
from jaxlora.train.execute.step import CompiledSteps
from tests.jaxlora.train.runs import assert_generates_alike, run_of, trained_tensors
from tests.jaxlora.train.test_contracts import ROUNDING, assert_same_training
from tests.oracle import relative_error

TOKENS = tuple(range(100, 120))
ROWS_KEY = f"{PREFIX}{TOKEN_ROWS.peft_name}"


def with_rows(job: LoraJob, tokens=TOKENS) -> LoraJob:
    return job.replace(trainable_token_indices=tokens)


def rows_of(outcome, name: str) -> np.ndarray:
    folder = outcome.result.output_dir / "adapters" / name
    path = folder / "adapter_model.safetensors"
    return safetensors.numpy.load_file(path)[ROWS_KEY]


def test_jobs_train_their_own_rows_as_if_alone(train, jobs, model, tmp_path):
    first, second = with_rows(jobs[0]), with_rows(jobs[1], TOKENS[3:])
    first = first.replace(target_modules=("q_proj", "down_proj"))
    plain = jobs[3].replace(steps=2)
    together = train([first, second, plain], microbatch_tokens=256)
    alone = train([first, plain], microbatch_tokens=256, max_concurrent_jobs=3)
    assert_same_training(together, alone, [first.name, plain.name])
    found, wanted = rows_of(together, first.name), rows_of(alone, first.name)
    assert relative_error(found, wanted) < ROUNDING
    start = np.asarray(model.params[EMBEDDING], np.float32)[list(TOKENS)]
    assert (np.abs(found - start).max(axis=1) > 0).all()
    assert relative_error(rows_of(together, second.name), start[3:]) > 1e-3
    spec = alone.trainer.layout.stages[0].spec
    assert spec.slots.outside == (("token_rows", len(TOKENS)),)
    with pytest.raises(ConfigError, match="has 21 trainable_token_indices of embed"):
        alone.trainer.add_job(with_rows(jobs[2], (*TOKENS, 7)))
    _check_slots_forget(spec, together, model)
    _check_uses(together.result.output_dir / "adapters" / first.name, model, tmp_path)


def _check_slots_forget(spec, outcome, model):
    """A slot that was left has no tokens, so they are those of the base again."""
    table = SlotTable(spec, CompiledSteps(spec).write_slot)
    assert (np.asarray(table.settings["token_rows.ids"]) == -1).all()
    folder = outcome.result.output_dir / "adapters" / "job0"
    table.load(1, import_peft(folder, linear_shapes(model.config)), "adamw")
    np.testing.assert_array_equal(table.settings["token_rows.ids"][0, 1], TOKENS)
    table.clear(1)
    assert (np.asarray(table.settings["token_rows.ids"]) == -1).all()


def _check_uses(folder, model, tmp_path):
    """Generation, the merged model, and what GGUF cannot hold."""
    assert_generates_alike(model, folder, tmp_path / "merged")
    with pytest.raises(AdapterError, match="has trainable_token_indices, and llama"):
        export_gguf(folder, tmp_path / "a.gguf", base=str(model.folder))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for tokens, match in (
        (
            [*TOKENS[1:], 288],
            "row of token 288 in embed_tokens, and the base mo",
        ),
        ([5], r"call for .* of shape \[1, 32\], and it has \[20, 32\]"),
        (["a"], "wanted a list of tokens"),
        (
            {"embed_tokens": TOKENS, "lm_head": [1]},
            r"of lm_head and the .* it lacks it",
        ),
    ):
        path.write_text(json.dumps(config | {"trainable_token_indices": tokens}))
        with pytest.raises(AdapterError, match=match):
            merge_adapter(model.folder, folder, tmp_path / "other")


@pytest.mark.grid
@pytest.mark.needs_devices(4)
def test_a_tied_head_on_replicas_and_shards(two_layers, jobs, tmp_path):
    found = {}
    for mesh in ("stage=1", "data=2,fsdp=2"):
        config = run_of(
            two_layers,
            tmp_path / mesh,
            [with_rows(jobs[0]), with_rows(jobs[1], TOKENS[5:])],
            microbatch_tokens=256,
            block_tokens=16,
            dtype="float32",
            mesh=mesh,
        )
        found[mesh] = trained_tensors(config)
    for name, tensors in found["stage=1"].items():
        assert ROWS_KEY in tensors
        for key, array in tensors.items():
            assert relative_error(found["data=2,fsdp=2"][name][key], array) < ROUNDING
