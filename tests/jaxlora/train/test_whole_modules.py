"""Whole copies of embedding and head in a run, each job as if it were alone."""

import dataclasses
import json
import logging

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, import_peft, merge_adapter
from jaxlora.adapters.files.gguf_export import export_gguf
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.slots import SlotTable
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.structure import linear_names, linear_shapes
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.plan.memory.estimate import step_bytes
from jaxlora.plan.memory.footprint import fixed_bytes, stage_resident
from jaxlora.train.execute.step import CompiledSteps
from tests.jaxlora.train.runs import (
    ONE_STAGE,
    assert_generates_alike,
    tiny_spec,
)
from tests.jaxlora.train.test_contracts import ROUNDING, assert_same_training
from tests.oracle import relative_error

BOTH = ("embed_tokens", "lm_head")
WHOLE = (("whole_embedding", 1), ("whole_head", 1))


def copies(outcome, name: str, model) -> dict[str, np.ndarray]:
    folder = outcome.result.output_dir / "adapters" / name
    found = import_peft(folder, linear_shapes(model.config)).outside
    return {str(SLOT_MODULES[name].frozen): own.array for name, own in found.items()}


def test_jobs_train_their_own_copies_as_if_alone(train, jobs, model, tmp_path, caplog):
    """With a tied head, beside another module, rows of tokens, and one that joins."""
    assert model.config.tie_embeddings
    first = jobs[0].replace(modules_to_save=BOTH, use_dora=True)
    second = jobs[1].replace(modules_to_save=["lm_head"])
    rows = jobs[2].replace(trainable_token_indices=[97, 104])
    late = jobs[3].replace(name="late", steps=2, modules_to_save=["embed_tokens"])
    joined = []

    def join(trainer):
        if not joined:
            joined.append(trainer.add_job(late))

    settings = {"microbatch_tokens": 256, "max_concurrent_jobs": 3, "window_steps": 1}
    with caplog.at_level(logging.INFO, logger="jaxlora"):
        together = train([first, second, rows], on_window=join, **settings)
    assert "; whole copies of embed_tokens and lm_head" in caplog.text
    assert "as in PEFT: only lm_head is trained" in caplog.text
    alone = train([first, late, rows.replace(steps=1)], **settings)
    names = [first.name, late.name]
    assert_same_training(together, alone, names)
    start = np.asarray(model.params["embed_tokens.embedding"], np.float32)
    for name, modules in zip(names, (BOTH, ("embed_tokens",)), strict=True):
        found, wanted = copies(together, name, model), copies(alone, name, model)
        assert found.keys() == wanted.keys() == set(modules)
        for module, table in found.items():
            assert relative_error(table, wanted[module]) < ROUNDING
            assert relative_error(table, start) > 1e-4
    own = copies(together, first.name, model)
    assert relative_error(own["lm_head"], own["embed_tokens"]) > 1e-3
    folder = together.result.output_dir / "adapters" / first.name
    _check_slots_forget(together.trainer.layout.stages[0].spec, folder, model)
    _check_uses(folder, model, tmp_path)


def _check_slots_forget(spec, folder, model):
    """A slot that was left has the base's modules again."""
    table = SlotTable(spec, CompiledSteps(spec).write_slot)
    table.load(1, import_peft(folder, linear_shapes(model.config)), "adamw")
    trained = "whole_embedding.is_trained", "whole_head.is_trained"
    for key in trained:
        np.testing.assert_array_equal(table.settings[key], [[False, True, False]])
    _, of_base = table.of_reference
    table.clear(1)
    for key in trained:
        assert not np.asarray(of_base[key]).any()
        assert not np.asarray(table.settings[key]).any()


def _check_uses(folder, model, tmp_path):
    """Generation, the merged model, more training, and what GGUF cannot hold."""
    merged = assert_generates_alike(model, folder, tmp_path / "merged")
    assert not merged.config.tie_embeddings
    with pytest.raises(AdapterError, match="has use_dora, and llama"):
        export_gguf(folder, tmp_path / "a.gguf", base=str(model.folder))
    job = LoraJob(name="more", data={"path": "x"}, init_from=str(folder), use_dora=True)
    with pytest.raises(ConfigError, match=r'modules_to_save=\["embed_tokens", "lm_he'):
        choose_modules(job, model.config)
    start = choose_modules(job.replace(modules_to_save=BOTH), model.config).start
    assert start.modules_to_save == BOTH
    larger = dataclasses.replace(model.config, vocab_size=300)
    with pytest.raises(AdapterError, match="of embed_tokens with 288 tokens, and"):
        start.check_base(larger)
    out = export_peft(
        dataclasses.replace(start, modules=_without_dora(start)),
        tmp_path / "plain",
        base_model="base",
        linear_names=linear_names(model.config),
    )
    with pytest.raises(AdapterError, match="has modules_to_save, and llama"):
        export_gguf(out, tmp_path / "a.gguf", base=str(model.folder))
    path = out / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"modules_to_save": ["lm_head"]}))
    # The copy is then what peft trained on, as after a change of the vocabulary.
    read = import_peft(out, linear_shapes(model.config)).outside
    assert read.keys() == dict(WHOLE).keys()
    both = {"trainable_token_indices": {"lm_head": [1]}, "modules_to_save": list(BOTH)}
    path.write_text(json.dumps(config | both))
    with pytest.raises(AdapterError, match="lm_head in modules_to_save and in trainab"):
        merge_adapter(model.folder, out, tmp_path / "other")
    path.write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    del weights["base_model.model.lm_head.weight"]
    safetensors.numpy.save_file(weights, out / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="json has a whole copy of lm_head"):
        merge_adapter(model.folder, out, tmp_path / "other")


def _without_dora(adapter):
    return {
        name: dataclasses.replace(
            weights,
            tensors={"lora_a": weights.a, "lora_b": weights.b},
        )
        for name, weights in adapter.modules.items()
    }


def test_memory_counts_the_copies():
    """Weights, gradients and state of all slots, and gradients of a microbatch."""
    adapted = ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]
    spec = tiny_spec(adapted, num_slots=3)
    whole = tiny_spec(adapted, num_slots=3, outside=WHOLE)
    one = 288 * 32 * 4
    found, plain = (stage_resident(s, ONE_STAGE) for s in (whole, spec))
    assert found.adapter_bytes - plain.adapter_bytes == 4 * 2 * 3 * one
    fixed, without = (fixed_bytes(s, ONE_STAGE) for s in (whole, spec))
    assert fixed - without >= 2 * 3 * one
    first, last = whole.stage(0, 1), whole.stage(1, 2)
    assert list(first.settings_shapes())[3:] == ["whole_embedding.is_trained"]
    assert list(last.settings_shapes())[3:] == ["whole_head.is_trained"]
    kept, without = (step_bytes(s, 16, None) for s in (whole, spec))
    assert kept.kept_by_layer == pytest.approx(without.kept_by_layer, rel=1e-4)
    # The hidden states and their gradient once more, not the logits.
    assert 0 < kept.kept_at_ends - without.kept_at_ends < 5 * 32 * 4
