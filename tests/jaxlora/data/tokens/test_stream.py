"""The order of streamed data against its definition, and what is in memory."""

import dataclasses
import itertools
import json
import pathlib
import threading
import weakref

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.records.shards import open_shards
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens import windows as module
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import DataError
from tests import tiny

LONG = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return load_tokenizer(folder)


def wait_for_reads() -> None:
    for thread in threading.enumerate():
        if thread.name == "window":
            thread.join()


@pytest.fixture(autouse=True)
def _ends_its_reads():
    yield
    wait_for_reads()


def record(name: str) -> dict:
    return {"prompt": f"{name} ", "completion": name}


def write_shards(folder: pathlib.Path, shards: list[list[dict]], suffix: str) -> str:
    """Writes shards; returns the folder."""
    folder.mkdir()
    for i, shard in enumerate(shards):
        path = folder / f"part-{i}{suffix}"
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps(one) + "\n" for one in shard))
        elif suffix == ".json":
            path.write_text(json.dumps(shard))
        else:
            names = ["prompt", "completion"]
            columns = {n: pa.array([r.get(n) for r in shard], "str") for n in names}
            pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=3)
    return str(folder)


def shuffled(items: list, seed: int, number: int) -> list:
    raw = np.random.Philox(key=np.array([seed, number], np.uint64))
    return [items[i] for i in np.argsort(raw.random_raw(len(items)), kind="stable")]


def defined(shards: list[list[str]], job: LoraJob, skip: int, window: int):
    """Yields the names of each global batch: the definition, in the simplest form."""
    if skip:
        names = iter(range(skip))
        shards = [[n for n in one if next(names, None) is None] for one in shards]
        shards = [one for i, one in enumerate(shards) if one or i >= len(shards) - 1]
    number = 0
    for epoch in itertools.count():
        order = shards
        if job.shuffle:
            order = shuffled(shards, job.seed, 2**62 + epoch)
        good = [n for one in order for n in one if not n.startswith(("bad", "long"))]
        for some in itertools.batched(good, window):
            some = list(some)
            some = shuffled(some, job.seed, number) if job.shuffle else some
            yield from map(list, itertools.batched(some, job.batch_size))
            number += 1


def names_of(samples, tokenizer) -> list[str]:
    return [tokenizer.decode(s.token_ids).split()[0] for s in samples]


def batch_names(stream, step: int, tokenizer) -> list[str]:
    data, groups = stream.take(step)
    return names_of([data.samples[i] for i in groups.tolist()], tokenizer)


