"""Files that cannot be read, or are of another kind than their names say."""

import io
import os

import pytest
import safetensors

from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.errors import AdapterError, ModelError
from jaxlora.hf.checkpoint import open_checkpoint
from jaxlora.hf.convert import convert
from tests.jaxlora.hf.loading import load_model


def replace(path, kind):
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_something_else_in_the_place_of_a_file(folder, tmp_path, name, kind):
    replace(folder / name, kind)
    with pytest.raises(ModelError, match=name):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_something_else_in_the_place_of_a_shard_or_an_adapter(
    folder, shard, export, make_adapter, linear_shapes, kind
):
    shard()
    replace(folder / "b.safetensors", kind)
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load_model(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        adapter = export(make_adapter(), name)
        replace(adapter / name, kind)
        with pytest.raises(AdapterError, match=f"/{name}"):
            import_peft(adapter, linear_shapes)


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(5, "I/O error")])
def test_weights_that_the_system_refuses(
    folder, tmp_path, export, make_adapter, monkeypatch, error
):
    adapter = export(make_adapter())

    class Broken(io.FileIO):
        def readinto(self, buffer):
            raise error

    monkeypatch.setattr("jaxlora.hf.tensor_file.io.FileIO", Broken)
    match = rf"safetensors cannot be read: {error.strerror}\. Check its permissions"
    with pytest.raises(ModelError, match=match):
        load_model(folder)
    with pytest.raises(AdapterError, match=f"adapter_model.{match}"):
        merge_adapter(folder, adapter, tmp_path / "out")


def test_a_file_that_may_not_be_opened(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with pytest.raises(ModelError, match=r"cannot be read: Permission denied\. Check"):
        load_model(folder)


def test_a_file_that_shrinks_while_it_is_read(folder):
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match="became shorter while it was read"):
        for name, file in checkpoint.files.items():
            file.array(name)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, '{"a": ' + "1" * 5000 + "}"],
)
def test_json_that_python_cannot_take(
    folder, shard, export, make_adapter, linear_shapes, text
):
    index = shard()
    whole = index.read_text()
    adapter = export(make_adapter())
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read as"):
        import_peft(adapter, linear_shapes)
    index.write_text(text)
    with pytest.raises(ModelError, match=r"index\.json cannot be read as JSON"):
        load_model(folder)
    index.write_text(whole)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        load_model(folder)
