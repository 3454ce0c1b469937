"""Two engines of the tiny model behind one front, all in this process."""

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxlora.config.serve_config import ServeConfig, ServerSession
from jaxlora.hf.load import load_model
from jaxlora.serve.app import make_app, make_server
from jaxlora.serve.database import Database
from jaxlora.serve.fleet.front import Engine, Front, make_front
from jaxlora.serve.jobs.record import JobTable
from jaxlora.serve.keys import Keys
from jaxlora.serve.listener import SOCKET, Listener, listen_at
from jaxlora.serve.registry import Registry
from tests import tiny
from tests.jaxlora.serve.tinker.conftest import NAME, Api
from tests.jaxlora.session.conftest import SETTINGS


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("fleet") / "model"))


class Patient(Api):
    """Asks again for what is not there yet, as clients do."""

    def send(self, method: str, path: str, **given: Any) -> Any:
        while (found := super().send(method, path, **given)).status_code == 408:
            pass
        return found


class Served:
    """An app that is served by a thread."""

    def __init__(self, listener: Listener, app):
        self._server = listener.server(app, lambda: None)
        self._thread = threading.Thread(target=listener.run, args=(self._server, app))
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


class Fleet:
    """A front and its engines.

    Attributes:
        servers: The parts of the engines that run, by number.
        api: Calls routes of the front as a client of alice does.
    """

    def __init__(self, folder: pathlib.Path, model: Any, **settings: Any):
        self.folder, self._model = folder, model
        self.config = ServeConfig(
            model="tiny",
            model_name=NAME,
            folder=str(folder),
            keys=True,
            engines=2,
            session=ServerSession(**SETTINGS),
            **settings,
        )
        folder.mkdir(exist_ok=True)
        self.servers: dict[int, Any] = {}
        self._served: dict[int, Served] = {}
        self._database = Database(self.config.database_url)
        self.keys = Keys(self._database)
        self.front = Front(
            config=self.config,
            keys=self.keys,
            registry=Registry(self._database),
            jobs=JobTable(self._database),
            engines={n: Engine(n, self._place(n) / SOCKET) for n in range(2)},
        )
        for number in range(2):
            self.start(number)
        bound = socket.create_server(("127.0.0.1", 0))
        settings = Listener(bound=bound, settings={})
        self._served[-1] = Served(settings, make_front(self.front, self.front.watching))
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=100)
        self.api = self.as_tenant("alice")
        self.wait(0, 1)

    def _place(self, number: int) -> pathlib.Path:
        return self.folder / str(number)

    def start(self, number: int) -> None:
        """Starts an engine."""
        config = self.config.replace(
            folder=str(self._place(number)),
            database=self.config.database_url,
            storage=self.config.storage_url,
        )
        self.servers[number] = make_server(config, self._model, engine=number)
        with listen_at(self._place(number) / SOCKET) as listener:
            app = make_app(self.servers[number])
            self._served[number] = Served(listener, app)

    def stop(self, number: int) -> None:
        """Stops an engine, and waits until the front has seen that."""
        self._served.pop(number).stop()
        while self.front.engines[number].health is not None:
            time.sleep(0.01)

    def wait(self, *numbers: int) -> None:
        """Waits until engines answer."""
        while not all(self.front.engines[number].is_well for number in numbers):
            time.sleep(0.01)

    def as_tenant(self, tenant: str, *scopes: str) -> Patient:
        """The routes as a tenant calls them."""
        key = self.keys.add(tenant, scopes or ("train", "sample", "read"))
        return Patient(self.servers[0], self.client, {"X-API-Key": key})

    def close(self) -> None:
        self.client.close()
        for served in reversed(self._served.values()):
            served.stop()
        self._database.close()


@contextlib.contextmanager
def fleet_in(folder: pathlib.Path, model: Any, **settings: Any) -> Iterator[Fleet]:
    with contextlib.closing(Fleet(folder, model, **settings)) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    """One for all tests of a module."""
    with fleet_in(tmp_path_factory.mktemp("f") / "s", model) as made:
        yield made
