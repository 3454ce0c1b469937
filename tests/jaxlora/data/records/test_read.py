import csv
import errno
import functools
import json
import os
import pathlib
import struct
import tracemalloc

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from jaxlora.config import DataConfig
from jaxlora.data.records import files
from jaxlora.data.records.read import open_records
from jaxlora.errors import ConfigError, DataError

RECORDS = [
    {"prompt": "a\u2028b", "completion": "0"},
    {"prompt": 'é "q", x\ny', "completion": "1"},
    {"prompt": "🙂", "completion": ""},
]


def write_stream(table, path):
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)


WRITERS = {
    ".parquet": pyarrow.parquet.write_table,
    ".feather": functools.partial(
        pyarrow.feather.write_feather, compression="uncompressed"
    ),
    ".arrow": write_stream,
}


def read(path, **options):
    return list(open_records(DataConfig(path=str(path), **options)))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(params=files.READERS)
def file(request, tmp_path):
    path = tmp_path / f"data{request.param}"
    if request.param == ".jsonl":
        lines = [json.dumps(r, ensure_ascii=False) for r in RECORDS]
        write(path, "\ufeff" + "\r\n".join(lines) + "\n\n")
    elif request.param == ".json":
        write(path, json.dumps(RECORDS))
    elif request.param in WRITERS:
        WRITERS[request.param](pa.Table.from_pylist(RECORDS), path)
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


def test_csv_as_other_programs_write_it(tmp_path):
    text = '\ufeff"a","b ""c"""\r1,\0\r\r"x\r\ny",""\r'
    wanted = [{"a": "1", 'b "c"': "\0"}, {"a": "x\r\ny", 'b "c"': ""}]
    assert read(write(tmp_path / "a.csv", text)) == wanted


def test_json_lists(tmp_path):
    records = [{"a": i, "b": ["é\n🙂", None, -1.5e3, {"c": [True]}]} for i in range(9)]
    for indent in (None, 2):
        text = json.dumps(records, ensure_ascii=indent == 2, indent=indent)
        assert read(write(tmp_path / "a.json", f"\ufeff {text} \n")) == records


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_file_is_never_whole_in_memory(tmp_path, suffix):
    rows = 4000
    if suffix == ".csv":
        text = "a\n" + ("x" * 3000 + "\n") * rows
    else:
        record = json.dumps({"a": "x" * 3000})
        text = "\n".join([record] * rows)
    path = write(tmp_path / f"a{suffix}", text)
    del text
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_records(DataConfig(path=str(path)))) == rows
        assert tracemalloc.get_traced_memory()[1] < 7_000_000
    finally:
        tracemalloc.stop()


