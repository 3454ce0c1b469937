"""`jaxlora serve` and `jaxlora keys`."""

import argparse
import contextlib
import datetime
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxlora.cli.options import Command, add_device, add_overrides, use_device
from jaxlora.common.console import complain, literal, plain_table, say, show, stdout
from jaxlora.errors import ConfigError

if TYPE_CHECKING:
    from jaxlora.config.serve_config import ServeConfig
    from jaxlora.serve.keys import Keys

# What `jaxlora[serve]` and `jaxlora[postgres]` install, by the names of imports.
_EXTRA = {"fastapi", "starlette", "uvicorn", "sqlalchemy", "obstore", "zstandard"} | {
    *("prometheus_client", "h11"),
    "google",
}
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


@contextlib.contextmanager
def _with_extra() -> Iterator[None]:
    """Says how to install what only the server needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise ConfigError(
            f"the server needs {error.name}, which is not installed. Run: pip install "
            "'jaxlora[serve]'"
        ) from error


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("serve_file", help="YAML; see docs/serve.md")
    add_overrides(parser)
    add_device(parser)
    # One process of several, which ends when its input does; see `serve_engines`.
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)


def _serve(arguments: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit status."""
    from jaxlora.config.serve_config import load_serve

    config = load_serve(arguments.serve_file, arguments.overrides)
    use_device(arguments)
    with _with_extra():
        from jaxlora.serve.app import serve
        from jaxlora.serve.fleet.processes import serve_engines
    from jaxlora.plan.memory.gpu_share import take_free_gpus

    if arguments.engine is not None:
        threading.Thread(target=_end_with_input, daemon=True).start()
        take_free_gpus()
        return serve(config, engine=arguments.engine)
    config, devices = _divide(config)
    greet = lambda: _greet(config, arguments.serve_file)
    if config.num_engines > 1:
        status = serve_engines(config, devices, on_start=greet)
    else:
        take_free_gpus()
        status = serve(config, on_start=greet)
    say("the server has ended; what it has acknowledged is on the disk.")
    return status


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _divide(config: "ServeConfig") -> "tuple[ServeConfig, list[str]]":
    """Returns the settings with a number of engines, and the GPUs that these get.

    Raises:
        ConfigError: There are fewer GPUs.
    """
    from jaxlora.plan.memory.gpu_share import visible_devices

    devices = visible_devices()
    number = max(1, len(devices)) if config.engines == "auto" else config.engines
    if devices and number > len(devices):
        raise ConfigError(
            f"engines={number} need as many GPUs, and {len(devices)} are visible. "
            "Lower it, or set engines: auto."
        )
    if len(devices) > 1:
        rest = len(devices) - number
        says = f"{number} of {len(devices)} visible GPUs serve"
        say(f"{says}; engines: auto takes all" if rest else says)
    if number == 1 and len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]  # JAX would take all
    return config.replace(engines=number), devices[:number]


def _greet(config: "ServeConfig", file: str) -> None:
    """Says where the server is, and how to begin."""
    scheme = "http" if config.tls is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = config.public_url or f"{scheme}://{host}:{config.port}"
    say(f"jaxlora serves {config.served_name} at {address}")
    if config.demands_keys:
        say(f"  keys: jaxlora keys add {file} TENANT makes one")
    else:
        say("  no key is needed, as only this machine reaches it")
    key = "tml-..." if config.demands_keys else "tml-local"
    say(f"  Tinker clients: TINKER_BASE_URL={address} TINKER_API_KEY={key}")
    say(f"  in a browser: {address}/")
    sys.stdout.flush()  # a pipe or a service would show it when the server ends


def _add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "rotate", "revoke"))
    parser.add_argument("serve_file", help="the server's YAML; it may be running")
    parser.add_argument(
        "subject",
        nargs="?",
        help="add: the tenant; list: only this tenant; rotate, revoke: id of the key",
    )
    parser.add_argument(
        "--scopes",
        default="train,sample,read",
        help="add: what it allows, of train, sample, read and admin; default "
        "%(default)s",
    )
    parser.add_argument(
        "--expires",
        metavar="TIME",
        type=_duration,
        help="add: how long it is valid, such as 90d; default: until it is revoked. "
        "rotate: how long the old one still is; default 1d",
    )
    parser.add_argument("--note", default="", help="add: a remark for the list")


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time, such as 30m, 12h or 90d"
        )
    return int(match[1]) * _SECONDS[match[2]]


def _keys(arguments: argparse.Namespace) -> None:
    from jaxlora.config.serve_config import load_serve

    config = load_serve(arguments.serve_file)
    with _with_extra():
        from jaxlora.serve.database import Database
        from jaxlora.serve.keys import Keys
    with contextlib.closing(Database(config.database_url)) as database:
        keys = Keys(database)
        if arguments.action == "list":
            _list(keys, arguments.subject)
            return
        if arguments.subject is None:
            what = "the tenant" if arguments.action == "add" else "the id of the key"
            raise ConfigError(
                f"jaxlora keys {arguments.action} needs {what} at the end."
            )
        _change(keys, arguments)
    if not config.demands_keys:
        complain(
            "note: this server demands no keys, as only this machine reaches it. Set "
            "keys: true to demand them."
        )


def _change(keys: "Keys", arguments: argparse.Namespace) -> None:
    from jaxlora.serve.keys import REMEMBERED_SECONDS

    if arguments.action == "revoke":
        key = keys.revoke(arguments.subject)
        say(
            f"revoked key {key.id} of {key.tenant}; a server that runs refuses it "
            f"within {REMEMBERED_SECONDS:g} s"
        )
        return
    if arguments.action == "add":
        new = keys.add(
            arguments.subject,
            [scope.strip() for scope in arguments.scopes.split(",")],
            expires_in=arguments.expires,
            note=arguments.note,
        )
    else:
        grace = _SECONDS["d"] if arguments.expires is None else arguments.expires
        new = keys.rotate(arguments.subject, grace=grace)
    say(new)
    complain("this key is shown only now; the server keeps its hash.")


def _list(keys: "Keys", tenant: str | None) -> None:
    table = plain_table()
    for column in ("id", "tenant", "scopes", "made", "ends", "note"):
        table.add_column(column)
    for key in keys.list(tenant):
        ends = "never" if key.expires_at is None else _date(key.expires_at)
        if key.revoked_at is not None:
            ends = f"revoked {_date(key.revoked_at)}"
        elif not key.is_valid(time.time()):
            ends = f"ended {ends}"
        cells = key.id, key.tenant, ",".join(key.scopes), _date(key.created_at), ends
        table.add_row(*map(literal, (*cells, key.note)))
    show(stdout(), table)


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


SERVE = Command(
    name="serve",
    text="Serve a model to many clients, which train and sample adapters together.",
    example="jaxlora serve serve.yaml",
    add_arguments=_add_serve_arguments,
    run=_serve,
)
KEYS = Command(
    name="keys",
    text="Make, list, rotate and revoke the keys of a server's tenants.",
    example="jaxlora keys add serve.yaml alice",
    add_arguments=_add_keys_arguments,
    run=_keys,
)
