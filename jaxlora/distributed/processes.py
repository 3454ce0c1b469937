"""Values and decisions that the processes of a run exchange.

The exchange goes through JAX's coordination service and touches no device. All
processes must make the same calls in the same order, from the thread that trains. With
one process, every function returns at once.
"""

import itertools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src.distributed import global_state

from jaxlora import errors
from jaxlora.errors import ConfigError, JaxloraError

_PREFIX = "jaxlora/exchange"
_POLL_MS = 5_000
_numbers = itertools.count()  # of the exchanges so far


def index() -> int:
    """Returns the number of this process, from 0."""
    return global_state.process_id


def count() -> int:
    """Returns the number of processes of the run."""
    return global_state.num_processes


def is_first() -> bool:
    """Whether this is the process that writes files, logs and exports."""
    return index() == 0


def gather[T](value: T) -> list[T]:
    """Returns the values of all processes, in their order.

    It waits for all processes. If one of them ends, JAX ends this one, too.

    Args:
        value: A JSON value.
    """
    if count() == 1:
        return [value]
    client, folder = global_state.client, f"{_PREFIX}/{next(_numbers)}"
    assert client is not None
    client.key_value_set(f"{folder}/{index()}", json.dumps(value))
    if is_first():
        texts = [_wait_for(f"{folder}/{i}") for i in range(count())]
        client.key_value_set(f"{folder}/all", json.dumps(texts))
        for i in range(count()):  # all processes have taken part, so none is read again
            client.key_value_delete(f"{folder}/{i}")
    return [json.loads(text) for text in json.loads(_wait_for(f"{folder}/all"))]


def _wait_for(key: str) -> str:
    client = global_state.client
    assert client is not None
    while True:
        try:
            return client.blocking_key_value_get(key, _POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise


def from_first[T](make: Callable[[], T]) -> T:
    """Returns what process 0 makes, on all processes.

    Args:
        make: Returns a JSON value. Only process 0 calls it.

    Raises:
        JaxloraError: The error that `make` raised on process 0.
    """
    if count() == 1:
        return make()
    if not is_first():
        answer: Any = gather(None)[0]
        value, failed = answer
        if failed:
            kind, text = failed
            raise getattr(errors, kind)(text)
        return value
    try:
        value = make()
    except JaxloraError as error:
        gather((None, (type(error).__name__, str(error))))
        raise
    gather((value, None))
    return value


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return any(gather(flag))


def check_same(values: Mapping[str, Any], cure: str) -> None:
    """Checks that all processes have the same values.

    Args:
        values: JSON values by name.
        cure: Sentence that says how to make them the same.

    Raises:
        ConfigError: They differ; the text names the first value that does, and the
            processes.
    """
    hosts, all_values = zip(*gather((socket.gethostname(), values)), strict=True)
    first = all_values[0]
    for name in dict.fromkeys(n for values in all_values for n in values):
        for i, values in enumerate(all_values):
            if values.get(name) != first.get(name):
                raise ConfigError(
                    f"processes 0 (on {hosts[0]}) and {i} (on {hosts[i]}) of the same "
                    f"run differ: {name} is {first.get(name)!r:.200} on process 0 and "
                    f"{values.get(name)!r:.200} on process {i}. {cure}"
                )
