"""Tests that jobs share the tokens of a data set, in a run and through the disk."""

import datetime
import json
import logging
import os
import threading

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.common import cache_home
from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens import token_cache, tokenize
from jaxlora.data.tokens.dataset import RecordWriter
from jaxlora.data.tokens.token_cache import TokenCache, cache_key, user_token_cache
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.objectives.sample import TokenizedSample
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.conftest import NOW

RECORDS = [{"prompt": f"say {i} ", "completion": "x" * i} for i in range(1, 30)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, RECORDS)
    return path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def encodings(monkeypatch):
    """Lists the paths of the data sets that are encoded."""
    paths = []
    encode = tokenize.encode_records

    def count(data, *others):
        paths.append(data.path)
        return encode(data, *others)

    monkeypatch.setattr(tokenize, "encode_records", count)
    return paths


@pytest.fixture
def cache(tmp_path):
    return TokenCache(tmp_path / "cache" / "tokens")


def make_job(path, data=None, **job):
    data = DataConfig(path=str(path), **(data or {}))
    return LoraJob(name="job", data=data, **job)


def same(one, other) -> bool:
    return one.fingerprint == other.fingerprint and one.summary() == other.summary()


def entries(tmp_path):
    return sorted((tmp_path / "cache" / "tokens").iterdir())


# --- Within a run --------------------------------------------------------------------


def test_jobs_share_the_tokens_of_a_data_set(path, make_tokenizer, encodings):
    reader = DataReader(make_tokenizer())
    first = reader.read(make_job(path, rank=4, seed=1))
    assert reader.read(make_job(path, rank=8, seed=2)) is first
    train, held_out = (
        reader.read(make_job(path, eval_fraction=0.5), which)
        for which in ("train", "eval")
    )
    assert train.num_records + held_out.num_records == len(RECORDS)
    same_file = DataConfig(path=str(path))
    assert reader.read(make_job("other.jsonl", eval_data=same_file), "eval")
    dropped = reader.read(make_job(path, too_long="drop"))
    assert len(encodings) == 1
    assert dropped.samples.sets == first.samples.sets


@pytest.mark.parametrize(
    "different",
    [
        {"max_length": 7},
        {"data": {"loss_on": "all"}},
        {"data": {"limit": 5}},
        {"data": {"chat": True}},
        {"data": {"append_eos": False}},
    ],
)
def test_other_settings_give_other_tokens(path, make_tokenizer, encodings, different):
    tokenizer = make_tokenizer()
    reader = DataReader(tokenizer)
    first = reader.read(make_job(path))
    job = make_job(path, **different)
    other = reader.read(job)
    assert len(encodings) == 2 and not same(first, other)
    assert same(other, DataReader(tokenizer).read(job))


def test_a_file_that_was_changed_is_read_again(path, make_tokenizer, encodings):
    reader = DataReader(make_tokenizer())
    first = reader.read(make_job(path))
    write(path, RECORDS[::-1])
    assert not same(first, reader.read(make_job(path)))
    assert len(encodings) == 2


# --- On disk -------------------------------------------------------------------------


def test_a_later_run_takes_the_tokens_from_the_disk(
    path, tmp_path, make_tokenizer, encodings, cache, caplog
):
    caplog.set_level(logging.INFO, "jaxlora")
    records = [*RECORDS, {"prompt": "x"}, {"prompt": "y", "completion": "", "tools": 1}]
    write(path, records)
    job = make_job(path, {"bad_records": "drop"}, eval_fraction=0.1)
    found, logged = [], []
    for _ in range(2):
        reader = DataReader(make_tokenizer(), cache)
        found.append([reader.read(job, which) for which in ("train", "eval")])
        logged.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    assert all(map(same, *found))
    assert len(encodings) == 1 and len(entries(tmp_path)) == 1
    assert f"{path}: its tokens are taken from {tmp_path / 'cache'}" in logged[1][0]
    # What the log says about the data, it says in each run, and once for both splits.
    assert len(logged[0]) == 4 and logged[1][1:] == logged[0]


def test_a_moved_file_has_its_tokens(path, make_tokenizer, encodings, cache):
    first = DataReader(make_tokenizer(), cache).read(make_job(path))
    moved = path.rename(path.with_name("moved.jsonl"))
    other = DataReader(make_tokenizer(), cache).read(make_job(moved))
    assert len(encodings) == 1 and first.fingerprint == other.fingerprint
    assert other.source == str(moved)


