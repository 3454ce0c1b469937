"""Several data sets of a job: their order, what is held out, and what is shared."""

import collections
import json
import pathlib
import random

import datasets
import numpy as np
import pytest

from jaxlora import DataConfig, LoraJob
from jaxlora.data.records import files
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError, DataError

STRATEGIES = "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"


@pytest.fixture
def write(tmp_path):
    """Writes so many records, which tell their number, and returns the path."""

    def write(name: str, count: int, kind: str = "text") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            for i in range(count):
                record = {"text": f"{name} {i} " + "x" * (i % 7)}
                if kind == "pairs":
                    answers = {"chosen": f"{name} {i} yes", "rejected": f"{name} {i} n"}
                    record = {"prompt": f"{i}?"} | answers
                file.write(json.dumps(record) + "\n")
        return str(path)

    return write


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer()


def texts(tokenizer, data) -> list[str]:
    return [tokenizer.decode(sample.token_ids) for sample in data.samples]


@pytest.mark.parametrize("case", range(6))
def test_samples_are_in_the_order_of_the_package_datasets(write, tokenizer, case):
    """Dropped samples are left out before data sets are mixed."""
    rng = random.Random(100 + case)
    counts = [rng.randint(2, 30) for _ in range(rng.randint(2, 3))]
    paths = [write(f"{number}.jsonl", count) for number, count in enumerate(counts)]
    shares = None
    if case % 3:
        weights = [rng.random() + 0.05 for _ in paths]
        shares = [weight / sum(weights) for weight in weights]
    data = {"datasets": paths, "mix": "interleave", "probabilities": shares}
    data["stopping_strategy"] = STRATEGIES[case % 3]
    limits = {"max_length": 12, "too_long": "drop"}
    job = LoraJob(name="job", data=data, seed=case, **limits)
    reader = DataReader(tokenizer)
    alone = [
        reader.read(LoraJob(name="one", data={"path": path}, **limits))
        for path in paths
    ]
    mixed = reader.read(job)
    wanted = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"t": texts(tokenizer, one)}) for one in alone],
        probabilities=shares,
        seed=case,
        stopping_strategy=data["stopping_strategy"],
    )
    found = texts(tokenizer, mixed)
    assert found == list(wanted["t"])
    samples = list(mixed.samples)
    assert mixed.lengths.tolist() == [len(sample.token_ids) for sample in samples]
    assert mixed.num_target_tokens == sum(int(s.is_target.sum()) for s in samples)
    assert texts(tokenizer, mixed)[2:5] == found[2:5]
    assert mixed.samples[-1].token_ids.tolist() == samples[-1].token_ids.tolist()


def test_concatenation_equals_a_joined_file(write, tokenizer, tmp_path):
    paths = [write("a.jsonl", 5), write("b.jsonl", 3)]
    joined = tmp_path / "joined.jsonl"
    joined.write_text("".join(pathlib.Path(path).read_text() for path in paths))
    reader = DataReader(tokenizer)
    mixed = reader.read(LoraJob(name="m", data={"datasets": paths}))
    whole = reader.read(LoraJob(name="w", data={"path": str(joined)}))
    assert texts(tokenizer, mixed) == texts(tokenizer, whole)
    assert mixed.num_records == whole.num_records == 8


def test_each_set_holds_out_what_it_holds_out_alone(write, tokenizer):
    paths = [write("a.jsonl", 21), write("b.jsonl", 8)]
    held_out = {"eval_fraction": 0.2, "eval_seed": 3}
    reader = DataReader(tokenizer)
    alone = [LoraJob(name="x", data={"path": path}, **held_out) for path in paths]
    job = LoraJob(
        name="m", data={"datasets": paths, "mix": "interleave"}, seed=5, **held_out
    )
    found = reader.read(job, "eval")
    assert texts(tokenizer, found) == [
        text for one in alone for text in texts(tokenizer, reader.read(one, "eval"))
    ]
    assert found.ranges == {"a": range(5), "b": range(5, 7)}
    trained = texts(tokenizer, reader.read(job))
    assert not set(trained) & set(texts(tokenizer, found))
    assert collections.Counter(text[0] for text in trained) == {"a": 6, "b": 6}


def test_pairs_stay_together(write, tokenizer):
    paths = [write("a.jsonl", 4, "pairs"), write("b.jsonl", 6, "pairs")]
    data = {"datasets": paths, "mix": "interleave", "probabilities": [0.5, 0.5]}
    job = LoraJob(name="m", data=data, objective="simpo")
    mixed = DataReader(tokenizer).read(job)
    found = [text.removesuffix("</s>") for text in texts(tokenizer, mixed)]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(one.endswith(" yes") and other == f"{one[:-3]}n" for one, other in pairs)
    assert len(mixed.group_lengths) == len(pairs)
    assert "pairs (" in mixed.summary()


