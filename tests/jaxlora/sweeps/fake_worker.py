"""A worker of a sweep without JAX: a step extends a hash. It imports nothing of ours.

Its losses depend on the name of the configuration alone, and it evaluates at quarters.
`JAXLORA_FAKE` has its options as JSON: `slots`, `steps`, `every` (steps between two
checkpoints), and `kills`: a folder, the number of files that it may get, and a seed. It
writes a file there and kills itself at a random step, until there are that many. With
`signal`, such as SIGSTOP, it sends itself that one, and signs of life until then. A
step takes `pause` seconds.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import threading
import time
from multiprocessing.connection import Client


def next_hash(state: str, name: str, step: int) -> str:
    return hashlib.sha1(f"{state}{name}{step}".encode()).hexdigest()


def loss_of(name: str, step: int) -> float:
    quality = int(hashlib.sha1(name.encode()).hexdigest()[:8], 16) / 2**32
    return 1 + quality + 1 / (1 + step)


class Worker:
    def __init__(self):
        self.options = json.loads(os.environ["JAXLORA_FAKE"])
        self.is_open, self.sending = True, threading.Lock()
        door = json.load(sys.stdin)
        key = bytes.fromhex(door["key"])
        self.connection = Client(tuple(door["address"]), "AF_INET", key)
        self.connection.send_bytes(b"%d" % door["number"])
        self.run, self.held, self.moving = {}, set(), set()
        self.verdicts, self.judged, self.asked = {}, 0, 0
        self.waiting = []
        self.over, self.new, self.is_finishing, self.ticks = {}, set(), False, 0

    # ---- messages ------------------------------------------------------------------

    def send(self, kind, **fields):
        try:
            with self.sending:
                self.connection.send_bytes(f"{kind} {json.dumps(fields)}".encode())
        except OSError:
            self.is_open = False

    def receive(self, waits):
        try:
            while waits or self.connection.poll():
                waits = False
                kind, _, fields = self.connection.recv_bytes().partition(b" ")
                message = kind.decode(), json.loads(fields)
                if kind in (b"Verdict", b"Judged"):  # also while it evaluates
                    self.follow(message)
                else:
                    self.waiting.append(message)
        except (OSError, EOFError):
            self.is_open = False

    def follow(self, message):
        kind, fields = message
        getattr(self, "on_" + kind.lower())(**fields)

    def on_begin(self, run):
        self.folder = pathlib.Path(run["output_dir"])
        (self.folder / "checkpoints").mkdir()
        self.lock = os.open(self.folder / "run.lock", os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.steps = os.open(self.folder / "steps.txt", os.O_WRONLY | os.O_CREAT)
        self.rng = random.Random(f"{self.options['kills'][2]} {self.folder.name}")
        self.left = self.rng.randrange(5, 60)  # steps before it kills itself
        facts = [self.facts(job["name"]) for job in run["jobs"]]
        self.send("Ready", jobs=facts)

    def facts(self, name):
        return {"name": name, "num_steps": self.options["steps"]}

    def on_give(self, name, sources, settings):
        if settings is not None:
            if "bad" in name:
                progress = {"status": "failed", "reason": "it is bad"}
                self.send("Ended", name=name, progress=progress)
                return
            self.send("Ready", jobs=[self.facts(name)])
        step, state, origin = 0, "", None
        for source in sources:
            path = pathlib.Path(source) / "checkpoints" / "state.json"
            found = json.loads(path.read_text()) if path.exists() else None
            if found and name in found["run"]:
                step, state = found["run"][name]
                origin = source
                break
            if found and name in found["over"]:
                self.send("Ended", **found["over"][name])
                return
        self.run[name] = [step, state]
        self.moving.discard(name)  # it may have been here before
        if origin is not None:
            self.new.add(name)
            if step in self.rungs():
                self.evaluate([name])

    def on_verdict(self, name, **verdict):
        self.verdicts[name] = verdict

    def on_judged(self, number):
        self.judged = number

    def on_ask(self, action, name, reason):
        if action == "stop" and name in self.run:
            self.end(name, "stopped", reason)
        elif action == "pause":
            self.held.add(name)
        elif action == "resume":
            self.held.discard(name)
        elif action == "release":
            self.moving.add(name)
            self.save()
        elif action == "drop":
            self.run.pop(name, None)
            self.moving.discard(name)

    def on_finish(self):
        self.is_finishing = True

    def on_end(self):
        self.is_open = False

    # ---- training ------------------------------------------------------------------

    def rungs(self):
        steps = self.options["steps"]
        return [steps // 4, steps // 2, steps]

    def can_train(self, name):
        verdict = self.verdicts.get(name, {})
        waits = verdict.get("waits") and verdict["step"] == self.run[name][0]
        return not (waits or name in self.held or name in self.moving)

    def evaluate(self, names):
        self.asked += 1
        steps = {n: self.run[n][0] for n in names}
        points = [[n, step, loss_of(n, step), None] for n, step in steps.items()]
        self.send("Evaluated", number=self.asked, points=points)
        while self.is_open and self.judged < self.asked:
            self.receive(waits=True)

    def tick(self):
        for name, (step, _) in list(self.run.items()):
            stop = self.verdicts.get(name, {}).get("stop")
            if stop and step >= self.verdicts[name]["step"]:
                self.end(name, "stopped early", stop[1], stop[0])
            elif step == self.options["steps"]:  # killed before it could end
                self.end(name, "finished", "all steps are done")
        active = [name for name in self.run if self.can_train(name)]
        active = active[: self.options["slots"]]
        time.sleep(self.options.get("pause", 0))
        due = []
        for name in active:
            step, state = self.run[name]
            self.run[name] = [step + 1, next_hash(state, name, step)]
            os.write(self.steps, f"{name} {step + 1}\n".encode())
            self.left -= 1
            if not self.left:
                self.die()
            if step + 1 in self.rungs():
                due.append(name)
        if due:
            self.evaluate(due)
        for name in active:
            is_done = name in self.run and self.run[name][0] == self.options["steps"]
            if is_done and self.is_open:
                self.end(name, "finished", "all steps are done")
        if not self.ticks:
            self.tell()
        self.ticks += 1
        if self.ticks % self.options["every"] == 0:
            self.save()
        return bool(active)

    def end(self, name, status, reason, rule=None):
        step, state = self.run.pop(name)
        folder = self.folder / "adapters" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hash").write_text(state)
        progress = {"status": status, "reason": reason, "stopped_by": rule}
        progress |= {"step": step, "best_eval": loss_of(name, step)}
        self.over[name] = dict(name=name, progress=progress, folder=str(folder))
        self.send("Ended", **self.over[name])

    def save(self):
        path = self.folder / "checkpoints" / "state.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"run": self.run, "over": self.over}))
        new.rename(path)
        for name in (self.new | self.moving) & self.run.keys():
            self.send("Saved", name=name, is_released=name in self.moving)
        self.new.clear()

    def die(self):
        folder, most, _ = self.options["kills"]
        for number in range(most):
            path = f"{folder}/{number}"
            try:  # two workers must not take the last one
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), getattr(signal, self.options.get("signal", "SIGKILL")))
            return

    def beat(self):
        while self.is_open:
            time.sleep(0.2)
            self.send("Alive")

    def main(self):
        if "signal" in self.options:
            self.send("Alive")
            threading.Thread(target=self.beat, daemon=True).start()
        has_trained = False
        while self.is_open and not (self.is_finishing and not has_trained):
            if not has_trained and hasattr(self, "folder"):
                self.save()
                self.tell()
            self.receive(waits=not has_trained)
            while self.waiting:
                self.follow(self.waiting.pop(0))
            # Without the driver, nobody decides about what was evaluated last.
            has_trained = hasattr(self, "folder") and self.is_open and self.tick()
        if hasattr(self, "folder"):
            self.save()

    def tell(self):
        jobs = {
            name: {
                "step": step,
                "status": "running" if self.can_train(name) else "paused",
            }
            for name, (step, _) in self.run.items()
        }
        self.send("Progress", jobs=jobs)


if __name__ == "__main__":
    Worker().main()
