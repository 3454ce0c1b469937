"""The hub runs the operations of models in their order, and keeps its promises."""

import numpy as np
import pytest

from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.hf.load import load_model
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub
from jaxlora.serve.operation import Create, Done, Failed, Pass, Save, Step
from jaxlora.serve.storage import Storage
from jaxlora.session.datum import ChosenLoss
from jaxlora.session.engine import Engine
from tests import tiny
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_losses import datums

CREATE = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
STEP = Step(params=AdamParams(learning_rate=1e-3))
CROSS_ENTROPY = ChosenLoss.of("cross_entropy", None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("hub") / "model"))


@pytest.fixture
def hub(tiny_model, tmp_path):
    engine = Engine(tiny_model, SessionConfig(**SETTINGS))
    database = Database(f"sqlite:///{tmp_path}/jaxlora.db")
    hub = Hub(engine, Storage(tmp_path / "storage"), database)
    hub.start()
    yield hub
    hub.stop()


def training_pass() -> Pass:
    data = tuple(datums(np.random.default_rng(0)))
    return Pass(data=data, loss=CROSS_ENTROPY, is_training=True)


def test_operations_run_in_the_order_of_their_numbers(hub, tmp_path):
    """Whose gaps hold those that came before, and a repeated one is the first."""
    late = hub.submit("t", "m", 4, Save(checkpoint="t/m/one", kind="state"))
    given = [CREATE, training_pass(), STEP]
    promises = [hub.submit("t", "m", i, one) for i, one in enumerate(given, 1)]
    assert hub.submit("t", "m", 3, STEP) is promises[2]
    assert isinstance(late.outcome.result(timeout=60), Done)
    step = promises[2].outcome.result(timeout=60)
    assert isinstance(step, Done) and step.result.step == 1
    assert (tmp_path / "storage" / "t" / "m" / "one").is_file()
    assert hub.promise("t", late.request_id) is late
    assert hub.promise("other", late.request_id) is None


def test_a_failed_operation_does_not_hold_those_after_it(hub):
    hub.submit("t", "m", 1, CREATE)
    bad = hub.submit("t", "m", 2, Save(checkpoint="t/m/one", kind="state"))
    again = hub.submit("t", "m", 3, Save(checkpoint="t/m/one", kind="adapter"))
    assert isinstance(bad.outcome.result(timeout=60), Done)
    failed = again.outcome.result(timeout=60)
    assert isinstance(failed, Failed) and "there already" in failed.message
    step = hub.submit("t", "m", 4, STEP).outcome.result(timeout=60)
    assert isinstance(step, Done)
