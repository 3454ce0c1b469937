"""Measures what clients of `jaxlora serve` get over HTTP.

It writes a checkpoint with random weights, and runs the command over it in a process of
its own, with a key for each tenant. Tenants send what the `tinker` client sends, with
the load of `python -m scripts.bench serve`. The cases, which run in the given order:

    offline   the offline trainer with the jobs of 16 tenants, before the server starts
    life      making a model, publishing, the first sample after that, saving
    lone      requests of 512 tokens and their steps, on an idle server
    closed    16, 1, 4 and 64 tenants that wait for each step
    open      batches that come at half of that speed, whether or not others are done
    sample    1, 16 and 64 requests for samples at a time, and as many chats
    rl        3 tenants that train, alone and beside one with reinforcement learning
    crash     16 tenants whose server is killed; bits of a sequence with and without
    jobs      three jobs over HTTP, and by `jaxlora train` after the server has ended
    heavy     16 tenants, one of which sends 64 times as much; the others' times

`outside_ms` is what HTTP adds to a step: the mean time from its request to its result,
less that from its acceptance by the server's hub until its outcome is on the disk.
`get_` are times of a small request meanwhile, and `accept_` those until a batch is
acknowledged. `cores` are of the server's process, and `compiled` its new programs.

    python -m scripts.bench http --output-dir bench
    python -m scripts.bench http --model tiny --seconds 2 --cases closed open
"""

import argparse
import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxlora.errors import JaxloraError
from scripts.bench.http import cases
from scripts.bench.http.jobs import Comparison
from scripts.bench.http.load import NAME, Columns, Load
from scripts.bench.http.server import Server
from scripts.bench.report import Row, Rows, about, devices, needs_gpu, sections, table
from scripts.bench.run.commands import run_command
from scripts.bench.run.inputs import Inputs, write_checkpoint
from scripts.bench.serve import Case, add_load_options, case_of

