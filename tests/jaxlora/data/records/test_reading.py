"""Memory of reading a job's records, in a process of its own."""

import json
import subprocess
import sys

import pytest

# Bounds are for memory that grows with the data. Equal processes differ by some
# megabytes.
MIB = 2**20


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("reading"))
    command = [sys.executable, "-m", "tests.jaxlora.data.reading", folder]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def test_many_short_samples_take_few_bytes_each(measured):
    many = measured["many"]
    assert many["num_samples"] == 12_000
    overhead = many["kept_bytes"] - 4 * many["num_tokens"]
    assert overhead < 200 * many["num_samples"] + 6 * MIB
    assert many["peak_bytes"] < 40 * MIB


def test_documents_are_encoded_a_few_at_a_time(measured):
    documents = measured["documents"]
    assert documents["num_tokens"] == 200 * 512
    assert documents["peak_bytes"] < 90 * MIB
