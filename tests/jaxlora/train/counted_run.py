"""Counts the programs that a run compiles."""

import collections
import contextlib
import logging

import jax


@contextlib.contextmanager
def counting():
    """Counts the programs compiled inside, by name, and those not found on the disk."""
    compiled, missed = collections.Counter(), collections.Counter()

    def on_duration(event, seconds, **names):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled[names.get("fun_name", "?").removeprefix("jit(").rstrip(")")] += 1

    class Misses(logging.Handler):
        def emit(self, record):
            if str(record.msg).startswith("PERSISTENT COMPILATION CACHE MISS"):
                missed[str(record.args[0])] += 1

    handler, log = Misses(), logging.getLogger("jax._src.compiler")
    level = log.level
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield compiled, missed
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
        log.removeHandler(handler)
        log.setLevel(level)


def interrupt(trainer):
    """Ends a run in its second window, as a crash would; its checkpoints stay."""
    if trainer.round == 2:
        raise RuntimeError("stop here")
