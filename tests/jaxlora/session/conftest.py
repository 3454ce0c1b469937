"""Sessions on the tiny model, which all have the same programs."""

import pytest

from jaxlora.hf.load import load_model
from jaxlora.session.session import Session
from tests import tiny

SETTINGS = {"rank": 8, "slots": 5, "block_tokens": 16, "microbatch_tokens": (32, 96)}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("session") / "model"))


@pytest.fixture
def session(tiny_model):
    return Session(tiny_model, **SETTINGS)


@pytest.fixture
def opened(session, make_adapter):
    """A session with adapters a, b, ... whose A and B are random."""

    def add(*names: str) -> Session:
        for seed, name in enumerate(names):
            adapter = make_adapter(LINEARS, rank=4 + 2 * (seed % 3), seed=seed)
            session._engine.open(name, scaled(adapter))
        return session

    return add


def scaled(adapter):
    """The adapter with small weights, so that the model stays near its base."""
    for weights in adapter.modules.values():
        for array in weights.tensors.values():
            array *= 0.1
    return adapter