def damage_byte(entry, place):
    content = bytearray(entry.read_bytes())
    content[place] ^= 1
    entry.write_bytes(content)


def replace_by(make):
    def replace(entry):
        entry.unlink()
        make(entry)

    return replace


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entry: entry.write_bytes(b""), "header"),
        (lambda entry: entry.write_bytes(entry.read_bytes()[:-70]), "header"),
        (lambda entry: damage_byte(entry, 3), "header"),
        (lambda entry: damage_byte(entry, 300), "it has other arrays"),
        (lambda entry: damage_byte(entry, -1), "its checksum is wrong"),
        (replace_by(os.mkfifo), "it is not a regular file"),
        (replace_by(lambda entry: entry.symlink_to("/dev/zero")), "is not a regular"),
        (replace_by(lambda entry: entry.symlink_to("nothing")), "is not a regular"),
        (lambda entry: entry.chmod(0o620), r"other users may write to it (mode 620)"),
        (lambda entry: entry.chmod(0o602), r"chmod go-w"),
    ],
)
def test_an_entry_that_is_damaged_or_not_trusted_is_made_again(
    path, tmp_path, make_tokenizer, encodings, cache, caplog, change, why
):
    wanted = DataReader(make_tokenizer(), cache).read(make_job(path))
    (entry,) = entries(tmp_path)
    change(entry)
    for _ in range(2):
        assert same(wanted, DataReader(make_tokenizer(), cache).read(make_job(path)))
    assert len(encodings) == 2
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{entry}: these kept tokens cannot be used" in said and why in said
    assert entry.stat().st_mode & 0o777 == 0o600


def test_an_entry_of_another_user_is_not_used(tmp_path, monkeypatch, caplog):
    cache = TokenCache(tmp_path)
    cache.store("a", encoded(10))
    check = cache_home.check_private

    def check_as_another_user(found, path):
        if not path.is_dir():
            monkeypatch.setattr(os, "geteuid", lambda: found.st_uid + 1)
        check(found, path)

    monkeypatch.setattr(cache_home, "check_private", check_as_another_user)
    assert cache.load("a", "x") is None
    user = tmp_path.stat().st_uid
    assert (
        f"these kept tokens cannot be used (it belongs to user {user})" in caplog.text
    )


@pytest.mark.parametrize("others", ["own", "write"])
def test_a_folder_that_others_may_write_to_is_not_used(
    path, tmp_path, make_tokenizer, encodings, cache, caplog, monkeypatch, others
):
    DataReader(make_tokenizer(), cache).read(make_job(path))
    (entry,) = entries(tmp_path)
    if others == "own":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        why = f"it belongs to user {user}"
    else:
        entry.parent.chmod(0o777)
        why = f"mode 777). If it is yours, run: chmod go-w {entry.parent}"
    before = entry.stat()
    DataReader(make_tokenizer(), cache).read(make_job(path))
    assert len(encodings) == 2 and entry.stat() == before
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 2 and all(why in text for text in said)


def test_an_entry_without_an_array_is_made_again(tmp_path, caplog, monkeypatch):
    cache = TokenCache(tmp_path)
    with monkeypatch.context() as patch:
        fewer = {n: t for n, t in token_cache.COLUMNS.items() if n != "values"}
        patch.setattr(token_cache, "COLUMNS", fewer)
        cache.store("a", encoded(30))
    assert cache.load("a", "x") is None
    assert "these kept tokens cannot be used (it has other arrays)" in caplog.text


def test_an_entry_is_a_safetensors_file(tmp_path):
    wanted = encoded(30)
    TokenCache(tmp_path).store("a", wanted)
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert found.keys() == token_cache.COLUMNS.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, getattr(wanted, name))


def test_a_pipe_among_the_leftovers_does_not_wait(tmp_path):
    pipe = tmp_path / ".a.safetensors.01234567.jaxlora-tmp"
    os.mkfifo(pipe)
    (tmp_path / "b.safetensors").mkdir()
    cache = TokenCache(tmp_path, max_bytes=1)
    cache.store("a", encoded(10))
    assert cache.load("a", "x") is not None


