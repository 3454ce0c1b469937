"""Connections between the front and an engine."""

import asyncio
import types

from jaxlora.serve.fleet import relay as module
from jaxlora.serve.fleet.relay import Relay


def test_connections_of_a_burst_are_closed_when_they_are_idle(tmp_path, monkeypatch):
    """Later requests need one, which is the last that was in use."""
    num_open, all_open = 0, asyncio.Event()
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_IDLE_SECONDS", 1.0)

    async def answer(reader, writer):
        nonlocal num_open
        num_open += 1
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            if num_open == 3:
                all_open.set()
            await all_open.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        num_open -= 1
        writer.close()

    async def run():
        path = tmp_path / "socket"
        async with await asyncio.start_unix_server(answer, path):
            relay = Relay(path)
            get = lambda: relay.get("/", [])
            await asyncio.gather(get(), get(), get())
            for clock.now in (0.8, 1.6):
                assert num_open == 3
                await get()
            while num_open > 1:
                await asyncio.sleep(0)
            await relay.end()

    asyncio.run(asyncio.wait_for(run(), 60))
