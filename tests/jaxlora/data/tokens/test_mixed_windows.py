"""Several streamed data sets in one job: the order of `interleave_datasets`."""

import dataclasses
import json

import pytest

from jaxlora import LoraJob
from jaxlora.data.order import interleave
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.stream import SampleStream
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError
from tests import tiny
from tests.jaxlora.data.tokens.test_stream import record, wait_for_reads, write_shards

SIZES = (7, 4, 11)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    yield DataReader(load_tokenizer(folder))
    wait_for_reads()


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> list[str]:
    """Folders of two shards each; a record names its set and its place there."""
    folder, paths = tmp_path_factory.mktemp("sets"), []
    for number, size in enumerate(SIZES):
        names = [record(f"{number}-{i}") for i in range(size)]
        shards = [names[:3], names[3:]]
        paths.append(write_shards(folder / f"set{number}", shards, ".jsonl"))
    return paths


def mixture(paths: list[str], **changes) -> LoraJob:
    buffer = changes.pop("shuffle_buffer", 8)
    each = {"streaming": True, "bad_records": "drop", "shuffle_buffer": buffer}
    data = {"datasets": [{"path": path} | each for path in paths], "mix": "interleave"}
    data |= changes.pop("data", {})
    job = {"name": "job", "steps": 30, "batch_size": 3, "max_length": 40}
    return LoraJob(data=data, **job | changes)


def names(reader: DataReader, stream: SampleStream, step: int) -> list[str]:
    """The names of the records of a global batch."""
    data, groups = stream.take(step)
    texts = [reader.tokenizer.decode(data.samples[i].token_ids) for i in groups]
    return [text.split(" ")[0] for text in texts]


@pytest.mark.parametrize(
    ("shares", "buffer"), [(None, 8), ([0.5, 0.3, 0.2], 8), ([0.9, 0.0, 0.1], 60)]
)
def test_the_order_is_that_of_the_package_datasets(reader, sets, shares, buffer):
    """Sets that end begin anew, once with several passes in a window.

    Tests of `interleave` compare it with the package.
    """
    data = {"probabilities": shares}
    job = mixture(sets, data=data, shuffle=False, seed=5, shuffle_buffer=buffer)
    stream = reader.stream(job)
    found = [name for step in range(30) for name in names(reader, stream, step)]
    many = [100 * size for size in SIZES]
    sources, indices = interleave(
        many, probabilities=shares, stopping_strategy="first_exhausted", seed=5
    )
    pairs = zip(sources[:90].tolist(), indices[:90].tolist(), strict=True)
    assert found == [f"{source}-{index % SIZES[source]}" for source, index in pairs]


def test_it_goes_on_where_it_was(reader, sets):
    """From a saved place, with shuffled windows and shards in another order."""
    job = mixture(sets, data={"probabilities": [0.6, 0.2, 0.2]}, seed=1)
    whole = reader.stream(job)
    wanted = [names(reader, whole, step) for step in range(30)]
    assert len({name for batch in wanted for name in batch}) == sum(SIZES)
    place = whole.place(17)
    assert place.step > 9 and len(place.parts) == 3
    again = DataReader(reader.tokenizer).stream(job)
    again.follow(place)
    assert [names(reader, again, step) for step in range(17, 30)] == wanted[17:]
    assert [p.step for p in again._places if 3 < p.step < place.step] == []
    moved = dataclasses.replace(place, digest="0")
    other = DataReader(reader.tokenizer).stream(job)
    other.follow(moved)
    with pytest.raises(ValueError, match="not those that the run has read before"):
        other.take(17)
    shards = {f"set{i}: part-{j}.jsonl" for i in range(3) for j in range(2)}
    assert set(whole.shards) == shards


def test_both_answers_of_a_pair_are_in_a_window(reader, tmp_path):
    """One set of pairs and one of labels, for KTO."""
    pair = {"prompt": "p ", "chosen": "good", "rejected": "bad"}
    label = {"prompt": "q ", "completion": "answer", "label": True}
    for name, one in (("pairs", pair), ("labels", label)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text((json.dumps(one) + "\n") * 5)
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("pairs", "labels")]
    job = mixture(paths, objective="kto", shuffle=False, batch_size=3)
    stream = reader.stream(job)
    for step in range(12):
        data, groups = stream.take(step)
        values = [sample.value for sample in data.samples]
        assert (len(values), values.count(0), len(groups)) == (12, 3, 3)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"mix": "concat"}, "have no end, .* Set `mix: interleave"),
        ({"stopping_strategy": "all_exhausted"}, "begins anew. Leave it out"),
        ({"datasets": ["x", {"path": "y", "streaming": True}]}, "Set `streaming: true"),
        (
            {"datasets": [{"path": "x", "streaming": True}] * 2},
            "in each item of datasets",
        ),
    ],
)
def test_what_a_mixture_of_streams_cannot_have(data, match):
    with pytest.raises(ConfigError, match=match):
        mixture(["a", "b"], data=data)
