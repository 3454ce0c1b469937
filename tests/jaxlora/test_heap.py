"""Tests of the C library's heap."""

import subprocess
import sys

import pytest

# Counts the pages that the kernel of the host makes for arrays that are made in turn.
COUNT = """
import resource, sys, numpy as np
from jaxlora.common.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    arrays = [np.ones(100_000) for _ in range(50)]
use()
before = pages()
for _ in range(10):
    use()
print(pages() - before)
"""


def pages(how):
    done = subprocess.run(
        [sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc has these settings")
def test_the_memory_of_freed_arrays_is_used_again():
    assert pages("keep") < 100 < 1000 < pages("leave")
