"""The best weights of a job with `keep_best` follow it into another run."""

import pytest

from jaxlora import LoraJob
from jaxlora.adapters.adapter import Adapter
from jaxlora.errors import AdapterError
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.continue_job import copy_best_export
from tests.jaxlora.train import made_run
from tests.jaxlora.train.runs import prepared_of


def job_of(run_dir, **settings) -> JobState:
    """A job without data, of which only the settings are read."""
    own = {"name": "best", "data": {"path": "none"}, "eval_fraction": 0.1}
    own |= {"keep_best": True, "continue_from": str(run_dir)}
    job = LoraJob(**own | settings)
    return JobState(prepared_of(settings=job), Adapter(modules={}))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_best_export_is_copied_once(tmp_path):
    there = made_run.write_run(tmp_path / "there", numbers=())
    here = tmp_path / "here" / "adapters" / "best"
    copy_best_export(job_of(there, keep_best=False), here)
    copy_best_export(job_of(there, continue_from=None), here)
    copy_best_export(job_of(tmp_path / "none"), here)
    assert not here.exists()
    copy_best_export(job_of(there), here)
    assert contents(here) == contents(there / "adapters" / "best")
    made_run.write_export(here, "best", 7)
    before = contents(here)
    copy_best_export(job_of(there), here)
    assert contents(here) == before


def test_a_damaged_export_is_not_copied(tmp_path):
    there = made_run.write_run(tmp_path / "there", numbers=())
    (there / "adapters" / "best" / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="is damaged"):
        copy_best_export(job_of(there), tmp_path / "here")
    assert not (tmp_path / "here").exists()
