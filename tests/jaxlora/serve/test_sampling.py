"""The hub publishes and samples, and opens what it has written before a restart."""

import contextlib

import pytest

from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.hf.load import load_model
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub
from jaxlora.serve.operation import Done, Failed, Publish, Step
from jaxlora.serve.storage import Storage
from jaxlora.session.engine import Engine
from tests import tiny
from tests.jaxlora.serve.test_hub import CREATE, training_pass
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_samples import CONFIG, call, tokens

STEP = Step(params=AdamParams(learning_rate=1e-2))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("sampling") / "model"))


@pytest.fixture
def started(tiny_model, tmp_path):
    """Starts a hub on the same database and storage each time."""

    @contextlib.contextmanager
    def start():
        engine = Engine(tiny_model, SessionConfig(**SETTINGS))
        database = Database(f"sqlite:///{tmp_path}/jaxlora.db")
        hub = Hub(
            *(engine, Storage(tmp_path / "storage"), database),
            sampling=CONFIG,
            folder=tmp_path,
        )
        hub.start()
        yield hub
        hub.stop()

    return start


def test_versions_are_published_and_opened_after_a_restart(started):
    """Those with files; the others are gone. Later steps change neither."""
    named, unnamed = "t/m/sampler_weights/one", "session:sample:1"
    with started() as hub:
        operations = [
            *(CREATE, training_pass(), STEP),
            Publish(sampler=unnamed, checkpoint=None),
            Publish(sampler=named, checkpoint=named),
            *(training_pass(), STEP),
            Publish(sampler="later", checkpoint=None),
            Publish(sampler="other", checkpoint=named),
        ]
        promises = [hub.submit("t", "m", i, o) for i, o in enumerate(operations, 1)]
        outcomes = [one.outcome.result(timeout=60) for one in promises]
        assert all(isinstance(one, Done) for one in outcomes[:-1])
        assert isinstance(outcomes[-1], Failed)
        assert "there already" in outcomes[-1].message
        calls = [call(name) for name in (unnamed, named, "later", "base", "other")]
        found = [hub.sample("t", one) for one in calls]
        first, same, later, base, other = (one.result(timeout=60) for one in found)
        assert tokens(first) == tokens(same) != tokens(later) != tokens(base)
        assert isinstance(other, Failed) and other.category == "user"
    with started() as hub:
        keys = {named: named, unnamed: None, "gone": "t/m/gone"}
        found = [hub.sample("t", call(name), key) for name, key in keys.items()]
        beside = hub.sample("t", call(named), named)  # opens it at the same time
        again, *gone = (one.result(timeout=60) for one in found)
        assert tokens(beside.result(timeout=60)) == tokens(again)
        assert len([*hub._sampling.samples.published._folder.iterdir()]) == 1
        assert tokens(again) == tokens(first)
        assert all(isinstance(one, Failed) for one in gone)
        assert "no published version" in gone[0].message
        assert "t/m/gone" in gone[1].message


def test_training_goes_on_beside_samples(started):
    """A result that is cancelled ends its call."""
    with started() as hub:
        long = hub.sample("t", call("base", num_samples=40, max_tokens=120))
        cancelled = hub.sample("t", call("base", num_samples=40, max_tokens=120))
        assert cancelled.cancel()
        operations = [CREATE, training_pass(), STEP]
        promises = [hub.submit("t", "m", i, o) for i, o in enumerate(operations, 1)]
        assert isinstance(promises[-1].outcome.result(timeout=60), Done)
        found = long.result(timeout=60)
        assert len(found.completions) == 40
        (scored,) = [hub.sample("t", call("base", max_tokens=0, prompt_logprobs=True))]
        assert len(scored.result(timeout=60).prompt_logprobs) == 3
    assert not hub._sampling.samples._asked
