"""Jobs alone against together, as a user of a bfloat16 base sees it."""

import csv

import pytest

from jaxlora.bench import together


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Differences by layout, for two jobs with dropout on a bfloat16 base."""
    folder = tmp_path_factory.mktemp("together")
    options = "--jobs 2 --steps 12 --dtypes bfloat16 --output-dir"
    together.main([*options.split(), str(folder)])
    with (folder / "together.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["layout"] for row in found] == ["same", "other"]
    numbers = ("loss", "eval_loss", "weights")
    return {row["layout"]: {n: float(row[n]) for n in numbers} for row in found}


def test_in_the_same_layout_no_bit_differs(rows):
    assert rows["same"] == {"loss": 0, "eval_loss": 0, "weights": 0}


def test_in_another_layout_losses_differ_by_rounding(rows):
    """Weights differ more: Adam divides small gradients by their own size."""
    assert 0 < rows["other"]["loss"] < 2e-3
    assert 0 < rows["other"]["eval_loss"] < 2e-3
    assert 0 < rows["other"]["weights"] < 2e-2
