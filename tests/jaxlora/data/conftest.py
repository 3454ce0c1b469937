"""Fixtures: a small byte-level tokenizer in a model folder."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.templates import template
from jaxlora.data.templates.template import TemplatePool
from jaxlora.data.templates.template_task import TemplateLimits
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.data.tokens import encode_records
from jaxlora.data.tokens.tokenize import DataReader
from tests.jaxlora.data import chat_templates

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
NOW = datetime.datetime(2024, 7, 26)


@pytest.fixture(scope="session")
def backend_json() -> str:
    """Returns the tokenizer.json of a byte-level BPE without a post-processor."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["Hello! How are you? Fine, the answer is blue.\n user assistant"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend.to_str()


@pytest.fixture
def make_folder(tmp_path, backend_json):
    """Writes a model's folder: `around` it has <s>, </s> or both put around a text."""

    def make(around: str = "$A", *, config: dict | None = None, **files: str):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        backend = tokenizers.Tokenizer.from_str(backend_json)
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(
                    single=around,
                    special_tokens=[(s, i) for i, s in enumerate(SPECIAL)],
                ),
            ]
        )
        backend.save(str(folder / "tokenizer.json"))
        if config is None:
            config = {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>", "special": True},
                "pad_token": "<pad>",
                "chat_template": chat_templates.SMOLLM2,
            }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(content)
        return folder

    return make


@pytest.fixture
def make_tokenizer(make_folder):
    """Loads a tokenizer with the given chat template."""

    def make(template: str = chat_templates.SMOLLM2, around: str = "$A") -> Tokenizer:
        return load_tokenizer(
            make_folder(around, chat_template__jinja=template), now=NOW
        )

    return make


@pytest.fixture
def tight_limits(monkeypatch):
    """Limits templates to little time and memory; returns the process."""
    limits = TemplateLimits(seconds=0.3, bytes=2**28, characters=10**6)
    pool = TemplatePool(limits=limits)
    for module in (template, encode_records):
        monkeypatch.setattr(module, "shared_pool", lambda: pool)
    return pool


@pytest.fixture
def run(tmp_path, make_tokenizer):
    """Tokenizes records: `data` has options of the data, the rest are the job's."""

    def run(records, tokenizer=None, which="train", data=None, suffix=".jsonl", **job):
        path = tmp_path / f"records{suffix}"
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps(r) + "\n" for r in records))
        else:
            pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)
        config = DataConfig(path=str(path), **(data or {}))
        reader = DataReader(tokenizer or make_tokenizer())
        return reader.read(LoraJob(name="job", data=config, **job), which)

    return run
