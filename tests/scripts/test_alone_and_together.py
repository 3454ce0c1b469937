"""Jobs alone against together, as a user of a bfloat16 base sees it."""

import csv

import pytest

from scripts import alone_and_together


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Differences by layout: two jobs with dropout on a bfloat16 base."""
    table = tmp_path_factory.mktemp("table") / "rows.csv"
    options = ["--jobs", "2", "--steps", "12", "--dtypes", "bfloat16"]
    found = alone_and_together.main([*options, "--csv", str(table)])
    with table.open() as file:
        assert [row["layout"] for row in csv.DictReader(file)] == ["same", "other"]
    return {row["layout"]: row for row in found}


def test_in_the_same_layout_no_bit_differs(rows):
    assert rows["same"]["loss"] == 0
    assert rows["same"]["eval_loss"] == 0
    assert rows["same"]["weights"] == 0


def test_in_another_layout_losses_differ_by_rounding(rows):
    """Weights differ more: Adam divides small gradients by their own size."""
    assert 0 < rows["other"]["loss"] < 2e-3
    assert 0 < rows["other"]["eval_loss"] < 2e-3
    assert 0 < rows["other"]["weights"] < 2e-2
