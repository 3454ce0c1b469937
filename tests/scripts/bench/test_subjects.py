"""The command `jaxlora bench`."""

import os

import pytest

from jaxlora.bench import subjects
from jaxlora.bench.subjects import SUBJECTS
from jaxlora.cli.main import main
from jaxlora.memory import gpu_share


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


@pytest.mark.parametrize("subject", ["kernels", "tune"])
def test_a_benchmark_of_the_gpu_says_so_without_one(subject, capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    options = ["--table", "none.json"] if subject == "tune" else []
    assert main(["bench", subject, *options]) == 1
    assert "run it on a machine with an NVIDIA GPU" in capsys.readouterr().err


def test_a_large_model_is_refused_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert main(["bench", "joint"]) == 1
    assert "llama-3.1-8b needs a GPU" in capsys.readouterr().err


def test_traffic_names_the_profiler_that_it_needs(capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["bench", "traffic"]) == 1
    assert "`ncu` of NVIDIA Nsight Compute" in capsys.readouterr().err


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
        return gpu_share.ShareChoice(share=taken, text="a free GPU")

    class Module:
        def main(self, argv):
            found.append(os.environ.get(gpu_share.FRACTION))

    found = []
    monkeypatch.setenv(gpu_share.FRACTION, "0.5")
    monkeypatch.delenv(gpu_share.FRACTION)
    monkeypatch.setattr(gpu_share, "choose_share", choose)
    monkeypatch.setattr(subjects, "check_device_in_child", lambda: None)
    monkeypatch.setattr(subjects.importlib, "import_module", lambda name: Module())
    subjects.run(subject, [])
    assert found == [None if share is None else str(share)]