def test_tokens_are_read_once_for_all_jobs(write, tokenizer, monkeypatch):
    """Alone, in mixtures and with other shares; equal mixtures are one object."""
    paths = [write("a.jsonl", 9), write("b.jsonl", 7)]
    opened = []
    read = files.READERS[".jsonl"]
    monkeypatch.setitem(
        files.READERS, ".jsonl", lambda path: opened.append(path.name) or read(path)
    )
    reader = DataReader(tokenizer)
    reader.read(LoraJob(name="a", data={"path": paths[0]}))
    mixed = {"datasets": paths, "mix": "interleave"}
    one = reader.read(LoraJob(name="b", data=mixed, seed=1))
    assert reader.read(LoraJob(name="c", data=mixed, seed=2)) is one
    drawn = mixed | {"probabilities": [0.3, 0.7]}
    first = reader.read(LoraJob(name="d", data=drawn, seed=1))
    other = reader.read(LoraJob(name="e", data=drawn, seed=2))
    assert reader.read(LoraJob(name="f", data=drawn, seed=1)) is first
    assert len({one.fingerprint, first.fingerprint, other.fingerprint}) == 3
    # The first record of each file is also read to learn its kind.
    assert collections.Counter(opened) == {"a.jsonl": 2, "b.jsonl": 2}


def test_a_mixture_is_described(write, tokenizer):
    paths = [write("x/a.jsonl", 5), write("y/a.jsonl", 3)]
    data = {"datasets": paths, "mix": "interleave", "probabilities": [0.25, 0.75]}
    data["stopping_strategy"] = "all_exhausted_without_replacement"
    found = DataReader(tokenizer).read(LoraJob(name="m", data=data))
    first, second, line = found.summaries()
    assert first.startswith(f"{paths[0]}: 5 samples, ")
    assert second.startswith(f"{paths[1]}: 3 samples, ")
    names = DataConfig(**data).set_names
    assert line.startswith(
        "interleaving (0.25, 0.75; all_exhausted_without_replacement) of 2 data sets: "
        f"8 samples (5 of {names[0]}, 3 of {names[1]}), "
    )


def test_shares_that_never_exhaust_a_set(write, tokenizer):
    paths = [write("a.jsonl", 5), write("b.jsonl", 3)]
    data = {"datasets": paths, "mix": "interleave", "probabilities": [1 - 1e-9, 1e-9]}
    data["stopping_strategy"] = "all_exhausted"
    with pytest.raises(DataError, match=r"of 5, 3 samples: about 3\.0e\+09 draws"):
        DataReader(tokenizer).read(LoraJob(name="m", data=data))


def test_names_are_short_and_different():
    def names(*sets):
        return DataConfig(datasets=sets).set_names

    assert names("data/a.jsonl", "b.parquet", "me/talk") == ("a", "b", "talk")
    split = {"path": "me/talk", "split": "train"}
    assert names(split, split | {"split": "more"}) == ("talk.train", "talk.more")
    assert names("x/a.jsonl", "y/a.jsonl") == ("x/a.jsonl", "y/a.jsonl")
    assert names("a.jsonl", "a.jsonl") == ("a-1", "a-2")


def drawn(shares: list[float]) -> dict:
    return {"datasets": ["a", "b"], "mix": "interleave", "probabilities": shares}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "path: give path: a file, a folder or a hub id. Or list several"),
        ({"path": "a", "mix": "interleave"}, "mix is for several data sets"),
        ({"datasets": ["a"], "chat": True}, "chat belongs to each item of datasets"),
        ({"datasets": ["a"], "path": "b"}, "path belongs to each item of datasets"),
        ({"datasets": [{"datasets": ["a"]}]}, "has a path, and no datasets of its own"),
        ({"datasets": ["a"], "probabilities": [1]}, "probabilities needs `mix: inter"),
        ({"datasets": ["a", {"pth": "b"}]}, "Did you mean 'path'?"),
        ({"datasets": ["a"], "mix": "zip"}, "mix: must be 'concat' or 'interleave'"),
        ({"datasets": ["a"], "weights": [1]}, "Set `mix: interleave` and"),
        (drawn([0.5]), "there are 1 probabilities and 2 datasets."),
        (drawn([0.5, 0.6]), "sum is 1.1, and must be 1. Give [0.4545"),
        (drawn([0, 0]), "their sum is 0, and must be 1. Give positive"),
        (drawn([-0.5, 1.5]), "must be greater than or equal to 0"),
        (
            drawn([0, 1]) | {"stopping_strategy": "all_exhausted"},
            "a data set of probability 0 is never read, so all_",
        ),
    ],
)
def test_settings_that_do_not_go_together(data, message):
    with pytest.raises(ConfigError) as caught:
        DataConfig(**data)
    assert message in str(caught.value)


def test_held_out_sets_are_not_mixed():
    eval_data = {"datasets": ["a", "b"], "mix": "interleave"}
    with pytest.raises(ConfigError, match="held-out data sets are evaluated whole"):
        LoraJob(name="m", data={"path": "c"}, eval_data=eval_data)


def test_settings_come_back_as_they_were():
    sets = ["a.jsonl", {"path": "b", "chat": True}]
    data = DataConfig(datasets=sets, mix="interleave", probabilities=(0.5, 0.5))
    assert DataConfig(**data.model_dump(mode="json")) == data
    np.testing.assert_array_equal([one.chat for one in data.sets], [False, True])
