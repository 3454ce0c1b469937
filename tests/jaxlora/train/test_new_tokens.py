"""Tokens that are added to a base, and whose rows jobs train."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, RunConfig, import_peft, load_model
from jaxlora.adapters.files.peft_export import PREFIX
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import ConfigError
from jaxlora.hf.convert import convert
from jaxlora.models.slot_modules import EMBEDDING, HEAD_ROWS, TOKEN_ROWS
from jaxlora.models.structure import linear_shapes
from tests import tiny
from tests.jaxlora.train.runs import assert_generates_alike, trained_tensors

NEW = ("<tool>", "</tool>")
V = 259  # tokens of the tokenizer, so that there are no spare rows


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory):
    """A base without spare rows, and the same one with the tokens."""
    folder = tmp_path_factory.mktemp("new")
    config = tiny.CONFIG | {"vocab_size": V, "tie_word_embeddings": request.param}
    tiny.write_model(folder / "old", config=config)
    if not request.param:
        path = folder / "old" / "model.safetensors"
        weights = safetensors.numpy.load_file(path)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
        safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder / "old", convert(folder / "old", folder / "base", new_tokens=NEW)


def jobs(folder, num_steps: int) -> list[LoraJob]:
    """A job that trains the tokens, and one that does not."""
    records = (
        {"prompt": f"sum {i} {i}", "completion": f"<tool>{i}+{i}</tool> {2 * i}"}
        for i in range(20)
    )
    path = tiny.write_jsonl(folder / "records.jsonl", records)
    common = {"rank": 2, "batch_size": 4, "learning_rate": 1e-2, "steps": num_steps}
    common |= {"data": {"path": path}, "target_modules": ["q_proj"]}
    return [
        LoraJob(name="tool", new_special_tokens=NEW, **common),
        LoraJob(name="plain", seed=1, **common),
    ]


def train(base, out, jobs, *, is_interrupted: bool = False):
    config = RunConfig(
        model=str(base),
        output_dir=str(out),
        jobs=jobs,
        microbatch_tokens=256,
        block_tokens=16,
        window_steps=1,
        dtype="float32",
        report_to="none",
    )
    trained_tensors(config, stop=is_interrupted)
    return out / "adapters"


def test_rows_are_the_mean_of_the_others(base):
    old, new = base
    one, other = (load_model(folder, dtype="float32") for folder in base)
    assert (one.config.vocab_size, other.config.vocab_size) == (V, V + 2)
    tokenizer = load_tokenizer(new)
    assert tokenizer.encode("a<tool>b</tool>") == [
        *load_tokenizer(old).encode("a"),
        V,
        *load_tokenizer(old).encode("b"),
        V + 1,
    ]
    assert tokenizer.decode([V, V + 1], skip_special_tokens=True) == ""
    table, wider = (np.asarray(model.params[EMBEDDING]) for model in (one, other))
    np.testing.assert_array_equal(wider[:V], table)
    np.testing.assert_allclose(wider[V:], np.tile(table.mean(axis=0), (2, 1)), 1e-5)
    for tokens, match in (
        (("<x>", "<x>"), "'<x>' is given twice"),
        (("",), "'' is empty"),
        (("<|im_end|>",), r"has '<\|im_end\|>', as 2"),
    ):
        with pytest.raises(ConfigError, match=match):
            convert(old, new.parent / "other", new_tokens=tokens)


def test_spare_rows_are_used(tmp_path):
    tiny.write_model(tmp_path / "old")
    out = convert(tmp_path / "old", tmp_path / "new", new_tokens=NEW)
    one, other = (
        load_model(folder, dtype="float32") for folder in (out.parent / "old", out)
    )
    assert one.config == other.config
    np.testing.assert_array_equal(one.params[EMBEDDING], other.params[EMBEDDING])


def test_new_tokens_are_trained_exported_and_merged(base, tmp_path):
    old, new = base
    model = load_model(new, dtype="float32")
    is_tied = model.config.tie_embeddings
    with pytest.raises(ConfigError, match=r"convert MODEL OUT --new-tokens '<tool>'"):
        train(old, tmp_path / "refused", jobs(tmp_path, 8))
    folder = train(new, tmp_path / "run", jobs(tmp_path, 8)) / "tool"
    adapter = import_peft(folder, linear_shapes(model.config))
    names = [TOKEN_ROWS.name] if is_tied else [TOKEN_ROWS.name, HEAD_ROWS.name]
    assert adapter.tokens == dict.fromkeys(names, (V, V + 1))
    config = json.loads((folder / "adapter_config.json").read_text())
    wanted = [V, V + 1]
    if not is_tied:
        wanted = {"embed_tokens": wanted, "lm_head": wanted}
    assert config["trainable_token_indices"] == wanted
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    rows = tensors[f"{PREFIX}{TOKEN_ROWS.peft_name}"]
    start = np.asarray(model.params[EMBEDDING])[V:]
    assert rows.shape == start.shape and (rows != start).any(axis=1).all()
    assert load_tokenizer(folder).token_id("</tool>") == V + 1
    merged = assert_generates_alike(model, folder, tmp_path / "merged")
    assert load_tokenizer(merged.folder).token_id("<tool>") == V
    np.testing.assert_array_equal(np.asarray(merged.params[EMBEDDING])[V:], rows)
    plain = import_peft(folder.parent / "plain", linear_shapes(model.config))
    assert not plain.outside
    again = train(new, tmp_path / "again", jobs(tmp_path, 8), is_interrupted=True)
    file = "tool/adapter_model.safetensors"
    assert (again / file).read_bytes() == (folder.parent / file).read_bytes()
    more = jobs(tmp_path, 1)[0].replace(init_from=str(folder))
    assert (train(new, tmp_path / "more", [more]) / file).exists()
