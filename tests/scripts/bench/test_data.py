"""Memory and time of reading a job's records, in a process of its own."""

import json
import subprocess
import sys

import pytest

# Bounds are for memory that grows with the data. Equal processes differ by some
# megabytes.
MIB = 2**20
PROGRAM = """
import dataclasses, json
from jaxlora.bench.data import Case, measure
many, _ = measure(Case(records=12_000, chars=30, max_length=1024, jobs=2))
documents, _ = measure(Case(records=200, chars=20_000, max_length=512, jobs=1))
line, _ = measure(Case(records=1, chars=2_000_000, max_length=512, jobs=1))
print(json.dumps([dataclasses.asdict(m) for m in (many, documents, line)]))
"""


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def test_many_short_samples_take_few_bytes_each(measured):
    many = measured[0]
    assert many["num_samples"] == 12_000
    overhead = many["kept_bytes"] - 4 * many["num_tokens"]
    assert overhead < 200 * many["num_samples"] + 4 * MIB
    assert many["peak_bytes"] < 40 * MIB


def test_documents_are_encoded_a_few_at_a_time(measured):
    documents = measured[1]
    assert documents["num_tokens"] == 200 * 512
    assert documents["peak_bytes"] < 90 * MIB


def test_a_long_line_is_encoded_only_as_far_as_needed(measured):
    line = measured[2]
    assert line["num_tokens"] == 512
    assert line["peak_bytes"] < 140 * MIB
