"""The demo replaces only what an earlier demo wrote."""

import importlib.util
import pathlib

import pytest
import yaml

PATH = pathlib.Path(__file__).parents[2] / "scripts/demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder: pathlib.Path, names: list[str]) -> None:
    folder.mkdir()
    run = {"jobs": [{"name": name} for name in names]}
    (folder / "run_file.yaml").write_text(yaml.safe_dump(run))


def test_an_earlier_demo_is_removed(demo, tmp_path):
    write_run(tmp_path / "run", list(demo.SETTINGS))
    demo.remove_earlier(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    demo.remove_earlier(tmp_path / "run")


@pytest.mark.parametrize("is_run", [True, False])
def test_another_folder_is_refused_before_anything_is_fetched(
    demo, tmp_path, monkeypatch, is_run
):
    kept = tmp_path / "mine"
    if is_run:
        write_run(kept, ["a"])
    else:
        kept.mkdir()
        (kept / "thesis.txt").write_text("text")
    cache = tmp_path / "cache"
    words = ["demo.py", "--output-dir", str(kept), "--cache", str(cache)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="mine is in use, and not by an earlier demo"):
        demo.main()
    assert len(list(kept.iterdir())) == 1
    assert not cache.exists()


def test_an_empty_folder_is_used(demo, tmp_path):
    demo.remove_earlier(tmp_path)
    assert tmp_path.is_dir()
