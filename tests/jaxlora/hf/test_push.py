"""Adapters are uploaded whole, to the repositories that were asked for."""

import pathlib

import pytest

from jaxlora.cli.main import main
from jaxlora.errors import ConfigError
from jaxlora.hf import push as push_module
from jaxlora.hf.push import push, repositories
from tests.jaxlora.train import made_run

FILES = {
    *("README.md", "adapter_config.json", "adapter_model.safetensors", "jaxlora.json"),
}


class Hub:
    """A stand-in for `huggingface_hub.HfApi`, which keeps what it is given."""

    def __init__(self, refuses: str = ""):
        self.refuses, self.made, self.uploads = refuses, {}, {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        if repo_id == self.refuses:
            raise RuntimeError("403 Forbidden")
        self.made[repo_id] = private

    def upload_folder(self, *, repo_id, folder_path, commit_message) -> str:
        assert repo_id in self.made and commit_message
        folder = pathlib.Path(folder_path)
        self.uploads[repo_id] = {p.name: p.read_bytes() for p in folder.iterdir()}
        return f"https://hub/{repo_id}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    return made_run.write_run(tmp_path_factory.mktemp("push") / "run")


def test_repositories():
    assert repositories("me/mine", ["a"]) == {"a": "me/mine"}
    wanted = {"a": "me/mine-a", "b": "me/mine-b"}
    assert repositories("me/mine", ["a", "b"]) == wanted
    for wrong in ("mine", "me/mine/x", "https://hub/me", "me/ mine"):
        with pytest.raises(ConfigError, match="Give OWNER/NAME"):
            repositories(wrong, ["a"])


def test_each_job_gets_its_repository(run, tmp_path, monkeypatch, capsys):
    hub, out = Hub(), tmp_path / "out"
    monkeypatch.setattr(push_module, "open_hub", lambda: hub)
    command = ["export", str(run), str(out), "--push", "me/mine", "--private"]
    main(command)
    jobs = {folder.name for folder in out.iterdir()}
    assert len(jobs) > 1
    assert hub.made == {f"me/mine-{job}": True for job in jobs}
    for job in jobs:
        uploaded = hub.uploads[f"me/mine-{job}"]
        assert uploaded.keys() == FILES
        for name, data in uploaded.items():
            assert (out / job / name).read_bytes() == data
    told = capsys.readouterr().out
    assert all(f"uploaded https://hub/me/mine-{job}\n" in told for job in jobs)
    main([*command, "--job", "done"])
    assert "me/mine" in hub.made


def test_without_a_token_nothing_is_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--push", "me/mine"]) == 1
    assert "Log in with `hf auth login`, or set HF_TOKEN." in capsys.readouterr().err
    assert main(["export", str(run), str(out), "--push", "mine"]) == 1
    assert "Give OWNER/NAME" in capsys.readouterr().err
    assert not out.exists()


def test_an_upload_that_is_refused_names_those_before(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    folders = {"me/a": tmp_path / "a", "me/b": tmp_path / "b"}
    with pytest.raises(ConfigError, match="403 Forbidden") as error:
        push(folders, hub=Hub(refuses="me/b"))
    assert "Uploaded before: https://hub/me/a." in str(error.value)
    assert "hf auth whoami" in str(error.value)
