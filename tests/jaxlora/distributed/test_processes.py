"""Values that processes exchange."""

import pytest

from jaxlora.distributed import processes
from jaxlora.errors import ConfigError, StorageError


def test_one_process_exchanges_nothing():
    assert processes.is_first() and processes.count() == 1
    assert processes.gather({"a": 1}) == [{"a": 1}]
    assert processes.any_of(True) and not processes.any_of(False)
    assert processes.from_first(lambda: 3) == 3


def test_the_error_names_the_field_and_the_processes(monkeypatch):
    answers = [("a", {"x": 1, "mesh": 2}), ("b", {"x": 1, "mesh": 2}), ("c", {"x": 1})]
    monkeypatch.setattr(processes, "gather", lambda value: answers)
    text = r"processes 0 \(on a\) and 2 \(on c\) .* mesh is 2 on .* None on .* Do this"
    with pytest.raises(ConfigError, match=text):
        processes.check_same({}, "Do this.")


def test_a_value_that_the_first_process_lacks_differs(monkeypatch):
    answers = [("a", {"x": 1}), ("b", {"x": 1, "mesh": 2})]
    monkeypatch.setattr(processes, "gather", lambda value: answers)
    with pytest.raises(ConfigError, match=r"mesh is None on process 0 and 2 on"):
        processes.check_same({}, "Do this.")


def test_other_processes_raise_the_error_of_the_first(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    answers = [(None, ("StorageError", "the disk is full")), None]
    monkeypatch.setattr(processes, "gather", lambda value: answers)
    with pytest.raises(StorageError, match="the disk is full"):
        processes.from_first(lambda: 1)
