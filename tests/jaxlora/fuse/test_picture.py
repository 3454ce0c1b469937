"""The picture has the times of every region."""

import pytest

from jaxlora.errors import JaxloraError, StorageError
from jaxlora.fuse.picture import Bars, save_picture

REGIONS = [
    Bars("model.py:3", {"XLA, predicted": 2e-3, "chosen, predicted": 1.5e-3}),
    Bars("model.py:9", {"XLA, predicted": 9e-4, "chosen, measured": 7.01e-4}),
]


def draw(path):
    save_picture(REGIONS, "Regions", path)
    return path.read_text()


def test_bars_are_named_and_have_their_times(tmp_path):
    text = draw(tmp_path / "regions.svg")
    for label in ("model.py:3", "chosen, measured", "2,000", "701"):
        assert f"<!-- {label} -->" in text
    assert "XLA, measured" not in text


def test_the_same_regions_give_the_same_bytes(tmp_path):
    assert draw(tmp_path / "one.svg") == draw(tmp_path / "two.svg")


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(JaxloraError, match=r"\.svg or \.png"):
        draw(tmp_path / "regions.pdf")


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        draw(tmp_path / "nowhere" / "regions.svg")