@pytest.mark.parametrize("case", range(6))
def test_the_order_is_that_of_its_definition(tokenizer, tmp_path, case):
    """Also if it is asked for in any order, and from any place that was saved."""
    rng = np.random.default_rng(case)
    sizes = rng.integers(1, 17, rng.integers(1, 5)).tolist()
    kinds = ("r", "r", "r", "bad", "long")
    shards = [
        [f"{rng.choice(kinds)}{i}-{j}" for j in range(size)]
        for i, size in enumerate(sizes)
    ]
    shards[0][0] = "r0-0"
    rows = {"bad": lambda name: {"prompt": None}, "r": record}
    rows["long"] = lambda name: record(name * LONG)
    made = [
        [rows[name.rstrip("-0123456789")](name) for name in shard] for shard in shards
    ]
    skip = int(rng.integers(0, sizes[0]))
    data = {
        "path": write_shards(tmp_path / "set", made, (".jsonl", ".parquet")[case % 2]),
        "streaming": True,
        "shuffle_buffer": int(rng.integers(1, 20)),
        "skip": skip,
        "bad_records": "drop",
    }
    job = LoraJob(
        name="job",
        data=data,
        steps=40,
        batch_size=int(rng.integers(1, 6)),
        max_length=LONG,
        too_long="drop",
        shuffle=case != 3,
        seed=case,
    )
    window = -(-data["shuffle_buffer"] // job.batch_size) * job.batch_size
    stream = DataReader(tokenizer).stream(job)
    wanted = list(itertools.islice(defined(shards, job, skip, window), job.steps))
    for step in rng.permutation(job.steps).tolist():
        assert batch_names(stream, step, tokenizer) == wanted[step]
        data_then, groups = stream.lengths(step)
        lengths = data_then.group_lengths[groups]
        assert len(lengths) == len(wanted[step]) and lengths.min() > 4
    for step in (int(rng.integers(job.steps)), job.steps - 1):
        other = DataReader(tokenizer).stream(job)
        place = stream.place(step)
        other.follow(place)
        stream.release()
        assert place.digest and other.fingerprint == stream.fingerprint
        for later in range(step, job.steps):
            assert batch_names(other, later, tokenizer) == wanted[later]
        for side in (stream, other):
            assert batch_names(side, step, tokenizer) == wanted[step]


def simple_job(path: str, **changes) -> LoraJob:
    data = {"path": path, "streaming": True, "shuffle_buffer": 8}
    data |= {"bad_records": "drop"} | changes.pop("data", {})
    given = {"name": "job", "steps": 400, "batch_size": 2, "max_length": LONG}
    return LoraJob(data=data, **given | changes)


def test_few_windows_are_held(tokenizer, tmp_path, monkeypatch):
    """Those from the steps that were just taken to those that are planned."""
    held, read = weakref.WeakSet(), module.WindowReader._read

    def note(self, *places):
        held.add(window := read(self, *places))
        return window

    monkeypatch.setattr(module.WindowReader, "_read", note)
    shards = [[record(f"r{i}-{j}") for j in range(100)] for i in range(3)]
    stream = DataReader(tokenizer).stream(
        simple_job(write_shards(tmp_path / "set", shards, ".jsonl"))
    )
    most, ahead, in_window = 0, 20, 8 // 2
    for step in range(400 - ahead):
        stream.lengths(step + ahead)
        stream.take(step)
        most = max(most, len(held))
    # One may begin before the steps and one end after them, and one is read ahead.
    assert ahead / in_window <= most <= ahead / in_window + 3
    stream.release()
    stream.lengths(300)
    wait_for_reads()
    assert not held


def test_jobs_share_windows(tokenizer, tmp_path, monkeypatch):
    """Jobs whose seeds only permute the samples read each window once."""
    shards = [[record(f"r{j}") for j in range(20)]]
    path = write_shards(tmp_path / "set", shards, ".jsonl")
    reader = DataReader(tokenizer)
    one, other = (reader.stream(simple_job(path, seed=seed)) for seed in (0, 1))
    assert one.take(1)[0] is other.take(1)[0]
    assert batch_names(one, 1, tokenizer) != batch_names(other, 1, tokenizer)


def test_a_changed_record_is_noticed(tokenizer, tmp_path):
    """Within a window that was read before, even if no fingerprint covers it."""
    shards = [[record(f"r{i}-{j}") for j in range(20)] for i in range(2)]
    path = write_shards(tmp_path / "set", shards, ".jsonl")
    job = simple_job(path, shuffle=False)
    stream = DataReader(tokenizer).stream(job)
    stream.lengths(12)
    place = stream.place(12)
    assert place.shard == 1 and place.record == 4
    shards[1][5] = record("other")
    text = "".join(json.dumps(one) + "\n" for one in shards[1])
    (tmp_path / "set" / "part-1.jsonl").write_text(text)
    other = DataReader(tokenizer).stream(job)
    other.follow(place)
    with pytest.raises(DataError, match=r"records of part-1\.jsonl are not those"):
        other.lengths(12)


def test_a_bad_record_is_named_by_its_shard(tokenizer, tmp_path, caplog):
    shards = [[record(f"r{i}-{j}") for j in range(5)] for i in range(2)]
    shards[1][3] = {"prompt": 1, "completion": "a"}
    path = write_shards(tmp_path / "set", shards, ".jsonl")
    with caplog.at_level("INFO"):
        stream = DataReader(tokenizer).stream(
            simple_job(path, shuffle=False, data={"skip": 7})
        )
        stream.lengths(0)
    assert "dropped part-1.jsonl, record 4: " in caplog.text
    assert "1 of 3 samples was unusable" in caplog.text


def test_a_shard_that_cannot_be_read(tokenizer, tmp_path, caplog):
    """Records after damage are left out; a failing disk is an error."""
    shards = [[record(f"r{i}-{j}") for j in range(3)] for i in range(3)]
    path = write_shards(tmp_path / "set", shards, ".json")
    damaged = tmp_path / "set" / "part-1.json"
    damaged.write_text(f"[{json.dumps(record('r1-0'))}, {{, {{}}]")
    job = simple_job(path, shuffle=False, data={"shuffle_buffer": 4})
    stream = DataReader(tokenizer).stream(job)
    found = [name for step in range(4) for name in batch_names(stream, step, tokenizer)]
    assert found == ["r0-0", "r0-1", "r0-2", "r1-0", "r2-0", "r2-1", "r2-2"]
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "part-1.json cannot be read after record 1: record 2: is not valid" in said
    assert said.count("part-1.json") == 1
    stream = DataReader(tokenizer).stream(job)
    damaged.unlink()
    with pytest.raises(DataError, match=r"part-1\.json: cannot be read: No such file"):
        stream.lengths(2)


def test_a_line_that_cannot_be_read(tokenizer, tmp_path, caplog):
    shards = [[record(f"r{i}-{j}") for j in range(3)] for i in range(2)]
    path = write_shards(tmp_path / "set", shards, ".jsonl")
    lines = [json.dumps(record("r0-0")), "{", json.dumps(record("r0-2"))]
    (tmp_path / "set" / "part-0.jsonl").write_text("\n".join(lines))
    job = simple_job(path, shuffle=False, data={"shuffle_buffer": 4})
    stream = DataReader(tokenizer).stream(job)
    found = [name for step in range(3) for name in batch_names(stream, step, tokenizer)]
    assert found == ["r0-0", "r0-2", "r1-0", "r1-1", "r1-2"]
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{path}: dropped part-0.jsonl, line 2: is not valid JSON" in said


def test_no_usable_records(tokenizer, tmp_path):
    path = write_shards(tmp_path / "a", [[{"prompt": "", "completion": ""}]], ".jsonl")
    with pytest.raises(DataError, match="none of 1 record can be used"):
        DataReader(tokenizer).stream(simple_job(path, data={"append_eos": False}))
    path = write_shards(tmp_path / "b", [[record("r")] * 3] * 2, ".jsonl")
    with pytest.raises(DataError, match="holds 6 records, and skip=7 leaves out all"):
        open_shards(DataConfig(path=path, streaming=True, skip=7))


def test_pairs(tokenizer, tmp_path):
    rows = [
        {"prompt": f"p{i} ", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(9)
    ]
    path = write_shards(tmp_path / "set", [rows[:4], rows[4:]], ".jsonl")
    job = simple_job(path, objective="orpo", shuffle=False, data={"shuffle_buffer": 3})
    stream = DataReader(tokenizer).stream(job)
    data, groups = stream.take(3)
    assert data.group_size == 2 and groups.tolist() == [2, 3]
    found = [tokenizer.decode(data.samples[i].token_ids) for i in (4, 5, 6, 7)]
    assert [one[3:5] for one in found] == ["c6", "r6", "c7", "r7"]
    assert data.longest_group == 2 * LONG and data.longest_sample == LONG


def test_first_records_are_an_ordinary_data_set(tokenizer, tmp_path):
    """With `limit`: for held-out records, and for mixtures."""
    shards = [[record(f"r{i}-{j}") for j in range(3)] for i in range(3)]
    path = write_shards(tmp_path / "set", shards, ".jsonl")
    first = {"path": f"{path}/*.jsonl", "streaming": True, "limit": 4, "skip": 1}
    job = LoraJob(name="job", data={"datasets": [first]}, eval_data=first)
    for which in ("train", "eval"):
        read = DataReader(tokenizer).read(job, which)
        assert names_of(read.samples, tokenizer) == ["r0-1", "r0-2", "r1-0", "r1-1"]


def test_hub(tokenizer, tmp_path, monkeypatch):
    """The shards of a streamed data set, all of the commit that is current."""
    shards = [[record(f"r{i}-{j}") for j in range(3)] for i in range(3)]
    files = sorted(
        map(str, pathlib.Path(write_shards(tmp_path / "s", shards, ".jsonl")).iterdir())
    )
    load, calls = datasets.load_dataset, []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        kwargs = {"split": kwargs["split"], "streaming": kwargs["streaming"]}
        return load("json", data_files=files, **kwargs)

    @dataclasses.dataclass
    class Info:
        sha: str = "c0ffee"

    info = lambda self, repo_id, revision: Info(f"c0ffee of {revision}")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    data = {"split": "train", "revision": "main", "shuffle_buffer": 2}
    job = simple_job("owner/name", shuffle=False, data=data)
    stream = DataReader(tokenizer).stream(job)
    options = {"split": "train", "streaming": True, "revision": "c0ffee of main"}
    assert calls[0] == (("owner/name", None), options)
    assert stream.shards == {
        f"train-{i:05d}-of-00003": "c0ffee of main" for i in range(3)
    }
    every = [r["completion"] for shard in shards for r in shard]
    found = [name for step in range(5) for name in batch_names(stream, step, tokenizer)]
    assert found == every
    other = DataReader(tokenizer).stream(job)
    other.follow(stream.place(4))
    assert batch_names(other, 4, tokenizer) == every[8:]
    monkeypatch.undo()
    broken = lambda self, repo_id, revision: 1 / 0
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", broken)
    with pytest.raises(DataError, match="ZeroDivisionError"):
        DataReader(tokenizer).stream(job)


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("{}/none", "no files of records"),
        ("{}/*.csv", "no files of records"),
        ("{}/mixed", r"several kinds \(.json, .jsonl\). Name those .* by a glob"),
        ("{}/odd", "unknown suffix '.txt'"),
        ("~nobody-of-this-name", "cannot be a path"),
    ],
)
def test_bad_paths(tmp_path, path, match):
    for name in ("mixed/a.json", "mixed/b.jsonl", "odd/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    data = DataConfig(path=path.format(tmp_path), streaming=True)
    with pytest.raises(DataError, match=match):
        open_shards(data)


def test_fingerprints_of_shards(tmp_path):
    """All of a small file counts; of a large one its size and blocks."""
    path = tmp_path / "a.jsonl"
    of = lambda: open_shards(DataConfig(path=str(path), streaming=True))[0].fingerprint
    found = set()
    for text in ("a" * 1000, "a" * 999 + "b", "a" * 2**21, "a" * (2**21 + 1)):
        path.write_text(text)
        found.add(of())
    path.write_text("a" * (2**21) + "b")
    assert of() not in found and len(found) == 4


def labelled(name: str) -> dict:
    return record(name) | {"label": True}


def kto(path: str, window: int, **changes) -> LoraJob:
    data = {"path": path, "streaming": True, "shuffle_buffer": window}
    settings = {"objective": "kto", "batch_size": 4, "steps": 12, "max_length": LONG}
    data |= {"bad_records": "drop"}
    return LoraJob(name="k", data=data, shuffle=False, **settings | changes)


@pytest.mark.parametrize(("num", "window"), [(9, 8), (9, 100), (8, 8), (13, 4)])
def test_a_sample_that_a_pass_leaves_over_has_others_in_its_batch(
    tokenizer, tmp_path, num, window
):
    """It is in the batch before, or goes before the next pass."""
    names = [f"r{i}" for i in range(num)]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(labelled(name)) + "\n" for name in names))
    job = kto(str(path), window)
    stream = DataReader(tokenizer).stream(job)
    found = [batch_names(stream, step, tokenizer) for step in range(job.steps)]
    assert {len(batch) for batch in found} <= {2, 3, 4, 5}
    seen = list(itertools.chain(*found))
    assert seen == list(itertools.islice(itertools.cycle(names), len(seen)))
    for step in range(job.steps):
        other = DataReader(tokenizer).stream(job)
        other.follow(stream.place(step))
        assert [
            batch_names(other, later, tokenizer) for later in range(step, job.steps)
        ] == found[step:]


def test_a_stream_of_one_answer_is_refused(tokenizer, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(labelled("r0")) + "\n")
    job = kto(str(path), 8)
    with pytest.raises(DataError, match="has 1 sample there, and kto needs 2 or more"):
        DataReader(tokenizer).stream(job)
    args = {"loss_type": "apo_zero_unpaired"}
    stream = DataReader(tokenizer).stream(job.replace(objective_args=args))
    assert batch_names(stream, 3, tokenizer) == ["r0"]
