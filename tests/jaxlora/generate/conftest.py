"""The tiny model, and adapters that change what it says."""

import pytest

from jaxlora import load_model
from tests import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A checkpoint of the tiny model, which no test changes."""
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(tiny_folder):
    """The tiny model in float32."""
    return load_model(tiny_folder, dtype="float32")
