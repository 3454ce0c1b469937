"""The command `python -m scripts.bench`."""

import importlib
import os
import pathlib
import re
import shlex

import pytest

from jaxlora.plan.memory import gpu_share
from scripts.bench import __main__ as bench
from scripts.bench.__main__ import SUBJECTS

DOCS = pathlib.Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_help_of_a_subject(subject, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main([subject, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m scripts.bench {subject} " in capsys.readouterr().out


def test_help_lists_all_subjects(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in SUBJECTS)


PAGES = [path for path in DOCS.rglob("*.md") if path.parent.name != "log"]
COMMAND = re.compile(
    r"^(?: {4})?(?:\w+=\d+ )?python -m scripts\.bench (\w+)(.*)$", re.MULTILINE
)


def commands():
    texts = (path.read_text(encoding="utf-8").replace("\\\n", "") for path in PAGES)
    return sorted({m.groups() for text in texts for m in COMMAND.finditer(text)})


@pytest.mark.parametrize(("subject", "options"), commands())
def test_commands_of_the_docs_can_be_parsed(subject, options):
    module = importlib.import_module(f"scripts.bench.{SUBJECTS[subject].module}")
    assert bench.parse(module, subject, shlex.split(options, comments=True))


@pytest.mark.parametrize("subject", ["kernels", "tune"])
def test_a_benchmark_of_the_gpu_says_so_without_one(subject, capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    options = ["--table", "none.json"] if subject == "tune" else []
    assert bench.main([subject, *options]) == 1
    assert "run it on a machine with an NVIDIA GPU" in capsys.readouterr().err


def test_a_large_model_is_refused_without_a_gpu(capsys, monkeypatch):
    name = "scripts.bench.mesh.benchmark.devices"
    monkeypatch.setattr(name, lambda: (2, "cpu", "cpu"))
    assert bench.main(["mesh"]) == 1
    assert "llama-3.1-8b needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("subject", "share"),
    [
        ("step", gpu_share.SHARE),
        ("mesh", gpu_share.GATHERING_SHARE),
        ("scheduler", None),
    ],
)
def test_a_benchmark_takes_the_memory_that_training_takes(subject, share, monkeypatch):
    """In the variable that its processes inherit."""

    def choose(local_ids, environ, *, gathers, query):
        taken = gpu_share.GATHERING_SHARE if gathers else gpu_share.SHARE
        return taken, "a free GPU"

    class Module:
        def add_options(self, parser):
            assert gpu_share.FRACTION not in os.environ

        def run(self, options):
            found.append(os.environ.get(gpu_share.FRACTION))

    found = []
    monkeypatch.setenv(gpu_share.FRACTION, "0.5")
    monkeypatch.delenv(gpu_share.FRACTION)
    monkeypatch.setattr(gpu_share, "choose_share", choose)
    monkeypatch.setattr(bench, "check_device_in_child", lambda: None)
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: Module())
    bench.run(subject, [])
    assert found == [None if share is None else str(share)]
