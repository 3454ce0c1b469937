"""Records of the datasets library: saved in a folder, or on the hub."""

import os
import struct
import sys
import types

import datasets
import huggingface_hub
import pyarrow as pa
import pytest

from jaxlora.config import DataConfig
from jaxlora.data.records.read import open_records
from jaxlora.errors import DataError
from tests.jaxlora.data.records.test_read import RECORDS, WRITERS, read


@pytest.fixture
def saved(tmp_path):
    dataset = datasets.Dataset.from_list(RECORDS).with_format("numpy")
    dataset.save_to_disk(str(tmp_path / "one"))
    splits = {"train": dataset, "test": dataset.select([2])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    datasets.DatasetDict(train=dataset).save_to_disk(str(tmp_path / "single"))
    return tmp_path


def test_a_pipe_is_not_waited_for(saved):
    (file,) = (saved / "one").glob("*.arrow")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match=r"\.arrow: is neither a file nor a folder"):
        read(saved / "one")


def test_saved_datasets(saved):
    assert read(saved / "one") == RECORDS
    assert read(saved / "one", limit=2) == RECORDS[:2]
    assert read(saved / "two", split="test") == RECORDS[2:]
    assert read(saved / "single") == RECORDS


def test_the_content_of_a_saved_dataset_has_a_hash(tmp_path):
    tables = {
        "a": pa.table({"text": pa.array(["x", "y"]).dictionary_encode()}),
        "b": pa.table({"text": pa.array(["x", "z"]).dictionary_encode()}),
        "c": pa.table({"other": pa.array(["x", "y"]).dictionary_encode()}),
    }
    hashes = set()
    for name, table in tables.items():
        for copy in range(2):
            path = str(tmp_path / f"{name}{copy}")
            datasets.Dataset(table).save_to_disk(path)
            hashes.add(open_records(DataConfig(path=path)).content_hash())
    assert len(hashes) == len(tables)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("two", {}, r"no split is given\. Set data\.split to one of: train, test"),
        ("two", {"split": "dev"}, r"no split 'dev'\. .* one of: train, test"),
        ("one", {"split": "dev"}, "single dataset without splits"),
        ("one", {"subset": "x"}, "subset='x' is for datasets on the hub"),
        ("two", {"revision": "v1"}, "revision='v1' is for datasets on the hub"),
        (".", {}, "is no folder .* has written, and .*/one is one. Name that"),
    ],
)
def test_bad_saved_datasets(saved, name, options, match):
    with pytest.raises(DataError, match=match):
        read(saved / name, **options)


def test_damaged_saved_dataset(saved):
    (saved / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match="datasets cannot load this folder"):
        read(saved / "one")


def test_hub(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        dataset = datasets.Dataset.from_list(RECORDS)
        if kwargs["split"] is None:
            return datasets.DatasetDict(train=dataset, test=dataset)
        return dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/name", subset="en", split="train[:2]", limit=1) == RECORDS[:1]
    assert calls == [(("owner/name", "en"), {"split": "train[:2]"})]
    assert read("owner/name", split="train", revision="v1") == RECORDS
    assert calls[1] == (("owner/name", None), {"split": "train", "revision": "v1"})
    with pytest.raises(
        DataError, match=r"owner/name: no split is given\. .* train, te"
    ):
        read("owner/name")


def test_with_a_limit_the_hub_sends_the_first_records_only(monkeypatch):
    """They are of the commit that was current before the first was read."""
    calls, sent = [], []

    def rows():
        for row in RECORDS * 1000:
            sent.append(row)
            yield row

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        train = datasets.IterableDataset.from_generator(rows)
        return datasets.IterableDatasetDict(train=train)

    info = lambda self, repo, revision: types.SimpleNamespace(sha=f"{repo} {revision}")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert read("owner/name", revision="v1", limit=4) == (RECORDS * 2)[:4]
    options = {"split": None, "streaming": True, "revision": "owner/name v1"}
    assert calls == [(("owner/name", None), options)] and len(sent) < 500
    data = DataConfig(path="owner/name", limit=4)
    hashes = [open_records(data.replace(revision=r)).content_hash() for r in "aab"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_offline_the_first_records_come_from_the_disk(monkeypatch):
    dataset = datasets.Dataset.from_list(RECORDS)
    load = lambda *args, split: dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read("owner/name", split="train", limit=2) == RECORDS[:2]


def test_hub_errors(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("cannot reach it")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    match = (
        r"is not a local file or folder.*split='x'; ConnectionError: cannot reach it"
    )
    with pytest.raises(DataError, match=match) as error:
        read("owner/name", split="x")
    assert "Offline" not in str(error.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="Offline mode is on"):
        read("owner/name")


def test_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'jaxlora\[datasets\]'"):
        read("owner/name")


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"_data_files": 5}'])
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_damaged_files_of_a_saved_dataset(saved, name, content):
    (saved / "one" / name).write_text(content)
    try:
        assert read(saved / "one") == RECORDS
    except DataError as error:
        assert "save_to_disk" in str(error) or "Fetch or save it again" in str(error)


@pytest.mark.parametrize("name", ["one", "a.arrow", "a.feather"])
def test_offsets_that_lead_out_of_the_table(saved, name):
    """Arrow would follow them, and a signal would end Python."""
    path = saved / name
    if path.suffix:
        WRITERS[path.suffix](pa.Table.from_pylist(RECORDS), path)
    else:
        (path,) = path.glob("*.arrow")
    lengths = [len(record["prompt"].encode()) for record in RECORDS]
    offsets = struct.pack("<4i", 0, *(sum(lengths[: i + 1]) for i in range(3)))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    wrong = struct.pack("<4i", 0, 2**30, 2**30 + 9, 2**31 - 1)
    path.write_bytes(content.replace(offsets, wrong))
    with pytest.raises(DataError, match=r"column 'prompt' .* is damaged or"):
        read(saved / name)
