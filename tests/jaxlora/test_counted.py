"""Numbers of things are in the singular and the plural."""

import pytest

from jaxlora.common.counted import counted


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 jobs"), (1, "1 job"), (2, "2 jobs"), (12345, "12,345 jobs")],
)
def test_counted(number, text):
    assert counted(number, "job") == text
