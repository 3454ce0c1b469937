"""Tests the tokens of records in flat arrays, in memory and in a temporary file."""

import errno
import gc
import os
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlora.data.tokens import dataset as module
from jaxlora.data.tokens.dataset import RecordWriter, Samples
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample


def sample(ids, targets, weights=None):
    if weights is not None:
        weights = np.array(weights, np.float32)
    return TokenizedSample(
        np.array(ids, np.int32), np.array(targets, bool), weights=weights
    )


def write(given: list[TokenizedSample]) -> Samples:
    writer = RecordWriter("data.jsonl", max_length=100)
    for one in given:
        writer.add(one)
    assert len(writer) == len(given)
    return Samples([writer.finish()], np.arange(len(given)))


def same(got, wanted) -> bool:
    return (
        got.token_ids.dtype == np.int32
        and got.is_target.dtype == bool
        and np.array_equal(got.token_ids, wanted.token_ids)
        and np.array_equal(got.is_target, wanted.is_target)
        and (got.weights is None) == (wanted.weights is None)
        and (got.weights is None or np.array_equal(got.weights, wanted.weights))
    )


tokens = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9
)
weighted = st.lists(
    st.tuples(st.integers(0, 99), st.booleans(), st.sampled_from([0.5, 1, 2])),
    min_size=1,
    max_size=9,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    given=st.lists(tokens | weighted, min_size=1, max_size=20), most=st.integers(0, 90)
)
def test_samples_come_back(monkeypatch, given, most):
    monkeypatch.setattr(module, "TOKENS_IN_MEMORY", most)
    monkeypatch.setattr(module, "_PENDING_RECORDS", 3)
    wanted = [sample(*zip(*one, strict=True)) for one in given]
    found = write(wanted)
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))
    assert all(same(found[i], wanted[i]) for i in range(len(wanted)))
    assert same(found[-1], wanted[-1]) and same(found[np.int64(0)], wanted[0])
    assert all(map(same, found[1::2], wanted[1::2]))
    assert found.lengths.tolist() == [len(s.token_ids) for s in wanted]
    assert found.num_targets.tolist() == [s.is_target.sum() for s in wanted]
    with pytest.raises(IndexError):
        found[len(wanted)]


def test_some_of_the_records():
    """Bad records have no tokens, and the end of long ones is not kept."""
    writer = RecordWriter("data.jsonl", max_length=3)
    writer.add(sample([1, 2, 3, 4, 5], [False, False, True, True, True]))
    writer.add_bad()
    writer.add(sample([6, 7], [False, True]))
    writer.add(sample([8], [False]))
    records = writer.finish(first_bad="record 2: bad", notes=[(20, "a note")])
    assert records.lengths.tolist() == [5, 0, 2, 1]
    assert records.num_targets.tolist() == [1, 0, 1, 0]
    assert records.is_bad.tolist() == [False, True, False, False]
    assert (records.first_bad, records.notes) == ("record 2: bad", ((20, "a note"),))
    some = Samples([records], np.array([2, 0]))
    assert [s.token_ids.tolist() for s in some] == [[6, 7], [1, 2, 3]]
    assert some[1].is_target.tolist() == [False, False, True]
    assert some.lengths.tolist() == [2, 3] and some.num_targets.sum() == 2


def test_a_sample_has_its_own_arrays():
    found = write([sample([1, 2], [False, True])])
    found[0].token_ids[:] = 7
    assert found[0].token_ids.tolist() == [1, 2]


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_file_has_no_name_and_goes_with_the_samples(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "TOKENS_IN_MEMORY", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = num_open_files()
    found = write([sample([1, 2, 3], [0, 1, 1])] * 2)
    assert num_open_files() == before + 1
    assert list(tmp_path.iterdir()) == []
    assert found[1].token_ids.tolist() == [1, 2, 3]
    del found
    gc.collect()
    assert num_open_files() == before


@pytest.mark.parametrize("step", ["open", "write", "map"])
def test_a_full_disk_is_reported(monkeypatch, step):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full:
        write = staticmethod(fail)
        close = staticmethod(lambda: None)

    monkeypatch.setattr(module, "TOKENS_IN_MEMORY", 4)
    if step == "map":
        monkeypatch.setattr(np, "memmap", fail)
    else:
        opened = fail if step == "open" else Full
        monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    match = r"^data\.jsonl: its tokens \(24 bytes so far\) .* No space left .* TMPDIR"
    with pytest.raises(DataError, match=match):
        write([sample([1, 2, 3], [0, 1, 1])] * 2)
