"""Behind a front, no route gives a tenant anything of another, either."""

import pytest

from jaxlora.serve.ids import engine_of
from jaxlora.serve.tinker import training
from tests.jaxlora.serve.fleet.conftest import fleet_in
from tests.jaxlora.serve.test_two_tenants import (  # noqa: F401
    World,
    test_no_route_answers_without_a_key,
    test_nothing_of_alice_has_changed,
    test_things_of_others_are_missing,
)


class FleetWorld(World):
    """Two engines behind a front, and two tenants. The one has things on each."""

    def __init__(self, fleet):
        self.server, self.client = fleet.servers[0], fleet.client
        self.folder = fleet.folder
        self.keys = {name: fleet.as_tenant(name).key for name in ("alice", "bob")}


@pytest.fixture(scope="module")
def world(model, tmp_path_factory):
    limits = {"body_bytes": 200_000, "upload_bytes": 300_000}
    folder = tmp_path_factory.mktemp("t") / "s"
    with (
        fleet_in(folder, model, limits=limits) as fleet,
        pytest.MonkeyPatch.context() as patch,
    ):
        fleet.as_tenant("eve").session()  # so that alice's is on another engine
        made = FleetWorld(fleet)
        made.fill()
        assert engine_of(made.things["session"]) == 1
        patch.setattr(training, "POLL_SECONDS", 0.01)
        yield made
