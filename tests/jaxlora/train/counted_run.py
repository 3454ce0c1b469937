"""Counts the programs that a run compiles.

    python -m tests.jaxlora.train.counted_run RUN_FILE {interrupt,resume,train}

trains in this process and prints the counts as one line of JSON.
"""

import collections
import contextlib
import json
import logging
import sys

import jax

from jaxlora import Trainer, load_run
from tests.jaxlora.train.at_window import AtWindow


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


def main(run_file: str, how: str) -> None:
    config = load_run(run_file)
    statuses, result = [], None
    with counting() as (compiled, missed):
        if how == "interrupt":
            with contextlib.suppress(RuntimeError):
                Trainer(config).train(callbacks=[AtWindow(interrupt)])
        else:
            result = Trainer(config).train(resume=how == "resume")
            statuses = [job.progress.status for job in result.jobs]
    counts = {"compiled": compiled, "missed": missed, "statuses": statuses}
    if result is not None:
        counts["num_compilations"] = result.num_compilations
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