_CASES: dict[str, Callable[[Load], AsyncIterator[Columns]]] = {
    "life": cases.life,
    "lone": cases.lone,
    "closed": cases.closed,
    "open": cases.arriving,
    "sample": cases.sample,
    "rl": cases.reinforced,
    "crash": cases.crash,
    "heavy": cases.heavy,
}
_ORDER = ("offline", *[*_CASES][:-1], "jobs", "heavy")
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_load_options(out)
    out.add_argument("--cases", nargs="+", choices=_ORDER, default=list(_ORDER))
    out.add_argument("--sample-tokens", type=int, default=128, help="of a sample")
    out.add_argument("--round-tokens", type=int, default=256, help="of a sample of rl")
    out.add_argument("--rounds", type=int, default=3, help="of rl beside training")
    out.add_argument("--job-tokens", type=int, default=180_000, help="of all jobs")
    out.add_argument(
        "--host-bytes",
        type=int,
        help="memory of the host for adapters in no slot, as in the server's file",
    )
    out.add_argument(
        "--work",
        type=Path,
        help="folder of the checkpoint, which is kept and used again, and of the "
        "server; by default it is temporary",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options.

    Raises:
        JaxloraError: The model is too large for this device, or the server has failed.
    """
    _, backend, kind = devices()
    if (why := needs_gpu(args.model, backend == "gpu")) is not None:
        raise JaxloraError(why)
    rows, device, began = (
        Rows(args.output_dir, "http", tables),
        about(kind),
        time.time(),
    )

    def add(found: Columns) -> None:
        rows.add({**found, "at_s": round(time.time() - began, 1), **device})

    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="jaxlora-bench-http-")
        work = args.work or Path(stack.enter_context(made))
        work.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            written = pool.submit(_write_checkpoint, args, work / "checkpoint")
            if "offline" in args.cases:
                add(_offline(args, work))
            written.result()
        if [*args.cases] != ["offline"]:
            _serve(args, work, add)
    print(rows.tables())


def _write_checkpoint(args: argparse.Namespace, folder: Path) -> None:
    write_checkpoint(Inputs(model=args.model, layers=args.layers), folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _offline(args: argparse.Namespace, work: Path) -> Columns:
    """Runs the offline trainer as a process, whose memory is free afterwards."""
    given = {
        name: getattr(args, name)
        for name in ("model", "layers", "dtype", "sizes", "tenants", "rank", "samples")
    } | {"block-tokens": args.block_tokens, "mean-tokens": args.mean_tokens}
    options = ["--rows", "offline", "--output-dir", str(work / "offline")]
    for name, value in given.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            options += [f"--{name}", *map(str, values)]
    run_command(["scripts.bench", "serve", *_device(args), *options], {})
    *_, row = Rows(work / "offline", "serve", lambda _: "").rows
    return {name: row[name] for name in ("row", "tokens_per_second", "fill", "at_s")}


def _device(args: argparse.Namespace) -> list[str]:
    return [] if args.device is None else ["--device", args.device]


def _serve(
    args: argparse.Namespace, work: Path, add: Callable[[Columns], None]
) -> None:
    case = case_of(args)
    names = [f"t{i}" for i in range(max(args.tenants))] + ["rl", "whole", "killed"]
    log = (args.output_dir or work) / "server.log"
    server = Server(
        work, _settings(case, work, args.host_bytes), names, _device(args), log
    )
    try:
        add({"row": "server starts", "answers_s": round(server.wait(), 2)})
        compared = asyncio.run(_measure(args, work, case, server, add))
        add({"row": "server ends", "seconds": round(server.stop(), 2)})
        if compared is not None:
            add(compared.train())
    finally:
        server.kill()


async def _measure(
    args: argparse.Namespace,
    work: Path,
    case: Case,
    server: Server,
    add: Callable[[Columns], None],
) -> Comparison | None:
    """Runs the cases; returns the jobs that are to be compared."""
    load, compared = Load(case, server, args), None
    try:
        for name in args.cases:
            if name == "jobs":
                compared = Comparison(load, work / "jobs")
                run_case = compared.serve
            elif name != "offline":
                run_case = _CASES[name]
            else:
                continue
            async for row in run_case(load):
                add(row)
    finally:
        await load.close()
    return compared


def _settings(case: Case, work: Path, host_bytes: int | None) -> dict[str, Any]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return {
        "model": str(work / "checkpoint"),
        "model_name": NAME,
        "dtype": case.dtype,
        "port": port,
        "session": {
            "slots": case.slots,
            "rank": case.rank,
            "microbatch_tokens": [*case.sizes],
            "block_tokens": case.block_tokens,
            "host_bytes": host_bytes,
        },
    }


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows: single requests, loads, samples, and the others in lines."""
    kinds = {
        "Single requests": ("ms", "p99_ms", "first_ms", "outside_ms"),
        "Loads": (
            "unfairness", "tokens_per_second", "p50_s", "p99_s", "requests", "fill",
            "accept_p50_ms", "accept_p99_ms", "get_p50_ms", "get_p99_ms", "outside_ms",
            "commit_ms", "cores", "client_cores", "compiled", "resident_gib",
        ),
        "Samples": (
            "sampled_per_second", "p50_s", "p99_s", "publish_s", "sample_s", "train_s",
            "round_s", "first_s", "cores", "compiled",
        ),
    }  # fmt: skip
    # A row belongs to the tables whose first column it has.
    made = {
        title: table([r for r in rows if columns[0] in r], ("row", *columns))
        for title, columns in kinds.items()
    }
    first = {columns[0] for columns in kinds.values()}
    hidden = {"commit", "device", "versions", "date", "at_s"}
    others = [
        {name: value for name, value in row.items() if name not in hidden}
        for row in rows
        if not first & row.keys()
    ]
    return "\n\n".join([sections(made), *map(str, others)])
