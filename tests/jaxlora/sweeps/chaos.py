"""Runs a sweep of fake workers whose driver kills itself again and again.

    python -m tests.jaxlora.sweeps.chaos FOLDER OPTIONS

It prints the largest memory of the drivers, in KiB, when a driver has ended by itself.
"""

import contextlib
import json
import os
import pathlib
import random
import resource
import signal
import sys

from jaxlora import LoraJob
from jaxlora.config.sweep_config import ExitRule
from jaxlora.run.lock import RunLock
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sweeps.engine import driver, run
from jaxlora.sweeps.engine.driver import Driver
from jaxlora.sweeps.engine.groups import Group
from jaxlora.sweeps.engine.launch import Launcher
from jaxlora.sweeps.engine.launch_ray import joined_cluster
from jaxlora.sweeps.engine.ledger import Ledger
from jaxlora.sweeps.engine.run import check_same_sweep
from jaxlora.sweeps.engine.state import SweepState
from jaxlora.sweeps.engine.transport import Workers

FAKE = pathlib.Path(__file__).with_name("fake_worker.py")
COMMAND = (sys.executable, "-I", "-S", str(FAKE))


class DyingLedger(Ledger):
    """Kills the process before or after so many evaluations are written; 0: never.

    On a busy machine, several of them share a record.
    """

    def dies(self, after: int, is_before: bool) -> None:
        self.after, self.is_before, self.num_seen = after, is_before, 0

    def append(self, records):
        self.num_seen += sum(len(record.get("points", ())) for record in records)
        dies = self.after and self.num_seen >= self.after
        if dies and self.is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(records)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def drive(folder: pathlib.Path, options: dict, number: int) -> None:
    """Drives the sweep; the first drivers die after a random number of records."""
    rng = random.Random(f"{options['seed']} driver {number}")
    jobs = [{"name": f"c{i}"} for i in range(options["jobs"])]
    rules = [ExitRule(type="halving")] if options["halving"] else []
    state = SweepState([LoraJob(**job, data={"path": "x"}) for job in jobs], rules)
    own = "slots", "steps", "every", "kills", "signal", "pause"
    fake = {key: options[key] for key in own if key in options}
    seconds = options.get("stopped_seconds", driver._STOPPED_SECONDS)
    driver._STOPPED_SECONDS = seconds
    environ = {"JAXLORA_FAKE": json.dumps(fake)}
    made = [
        Group(num_slots=options["slots"], run={"jobs": jobs})
        for _ in range(options["groups"])
    ]
    run.Ledger = DyingLedger
    with (
        RunLock(folder),
        contextlib.closing(run._open(folder, resume=number > 0)) as ledger,
    ):
        after = 0
        if number < options["driver_kills"]:
            after = rng.randrange(4, 5 + options["jobs"] // 20)
        ledger.dies(after, rng.random() < 0.5)
        check_same_sweep(state, ledger)
        if "ray" not in options:
            workers = Workers(
                Launcher(COMMAND, [environ] * len(made), [None] * len(made))
            )
            Driver(folder, state, ledger, workers, made).run()
            return
        os.environ |= environ
        meshes = [MeshSizes()] * len(made)
        with joined_cluster(options["ray"], COMMAND, meshes) as launcher:
            Driver(folder, state, ledger, Workers(launcher), made).run()


def main() -> None:
    folder, options = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    for number in range(options.get("first", 0), options["driver_kills"] + 1):
        pid = os.fork()
        if not pid:
            drive(folder, options, number)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        expected = signal.SIGKILL if number < options["driver_kills"] else 0
        assert status == expected, f"driver {number} ended with {status}"


if __name__ == "__main__":
    main()