def test_csv_rows_may_be_long(tmp_path):
    path = write(tmp_path / "a.csv", "text,n\n" + "x" * 3_000_000 + ",007\n")
    (record,) = read(path)
    assert len(record["text"]) == 3_000_000 and record["n"] == "007"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": }\n', r"a\.jsonl, line 3: is not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]', "line 2: holds a list, not an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2: byte 0xff is not UTF-8"),
        ("a.jsonl", "[" * 200_000, "line 1: is not valid JSON"),
        ("a.json", "[]", "holds no records"),
        ("a.json", '{"a": 1}\n{"a": 2}', r"not valid JSON.*rename it to \.jsonl"),
        ("a.json", '{"data": []}', "holds an object, not a list of objects"),
        ("a.json", '[{"a": 1}, 2]', "record 2 is a number, not an object"),
        ("a.json", b"\xff", "byte 0xff is not UTF-8"),
        ("a.parquet", "PAR1", "cannot be read as Parquet"),
        ("a.arrow", "", "cannot be read as Arrow IPC"),
        ("a.parquet", "", "cannot be read as Parquet"),
        ("a.csv", "", "holds no records"),
        ("a.json", '[{"a": ' + "9" * 5000 + "}]", "holds an integer with"),
        ("a.json", '[{"a": ' + "[" * 500 + "]" * 500 + "}]", "nested more than 10"),
        ("a.arrow", '{"a": 1}', "cannot be read as Arrow IPC"),
        ("a.feather", "ARROW1", "cannot be read as Arrow IPC"),
        ("a.csv", "a,b\n", "holds no records"),
        ("a.csv", "a,b\n1\n", "cannot be read as CSV"),
        ("a.csv", b"a,b\n1,\xff\n", "cannot be read as CSV.*UTF-8"),
        ("a.csv", "a,a\n1,2\n", "two columns are named 'a'"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1: holds an integer with more"),
        ("a.jsonl", '{"a": ' + "[" * 500 + "]" * 500 + "}", "nested more than 100 lev"),
        ("a.jsonl", '{"a": "\0"}', "line 1: is not valid JSON"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
        ("a.json", '[{"a": ' + "[" * 200_000, "is not valid JSON .nested too"),
        ("a.json", '[{"a": 1},\n{"b"', "line 2: is not valid JSON"),
        ("a.json", '[{"a": 1}', "line 1: is not valid JSON"),
        ("a.json", '[{"a": 1}]\nx', "line 2: is not valid JSON .Extra data"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3: cannot be read as CSV .*has 3 fields"),
        ("a.csv", 'a,b\n1,"2\n', "line 2: cannot be read as CSV .*end of data"),
        ("a.csv", 'a,b\n1,"2"x\n', "line 2: cannot be read as CSV"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "cannot be read as CSV.*UTF-8"),
        ("a.txt", "x", r"unknown suffix '\.txt'\. Convert the file to one of: \.jsonl"),
    ],
)
def test_bad_files(tmp_path, name, content, match):
    with pytest.raises(DataError, match=match):
        read(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content", "good", "bad"),
    [
        (
            "a.jsonl",
            b'{"a": "1"}\n{"a": \n[1]\n\n{"a": "\xff"}\n{"a": "2"}\nx',
            [{"a": "1"}, {"a": "2"}],
            {2: "not valid JSON", 3: "a list", 5: "not UTF-8", 7: "not valid JSON"},
        ),
        (
            "a.csv",
            b'a,b\n1,2\n1,2,3\n"1"2,3\n\xff,3\n"1\n2",3\n1\n"4,5',
            [{"a": "1", "b": "2"}, {"a": "1\n2", "b": "3"}],
            {3: "has 3 fields", 4: "expected", 5: "not UTF-8", 8: "1 fields", 9: "end"},
        ),
    ],
)
def test_lines_that_cannot_be_read_may_be_left_out(tmp_path, name, content, good, bad):
    path = write(tmp_path / name, content)
    found = read(path, bad_records="drop")
    assert [record for record in found if isinstance(record, dict)] == good
    said = [str(error) for error in found if not isinstance(error, dict)]
    for text, (line, why) in zip(said, bad.items(), strict=True):
        assert text.startswith(f"{path}, line {line}: ") and why in text
    with pytest.raises(DataError, match=r"drop leaves out such records\.\)$") as error:
        read(path)
    assert str(error.value).startswith(said[0])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", "x\ny\n", r"none of the lines .* The first: .*line 1: is not vali"),
        ("a.csv", 'a,b\n1,"2\n3,4\n5,"6\n', "line 4: .*row that begins in line 2"),
        ("a.csv", 'a,b\n1,"2\n3,4\n', "line 3: .*row that begins in line 2"),
        ("a.csv", b"\xff,b\n1,2\n", "line 1: .*not UTF-8"),
        ("a.json", '[{"a": 1}, {"b"', "line 1: is not valid JSON"),
        ("a.parquet", "PAR1", "cannot be read as Parquet"),
    ],
)
def test_a_ruined_file_is_an_error(tmp_path, name, content, match):
    path = write(tmp_path / name, content)
    data = DataConfig(path=str(path), bad_records="drop")
    with pytest.raises(DataError, match=match):
        list(open_records(data).readable())


@pytest.mark.parametrize(
    "path", ["no.jsonl", "./no", "/no/such", "a/b/c", "~/no", "/dev/null/a"]
)
def test_missing_file(path):
    with pytest.raises(DataError, match=rf"{path}: no such file or folder"):
        read(path)


@pytest.mark.parametrize("key", ["split", "subset", "revision"])
def test_files_have_no_split(file, key):
    for path in (file, file.parent):
        with pytest.raises(DataError, match=f"{key}='x' is for Hugging Face datasets"):
            read(path, **{key: "x"})


@pytest.fixture
def folder(tmp_path):
    """Files of numbered records, also in a folder within, and a hidden file."""
    numbers = {"b/1.jsonl": range(3, 5), "a.jsonl": range(3), "c.jsonl": range(5, 9)}
    for name, some in numbers.items():
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, "".join(json.dumps({"text": str(i)}) + "\n" for i in some))
    write(tmp_path / "set" / ".hidden", "")
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("", range(9)), ("**/*.jsonl", range(9)), ("*.jsonl", (0, 1, 2, 5, 6, 7, 8))],
)
def test_files_of_a_folder_or_a_glob_are_read_by_name(folder, name, wanted):
    found = read(f"{folder}/{name}")
    assert [int(record["text"]) for record in found] == list(wanted)
    assert read(f"{folder}/{name}", limit=4) == found[:4]


