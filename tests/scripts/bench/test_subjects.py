"""The command `jaxlora bench`."""

import pytest

from jaxlora.bench.subjects import SUBJECTS
from jaxlora.cli.main import main


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
