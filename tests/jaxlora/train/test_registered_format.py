"""A run file names a format from outside the package, and a job trains with it."""

import json

import jaxlora
from jaxlora import Example
from jaxlora.data.formats.table import FORMATS
from jaxlora.data.records.files import read_file


def test_a_job_trains_with_a_registered_format(train, jobs, tmp_path):
    """It ends in the bits of the same records in a format of the package."""
    job = jobs[0]
    read = read_file(tmp_path / job.data.path, keeps_bad=False)
    own = [{"turns": [one["prompt"], one["completion"]]} for one in read]
    path, run_file = tmp_path / "turns.jsonl", tmp_path / "run.yaml"
    path.write_text("".join(json.dumps(one) + "\n" for one in own))
    named = {"name": "own", "data": {"path": str(path), "kind": "turns"}}
    run_file.write_text(json.dumps({"model": "x", "jobs": [named]}))
    data = jaxlora.load_run(run_file).jobs[0].data
    jaxlora.register_format("turns", lambda r: Example(r["turns"][0], (r["turns"][1],)))
    try:
        found = train([job.replace(data=data)])
    finally:
        FORMATS.pop()
    assert found.bytes == train([job]).bytes and found.losses[job.name]
