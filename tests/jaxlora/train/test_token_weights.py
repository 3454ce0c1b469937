"""Weights of messages in training: a weighted mean over the global batch."""

import json
import pathlib

import pytest

from jaxlora import LoraJob
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import DataError
from tests import tiny
from tests.jaxlora.train.test_contracts import ROUNDING
from tests.oracle import relative_error

JOB = {"rank": 4, "learning_rate": 1e-2, "max_length": 96, "shuffle": False}
JOB |= {"target_modules": ["q_proj"], "steps": 3, "adam_eps": 1e-4}


def write(path: pathlib.Path, weights: list[float], times: list[int]) -> dict:
    """Writes chats, each so many times in a row."""
    words = ["red", "a blue sky", "green", "the answer"]
    with path.open("w") as file:
        for word, weight, num in zip(words, weights, times, strict=True):
            answer = {"role": "assistant", "content": word.upper(), "weight": weight}
            chat = [{"role": "user", "content": word}, answer]
            file.write((json.dumps({"messages": chat}) + "\n") * num)
    return {"path": str(path)}


def test_a_weight_is_that_many_samples(train, tmp_path):
    """Weights 3 and 2 are three and two times the record; also when evaluated."""
    one = write(tmp_path / "weights.jsonl", [3, 1, 2, 1], [1, 1, 1, 1])
    other = write(tmp_path / "times.jsonl", [1, 1, 1, 1], [3, 1, 2, 1])
    plain = tiny.write_records(tmp_path / "plain.jsonl", 12, seed=3)
    beside = LoraJob(name="beside", data={"path": plain}, batch_size=4, **JOB)
    found = []
    for data, size in ((one, 4), (other, 7)):
        job = LoraJob(name="w", data=data, eval_data=data, batch_size=size, **JOB)
        found.append(train([job, beside]))
    ours, wanted = found
    assert ours.losses["w"] == pytest.approx(wanted.losses["w"], rel=1e-5)
    assert ours.evals["w"] == pytest.approx(wanted.evals["w"], rel=1e-5)
    for module, weights in wanted.adapters["w"].items():
        mine = ours.adapters["w"][module]
        assert relative_error(mine.a, weights.a) < ROUNDING
        assert relative_error(mine.b, weights.b) < ROUNDING
    assert ours.losses["beside"] == pytest.approx(wanted.losses["beside"], rel=1e-5)


def test_equal_weights_are_none(train, tmp_path):
    """To the bit, as they are a power of two."""
    both = []
    for weight in (1, 0.25):
        data = write(tmp_path / f"{weight}.jsonl", [weight] * 4, [1] * 4)
        both.append(train([LoraJob(name="w", data=data, batch_size=3, **JOB)]))
    ours, wanted = both
    assert ours.bytes == wanted.bytes
    assert ours.losses["w"] == pytest.approx(wanted.losses["w"], rel=1e-6)


def read(model, path: pathlib.Path, records: list[dict], **data):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    job = LoraJob(name="w", data={"path": str(path), "weight": "w"} | data, **JOB)
    return DataReader(load_tokenizer(model.folder), None).read(job, "train").samples


def test_weights_of_records(model, tmp_path):
    """They multiply those of messages, and equal the same weight of each message."""
    pair = {"prompt": "a", "completion": " b"}
    weights = [0.5, 1, 3]
    records = [pair | {"w": weight} for weight in weights]
    for sample, weight in zip(
        read(model, tmp_path / "a.jsonl", records), weights, strict=True
    ):
        assert sample.sum_of_weights == weight * sample.is_target.sum()
    talk = [{"role": "user", "content": "a"}]
    talk += [{"role": "assistant", "content": "b", "weight": 0.25}]
    (one,) = read(model, tmp_path / "b.jsonl", [{"messages": talk, "w": 2}])
    assert one.sum_of_weights == 0.5 * one.is_target.sum()
    for bad in (0, -1, True, "1", None):
        with pytest.raises(DataError, match="Write a number above 0"):
            read(model, tmp_path / "c.jsonl", [pair | {"w": bad}])
    with pytest.raises(DataError, match="field 'w' is missing"):
        read(model, tmp_path / "c.jsonl", [pair])
    unpaired = {"kind": "preference"}
    with pytest.raises(DataError, match="weighs the losses of tokens"):
        records = [{"prompt": "a", "chosen": "b", "rejected": "c", "w": 1}]
        job = LoraJob(
            name="w",
            data={"path": str(tmp_path / "d.jsonl"), "weight": "w"} | unpaired,
            objective="dpo",
            **JOB,
        )
        (tmp_path / "d.jsonl").write_text(json.dumps(records[0]))
        DataReader(load_tokenizer(model.folder), None).read(job, "train")
