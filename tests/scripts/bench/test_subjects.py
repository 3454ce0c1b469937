"""The command `jaxlora bench`."""

import argparse
import importlib
import os
import pathlib
import re
import shlex

import pytest

from jaxlora.bench import subjects
from jaxlora.bench.subjects import SUBJECTS
from jaxlora.cli.main import main
from jaxlora.plan.memory import gpu_share

DOCS = pathlib.Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_help_of_a_subject(subject, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", subject, "--help"])
    assert ended.value.code == 0
    assert f"usage: jaxlora bench {subject} " in capsys.readouterr().out


def test_help_lists_all_subjects(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in SUBJECTS)


PAGES = [path for path in DOCS.rglob("*.md") if path.parent.name != "log"]
COMMAND = re.compile(r"^(?: {4})?(?:\w+=\d+ )?jaxlora bench (\w+)(.*)$", re.MULTILINE)


def commands():
    texts = (path.read_text(encoding="utf-8").replace("\\\n", "") for path in PAGES)
    return sorted({m.groups() for text in texts for m in COMMAND.finditer(text)})


@pytest.mark.parametrize(("subject", "options"), commands())
def test_commands_of_the_docs_can_be_parsed(subject, options):
    module = importlib.import_module(f"jaxlora.bench.{SUBJECTS[subject].module}")
    assert subjects.parse(module, subject, shlex.split(options, comments=True))


@pytest.mark.parametrize("subject", ["kernels", "tune"])
def test_a_benchmark_of_the_gpu_says_so_without_one(subject, capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    options = ["--table", "none.json"] if subject == "tune" else []
    assert main(["bench", subject, *options]) == 1
    assert "run it on a machine with an NVIDIA GPU" in capsys.readouterr().err


def test_a_large_model_is_refused_without_a_gpu(capsys, monkeypatch):
    name = "jaxlora.bench.mesh.benchmark.count_devices"
    monkeypatch.setattr(name, lambda: (2, False))
    assert main(["bench", "mesh"]) == 1
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
    """Before its module is imported, and in the variable that its processes inherit."""

    def choose(local_ids, environ, *, gathers):
        taken = gpu_share.GATHERING_SHARE if gathers else gpu_share.SHARE
        return taken, "a free GPU"

    class Module:
        def add_options(self, parser):
            found.append(os.environ.get(gpu_share.FRACTION))

        def run(self, options):
            assert options == argparse.Namespace()

    found = []
    monkeypatch.setenv(gpu_share.FRACTION, "0.5")
    monkeypatch.delenv(gpu_share.FRACTION)
    monkeypatch.setattr(gpu_share, "choose_share", choose)
    monkeypatch.setattr(subjects, "check_device_in_child", lambda: None)
    monkeypatch.setattr(subjects.importlib, "import_module", lambda name: Module())
    subjects.run(subject, [])
    assert found == [None if share is None else str(share)]