def test_a_folder_that_cannot_be_used(path, tmp_path, make_tokenizer, caplog):
    (tmp_path / "cache").write_text("not a folder")
    cache = TokenCache(tmp_path / "cache" / "tokens")
    assert DataReader(make_tokenizer(), cache).read(make_job(path)).samples
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" in ")[0] for text in said] == [
        "kept tokens cannot be read",
        "kept tokens cannot be written",
    ]
    assert "or token_cache to false" in said[0]


def encoded(num_tokens):
    writer = RecordWriter("x", num_tokens)
    targets = np.arange(num_tokens) % 3 > 0
    writer.add(TokenizedSample(np.arange(num_tokens, dtype=np.int32), targets))
    return writer.finish(notes=[(20, "x \ud800")])


def test_the_oldest_entries_make_room(tmp_path):
    cache = TokenCache(tmp_path, max_bytes=13_000)
    for key in "ab":
        cache.store(key, encoded(1000))
        os.utime(tmp_path / f"{key}.safetensors", (0, 0))
    assert cache.load("a", "x")  # which makes it the one that was used last
    cache.store("c", encoded(1000))
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["a.safetensors", "c.safetensors"]
    cache.store("d", encoded(5000))
    assert [entry.name for entry in tmp_path.iterdir()] == ["d.safetensors"]


def test_large_entries_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "TOKENS_IN_MEMORY", 100)
    cache, wanted = TokenCache(tmp_path), encoded(1001)
    cache.store("a", wanted)
    found = cache.load("a", "x")
    assert found.notes == wanted.notes
    for name in token_cache.COLUMNS:
        array = getattr(found, name)
        assert array.dtype == getattr(wanted, name).dtype
        np.testing.assert_array_equal(array, getattr(wanted, name))


def test_several_writers_and_readers(tmp_path):
    """Each load gives the whole entry or none, whoever writes at the same time."""
    wanted = {num: encoded(num) for num in (500, 3000)}
    seen, stop = [], threading.Event()

    def load():
        while not stop.is_set():
            found = TokenCache(tmp_path).load("a", "x")
            if found is not None:
                seen.append(len(found.tokens))

    readers = [threading.Thread(target=load) for _ in range(2)]
    writers = [
        threading.Thread(target=TokenCache(tmp_path).store, args=("a", records))
        for records in list(wanted.values()) * 8
    ]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert set(seen) <= set(wanted)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    assert len(TokenCache(tmp_path).load("a", "x").tokens) in wanted


# --- What determines the tokens ------------------------------------------------------


def key_of(folder, now=NOW, content="c", **data):
    config = DataConfig(path="x.jsonl", **data)
    tokenizer = load_tokenizer(folder, now=now)
    return cache_key(config, content, tokenizer, 10)


def test_the_key_depends_on_the_tokenizer_and_its_template(make_folder, monkeypatch):
    key = key_of(make_folder())
    assert key_of(make_folder()) == key
    others = [
        key_of(make_folder(around="<s> $A")),
        key_of(make_folder(chat_template__jinja=chat_templates.CHATML)),
        key_of(make_folder(config={"eos_token": "<|im_end|>"})),
    ]
    folder = make_folder()
    others.append(key_of(folder, content="d"))
    others.append(key_of(folder, system="x"))
    monkeypatch.setattr(token_cache, "_code_hash", lambda: "other")
    others.append(key_of(folder))
    assert len({key, *others}) == 7


@pytest.mark.parametrize(
    ("template", "sees_hours", "sees_days"),
    [
        ("{{ messages }}", False, False),
        ("{% if strftime_now is defined %}{{ strftime_now('%d %b') }}", False, True),
        ('{{ strftime_now( "%H" ) }}', True, False),
        ("{{ strftime_now(format) }}", True, True),
        ("{% set now = strftime_now %}{{ now('%Y') }}", True, True),
    ],
)
def test_the_key_depends_on_the_time_that_the_template_sees(
    make_folder, template, sees_hours, sees_days
):
    folder = make_folder(chat_template__jinja=template)
    key = key_of(folder)
    later = datetime.timedelta(hours=1)
    assert (key_of(folder, now=NOW + later) != key) == sees_hours
    assert (key_of(folder, now=NOW + 24 * later) != key) == sees_days


def test_the_users_cache(monkeypatch, tmp_path, path, make_tokenizer):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    DataReader(make_tokenizer(), user_token_cache()).read(make_job(path))
    folder = tmp_path / "jaxlora" / "tokens"
    assert len(list(folder.iterdir())) == 1
    assert folder.stat().st_mode & 0o077 == 0  # data may be private
