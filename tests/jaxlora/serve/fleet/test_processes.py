"""The processes of engines begin again when they end, and end with their front."""

import asyncio
import contextlib
import os
import pathlib
import signal
import sys

import pytest

from jaxlora.cli import serve as cli
from jaxlora.config.serve_config import ServeConfig, load_serve
from jaxlora.errors import ConfigError
from jaxlora.plan.memory import gpu_share
from jaxlora.run.lock import RunLock
from jaxlora.serve.fleet import processes
from jaxlora.serve.fleet.processes import EngineProcess

# It stands for Python: it notes its number, its GPU and its arguments, and ends as an
# engine does.
SCRIPT = """#!/bin/sh
echo $$ $CUDA_VISIBLE_DEVICES $* >> {}
exec cat
"""


@pytest.mark.parametrize("given", [1001, None])
def test_engines_share_the_memory_of_the_host(given, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "default_host_bytes", lambda: 1001)
    settings = {"rank": 8, "host_bytes": given}
    config = ServeConfig(model="m", folder=str(tmp_path), engines=2, session=settings)
    EngineProcess(number=1, folder=tmp_path / "1", device=None).prepare(config)
    session = load_serve(tmp_path / "1/serve.yaml").session
    assert (session.host_bytes, session.rank) == (500, 8)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine whose process is the script, which notes its beginnings in `told`."""
    write_script(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "script"))
    monkeypatch.setattr(processes, "_RESTART_SECONDS", (0.01, 0.01))
    made = EngineProcess(number=1, folder=tmp_path / "1", device="GPU-b")
    made.prepare(config_in(tmp_path))
    return made


def write_script(folder: pathlib.Path) -> None:
    (folder / "script").write_text(SCRIPT.format(folder / "told"))
    (folder / "script").chmod(0o700)


def config_in(folder: pathlib.Path) -> ServeConfig:
    return ServeConfig(model="m", folder=str(folder), engines=2, keys=True)


async def lines(folder: pathlib.Path, number: int) -> list[str]:
    """Waits until so many processes have begun; returns what they have noted."""
    told = folder / "told"
    while not told.exists() or told.read_text().count("\n") < number:
        await asyncio.sleep(0.01)
    return told.read_text().splitlines()


@contextlib.asynccontextmanager
async def kept(process: EngineProcess):
    keeping = asyncio.create_task(process.keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


def test_a_process_that_is_killed_begins_again_and_ends_with_its_input(
    engine, tmp_path
):
    assert engine.folder.stat().st_mode & 0o77 == 0
    config = config_in(tmp_path)

    async def run():
        async with kept(engine):
            (first,) = await lines(tmp_path, 1)
            assert not engine.has_ended
            os.kill(int(first.split()[0]), signal.SIGKILL)
            _, second = await lines(tmp_path, 2)
            assert engine.has_ended
        return second

    pid, device, *arguments = asyncio.run(run()).split()
    assert device == "GPU-b"
    assert arguments == f"-m jaxlora serve {tmp_path}/1/serve.yaml --engine 1".split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    written = cli_config(tmp_path / "1" / "serve.yaml")
    assert written.database_url == config.database_url
    assert written.storage_url == config.storage_url
    assert (written.folder, written.engines) == (str(tmp_path / "1"), 1)
    assert written.demands_keys


def test_a_process_that_cannot_begin_begins_later(engine, tmp_path, caplog):
    (tmp_path / "script").unlink()

    async def run():
        async with kept(engine):
            while not engine.has_ended:
                await asyncio.sleep(0.01)
            write_script(tmp_path)
            await lines(tmp_path, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert "engine 1 has ended before it began: " in caplog.text


def test_an_engine_that_a_killed_front_has_left_may_end(engine, tmp_path, caplog):
    """It writes snapshots first, and keeps others out of its folder as long."""

    async def run():
        with contextlib.ExitStack() as earlier:
            earlier.enter_context(RunLock(engine.folder))
            async with kept(engine):
                while "engine 1 waits for the end of process" not in caplog.text:
                    await asyncio.sleep(0.01)
                assert not (tmp_path / "told").exists()
                earlier.close()
                await lines(tmp_path, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not engine.has_ended


def cli_config(path):
    from jaxlora.config.serve_config import load_serve

    return load_serve(path)


@pytest.mark.parametrize(
    ("given", "visible", "number", "own", "says"),
    [
        (1, [], 1, [], ""),
        (1, ["a"], 1, ["a"], ""),
        (1, ["a", "b"], 1, ["a"], "1 of 2 visible GPUs serve; engines: auto takes all"),
        ("auto", ["a", "b"], 2, ["a", "b"], "2 of 2 visible GPUs serve"),
        ("auto", [], 1, [], ""),
        (3, [], 3, [], ""),
    ],
)
def test_engines_divide_the_gpus(
    given, visible, number, own, says, monkeypatch, capsys
):
    monkeypatch.setattr(gpu_share, "visible_devices", lambda: visible)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    config, devices = cli._divide(ServeConfig(model="m", engines=given))
    assert (config.num_engines, devices) == (number, own)
    assert capsys.readouterr().out.strip() == says
    is_one = number == 1 and len(visible) > 1  # JAX would take the memory of all
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("a" if is_one else "all")


def test_more_engines_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(gpu_share, "visible_devices", lambda: ["a", "b"])
    with pytest.raises(ConfigError, match="engines=3 need as many GPUs, and 2 are"):
        cli._divide(ServeConfig(model="m", engines=3))


def test_visible_gpus(monkeypatch):
    gpu = lambda uuid: gpu_share.GpuUse(
        index=0, uuid=uuid, name="n", driver="1", total_mib=1, used_mib=0
    )
    monkeypatch.setattr(gpu_share.shutil, "which", lambda name: "/bin/nvidia-smi")
    find = lambda environ: gpu_share.visible_devices(
        environ, lambda: [gpu("GPU-a"), gpu("GPU-b")]
    )
    assert find({}) == ["GPU-a", "GPU-b"]
    assert find({"CUDA_VISIBLE_DEVICES": "1, MIG-x"}) == ["1", "MIG-x"]
    assert find({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == ["0"]
    assert find({"CUDA_VISIBLE_DEVICES": "0,none,1"}) == ["0"]
    assert find({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert find({"JAX_PLATFORMS": "cpu"}) == []