def test_the_content_of_several_files_has_a_hash(folder):
    """It counts where a file ends, as the last record of one may have no line end."""
    hashes = [open_records(DataConfig(path=str(folder))).content_hash()]
    first, last = folder / "a.jsonl", folder / "c.jsonl"
    line, _, rest = last.read_text().partition("\n")
    for one, other in ((first.read_text() + line + "\n", rest), ("", rest)):
        write(first, one)
        write(last, other)
        hashes.append(open_records(DataConfig(path=str(folder))).content_hash())
    assert len(set(hashes)) == 3


def test_a_bad_line_names_its_file(folder):
    write(folder / "b" / "1.jsonl", '{"text": "3"}\n{\n')
    with pytest.raises(DataError, match=r"set/b/1.jsonl, line 2: is not valid JSON"):
        read(folder)
    data = DataConfig(path=str(folder), bad_records="drop")
    assert len(list(open_records(data).readable())) == 8


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("{}/*.csv", "no files of records"),
        ("{}/empty", "no files of records"),
        ("{}/mixed", r"several kinds \(.json, .jsonl\). Name those .* by a glob"),
        ("{}/odd", "unknown suffix '.txt'"),
    ],
)
def test_bad_folders_and_globs(tmp_path, name, match):
    (tmp_path / "empty").mkdir()
    for path in ("mixed/a.json", "mixed/b.jsonl", "odd/a.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        write(tmp_path / path, "")
    with pytest.raises(DataError, match=match):
        read(name.format(tmp_path))


def test_records_can_be_read_again(file):
    records = open_records(DataConfig(path=str(file), limit=2))
    assert list(records) == list(records) == RECORDS[:2]


def view(values, kind):
    return pa.array(values, pa.int64()).view(kind)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**31 - 1], pa.int32()).view(pa.date32()),
        view([86_400_000 * 10**8], pa.date64()),
        view([2**53], pa.timestamp("ms")),
        view([-(2**62)], pa.timestamp("us")),
        view([1], pa.timestamp("us", "Nowhere/Land")),
        view([2**62], pa.duration("s")),
        pa.Array.from_buffers(
            pa.string(),
            1,
            [None, pa.py_buffer(struct.pack("<2i", 0, 2)), pa.py_buffer(b"\xff\xfe")],
        ),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]),
    ],
    ids=lambda column: str(column.type),
)
def test_parquet_values_without_a_python_equivalent(tmp_path, column):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a"], "b": column})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(
        DataError, match=r"a\.parquet: column 'b' of type .* Store it as"
    ):
        read(path)


def test_duplicate_parquet_columns(tmp_path):
    path = tmp_path / "a.parquet"
    columns = [pa.array([1]), pa.array([2])]
    pyarrow.parquet.write_table(pa.Table.from_arrays(columns, ["a", "a"]), path)
    with pytest.raises(DataError, match="two columns are named 'a'"):
        read(path)


@pytest.mark.parametrize("suffix", WRITERS)
def test_damaged_arrow_tables(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    records = [{"text": f"{i} " * 50, "n": i} for i in range(500)]
    WRITERS[suffix](pa.Table.from_pylist(records), path)
    assert read(path) == records
    whole = path.read_bytes()
    changed = 0
    for at in range(4, len(whole) - 1, len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            changed += read(path) != records
        except DataError as error:
            assert str(error).startswith(str(path))
            changed += 1
    assert changed > 20


@pytest.mark.parametrize("name", ["x" * 300, "/tmp/" + "y" * 5000, "~nobody-here/a"])
def test_impossible_paths(name):
    match = r"bytes, and can have at most 255|cannot be a path"
    with pytest.raises((ConfigError, DataError), match=match):
        read(name)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EISDIR])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_disk_errors(tmp_path, monkeypatch, suffix, code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    path = write(tmp_path / f"a{suffix}", "[]")
    monkeypatch.setattr(pathlib.Path, "open", fail)
    with pytest.raises(
        DataError, match=rf"cannot be read: {os.strerror(code)}\. Check"
    ):
        read(path)


def test_circular_links(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("b.jsonl")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    with pytest.raises(DataError, match="cannot be read: Too many levels of symbolic"):
        read(tmp_path / "a.jsonl")


def test_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        read(tmp_path / "a.jsonl")
