"""Two processes train a run as one process trains it on the same mesh."""

import json
import pathlib

import pytest

from tests.jaxlora.distributed.conftest import results, start, train_in_two, wait


def folder_of(run_file: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(json.loads(run_file.read_text())["output_dir"])


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "fsdp=4"])
def test_two_processes_train_like_one(make_run, mesh):
    """The losses and the adapters have the same bits."""
    one, two = make_run(mesh=mesh), make_run(mesh=mesh)
    alone = wait(start([one], devices=4))
    assert alone.status == 0, alone.stderr
    for ended in train_in_two([two, two]):
        assert ended.status == 0, ended.stderr
    assert results(two) == results(one)
