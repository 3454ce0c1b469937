"""A tiny model of one layer, and adapters for it."""

import dataclasses

import pytest

from jaxlora import load_model
from tests import tiny

# Programs of two layers take twice as long to compile.
ONE_LAYER = tiny.CONFIG | {"num_hidden_layers": 1}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A checkpoint of the model, which no test changes."""
    return tiny.write_model(tmp_path_factory.mktemp("model"), config=ONE_LAYER)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that a test may change."""
    return tiny.write_model(tmp_path / "model", config=ONE_LAYER)


@pytest.fixture(scope="session")
def model(tiny_folder):
    """The model in float32."""
    return load_model(tiny_folder, dtype="float32")


@pytest.fixture(scope="session")
def make_small(make_adapter):
    """An adapter of random A and B on modules of the first layer."""

    def make(*args, **options):
        whole = make_adapter(*args, **options)
        modules = {n: w for n, w in whole.modules.items() if ".layers.0." in n}
        return dataclasses.replace(whole, modules=modules)

    return make
