import csv
import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxlora.config import DataConfig
from jaxlora.data.read import read_records
from jaxlora.errors import DataError

RECORDS = [
    {"prompt": "a\u2028b", "completion": "0"},
    {"prompt": 'é "q", x\ny', "completion": "1"},
    {"prompt": "🙂", "completion": ""},
]


def read(path, **options):
    return read_records(DataConfig(path=str(path), **options))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(params=[".jsonl", ".json", ".parquet", ".csv"])
def file(request, tmp_path):
    path = tmp_path / f"data{request.param}"
    if request.param == ".jsonl":
        lines = [json.dumps(r, ensure_ascii=False) for r in RECORDS]
        write(path, "\ufeff" + "\r\n".join(lines) + "\n\n")
    elif request.param == ".json":
        write(path, json.dumps(RECORDS))
    elif request.param == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    else:
        with path.open("w", encoding="utf-8-sig", newline="") as out:
            writer = csv.DictWriter(out, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(RECORDS)
    return path


def test_every_format_gives_the_same_records(file):
    assert read(file) == RECORDS


def test_limit(file):
    assert read(file, limit=2) == RECORDS[:2]
    assert read(file, limit=9) == RECORDS


def test_limit_stops_before_a_bad_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{')
    assert read(path, limit=1) == [{"a": 1}]


def test_csv_rows_may_be_long(tmp_path):
    path = write(tmp_path / "a.csv", "text,n\n" + "x" * 3_000_000 + ",007\n")
    (record,) = read(path)
    assert len(record["text"]) == 3_000_000 and record["n"] == "007"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": }\n', r"a\.jsonl, line 3: is not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]', "line 2: holds a list, not an object"),
        ("a.jsonl", "null", "line 1: holds null, not an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2: byte 0xff is not UTF-8"),
        ("a.jsonl", "[" * 200_000, "line 1: is not valid JSON"),
        ("a.jsonl", "\n", "holds no records"),
        ("a.json", "[]", "holds no records"),
        ("a.json", '{"a": 1}\n{"a": 2}', r"not valid JSON.*rename it to \.jsonl"),
        ("a.json", '{"data": []}', "holds an object, not a list of objects"),
        ("a.json", '[{"a": 1}, 2]', "record 2 is a number, not an object"),
        ("a.json", b"\xff", "byte 0xff is not UTF-8"),
        ("a.parquet", "PAR1", "cannot be read as Parquet"),
        ("a.csv", "", "holds no records"),
        ("a.csv", "a,b\n", "holds no records"),
        ("a.csv", "a,b\n1\n", "cannot be read as CSV"),
        ("a.csv", b"a,b\n1,\xff\n", "cannot be read as CSV.*UTF-8"),
        ("a.csv", b"\xff,b\n1,2\n", "cannot be read as CSV.*UTF-8"),
        ("a.csv", "a,a\n1,2\n", "two columns are named 'a'"),
        ("a.txt", "x", r"unknown suffix '\.txt'\. Convert the file to one of: \.jsonl"),
    ],
)
def test_bad_files(tmp_path, name, content, match):
    with pytest.raises(DataError, match=match):
        read(write(tmp_path / name, content))


@pytest.mark.parametrize("path", ["no.jsonl", "./no", "/no/such", "a/b/c", "~/no"])
def test_missing_file(path):
    with pytest.raises(DataError, match=rf"{path}: no such file or folder"):
        read(path)


@pytest.mark.parametrize("key", ["split", "subset"])
def test_files_have_no_split(file, key):
    with pytest.raises(DataError, match=f"{key}='x' is for Hugging Face datasets"):
        read(file, **{key: "x"})


@pytest.fixture
def saved(tmp_path):
    dataset = datasets.Dataset.from_list(RECORDS).with_format("numpy")
    dataset.save_to_disk(str(tmp_path / "one"))
    splits = {"train": dataset, "test": dataset.select([2])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    datasets.DatasetDict(train=dataset).save_to_disk(str(tmp_path / "single"))
    return tmp_path


def test_saved_datasets(saved):
    assert read(saved / "one") == RECORDS
    assert read(saved / "one", limit=2) == RECORDS[:2]
    assert read(saved / "two", split="test") == RECORDS[2:]
    assert read(saved / "single") == RECORDS


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("two", {}, r"no split is given\. Set data\.split to one of: train, test"),
        ("two", {"split": "dev"}, r"no split 'dev'\. .* one of: train, test"),
        ("one", {"split": "dev"}, "single dataset without splits"),
        ("one", {"subset": "x"}, "subset='x' is for datasets on the hub"),
        (".", {}, "folder without state.json or dataset_dict.json"),
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
    assert read("owner/name", subset="en", split="train", limit=1) == RECORDS[:1]
    assert calls == [(("owner/name", "en"), {"split": "train"})]
    with pytest.raises(
        DataError, match=r"owner/name: no split is given\. .* train, te"
    ):
        read("owner/name")


def test_hub_errors(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("cannot reach it")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    match = r"is no file or folder here.*split='x'; ConnectionError: cannot reach it"
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
