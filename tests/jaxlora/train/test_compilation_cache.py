"""Where compiled programs are kept, and who has a say in it."""

import logging
import os
import subprocess
import sys

import jax
import pytest

from jaxlora import Trainer
from jaxlora.programs import program
from jaxlora.programs.program import keep_programs
from jaxlora.train.compilation_cache import keep_compiled_programs
from tests.jaxlora.train.runs import run_of


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    """As for a user who has set nothing. Nothing that takes long is compiled here."""
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXLORA_KEEP_PROGRAMS", raising=False)
    yield
    keep_programs(None)
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("compiled_when_called")
def test_a_trainer_keeps_what_it_compiles(model, jobs, tmp_path, caplog):
    caplog.set_level(logging.INFO, "jaxlora")
    config = run_of(model, tmp_path / "run", jobs[:1])
    for _ in range(2):
        Trainer(config, model)
    folder = tmp_path / "cache" / "jaxlora"
    assert jax.config.jax_compilation_cache_dir == str(folder / "xla")
    assert program._Kept.programs.folder == folder / "programs"
    assert caplog.text.count(f"compiled programs are kept in {folder}") == 1


def test_where_whole_programs_are_kept(tmp_path, monkeypatch):
    """Beside JAX's cache, if its settings choose a folder of this machine."""

    def folder():
        keep_compiled_programs()
        kept = program._Kept.programs
        return None if kept is None else kept.folder

    assert folder() == tmp_path / "cache" / "jaxlora" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine" / "jaxlora-programs"
    monkeypatch.setenv("JAXLORA_KEEP_PROGRAMS", "0")
    assert folder() is None
    monkeypatch.delenv("JAXLORA_KEEP_PROGRAMS")
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert folder() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_compilation_cache_dir", "gs://mine"),
        ("jax_compilation_cache_dir", ""),
        ("jax_enable_compilation_cache", False),
    ],
)
def test_jaxs_own_settings_go_first(name, value, caplog):
    caplog.set_level(logging.INFO, "jaxlora")
    jax.config.update(name, value)
    keep_compiled_programs()
    assert getattr(jax.config, name) == value
    assert jax.config.jax_compilation_cache_dir in (None, "gs://mine", "")
    assert program._Kept.programs is None
    assert not caplog.records


def test_a_folder_that_cannot_be_used(tmp_path, caplog):
    """It is said, and nothing fails; JAX would fail at its first program."""
    (tmp_path / "cache").write_text("a file")
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None
    assert "xla cannot be used: Not a directory. Every start compiles" in caplog.text


@pytest.mark.parametrize("others", ["own", "write"])
def test_a_folder_of_others_is_not_used(tmp_path, monkeypatch, caplog, others):
    """A program that somebody else put there would run."""
    folder = tmp_path / "cache" / "jaxlora" / "xla"
    folder.mkdir(parents=True)
    folder.chmod(0o777 if others == "write" else 0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + (others == "own"))
    keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None
    why = f"it belongs to user {user}" if others == "own" else f"chmod go-w {folder}"
    assert f"{folder} cannot be used: " in caplog.text and why in caplog.text


DAMAGED = """
import pathlib, sys, jax
from jaxlora.cli import main as cli
from jaxlora.train.compilation_cache import keep_compiled_programs
with cli._logging(False):
    keep_compiled_programs()
    for _ in range(2):
        print(jax.jit(lambda x: x + 1)(1))
        jax.clear_caches()
        for entry in pathlib.Path(sys.argv[1]).glob("*-cache"):
            entry.write_bytes(entry.read_bytes()[:9])
"""


def test_a_damaged_entry_is_said_in_a_line(tmp_path):
    folder = tmp_path / "cache" / "jaxlora" / "xla"
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-c", DAMAGED, str(folder)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "2\n2\n"
    lines = [line for line in ended.stderr.splitlines() if "Error reading" in line]
    assert lines and all(f"remove {folder}." in line for line in lines)
    assert "UserWarning" not in ended.stderr and "warnings.warn" not in ended.stderr
