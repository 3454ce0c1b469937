"""A server with the tiny model, and a client of its jobs."""

import time

import pytest
from fastapi.testclient import TestClient

from jaxlora.config.serve_config import ServeConfig
from jaxlora.hf.load import load_model
from jaxlora.serve.app import make_app, make_server
from tests import tiny
from tests.jaxlora.session.conftest import SETTINGS

OVER = ("finished", "stopped", "stopped early", "failed")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("jobs") / "model")


@pytest.fixture(scope="session")
def tiny_model(model_folder):
    return load_model(model_folder)


class JobClient(TestClient):
    """A client with the requests that tests make often."""

    def add(self, **settings):
        return self.ok("POST", "jobs", json=settings)

    def ok(self, method, path, **options):
        """Returns the JSON of an answer that is no error."""
        answer = self.request(method, f"/jobs/v1/{path}", **options)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def refused(self, method, path, status=400, **options):
        """Returns the text of an answer that is an error."""
        answer = self.request(method, f"/jobs/v1/{path}", **options)
        assert answer.status_code == status, answer.text
        return answer.json()["detail"]

    def upload(self, path):
        return self.ok("PUT", f"uploads/{path.name}", content=path.read_bytes())

    def job(self, name):
        return self.ok("GET", f"jobs/{name}")

    def wait(self, name, until=lambda job: job["status"] in OVER):
        """Returns a job as soon as it is as wanted."""
        deadline = time.monotonic() + 600
        while not until(job := self.job(name)):
            assert job["status"] != "failed", job["reason"]
            assert time.monotonic() < deadline, job
            time.sleep(0.01)
        return job

    def metrics(self, name, kind="step"):
        lines = self.ok("GET", f"jobs/{name}/metrics")["metrics"]
        return [line for line in lines if line["event"] == kind]


@pytest.fixture(scope="session")
def serve_in(tiny_model, model_folder):
    """Makes a client of a server that has its files in a folder."""

    def serve(folder, **settings):
        config = ServeConfig(
            model=str(model_folder),
            folder=str(folder / "serve"),
            session=SETTINGS,
            **settings,
        )
        app = make_app(make_server(config, tiny_model))
        return JobClient(app, base_url="http://localhost")

    return serve
