"""Processes with a hub and clients of it, which tests kill at any moment.

Each is a fork of one that has imported everything, and reads a line of JSON for each:
the arguments of `live`, or of `live_with_a_killer`. A fork of the first writes lines
into a file: `ready`; `accepted KEY ID` as soon as a client may know that an operation
is accepted; `outcome KEY TEXT`, or `again KEY TEXT` if an earlier process has told it;
`end`. An operation that was accepted is not sent again by the clients, except for some,
whose ids must be the same.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import traceback

import numpy as np
import sqlalchemy as sa

from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.hf.load import load_model
from jaxlora.serve import ledger
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub
from jaxlora.serve.operation import (
    Create,
    Done,
    Load,
    Operation,
    Pass,
    Save,
    Step,
    Unload,
    encode_outcome,
)
from jaxlora.serve.shared import HubSettings
from jaxlora.serve.storage import Storage
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import Engine
from jaxlora.train.compilation_cache import keep_compiled_programs
from tests.jaxlora.session.conftest import SETTINGS

TENANT, MODELS = "t", ("a", "b", "c")
MOST_OUTSTANDING = 5
KILLER = 251  # no other datum has this token
LOSSES = (
    ChosenLoss.of("cross_entropy", None),
    ChosenLoss.of("ppo", None),
    ChosenLoss.of("dro", {"beta": 0.1}),
)


def operations(model: str, num_steps: int) -> list[Operation]:
    """The operations of a model, which are always the same.

    Its state is saved after every third step, and loaded from there once. Some
    operations fail: a pass with a token that the model lacks, and a save whose name is
    taken.
    """
    rng = np.random.default_rng([num_steps, MODELS.index(model)])
    found: list[Operation] = [
        Create(
            rank=int(rng.integers(1, 9)), lora_alpha=32.0, target_modules=None, seed=1
        )
    ]
    for step in range(1, num_steps + 1):
        for _ in range(rng.integers(1, 4)):
            data = tuple(random_datum(rng) for _ in range(rng.integers(1, 5)))
            loss, is_training = LOSSES[rng.integers(3)], bool(rng.random() < 0.8)
            found.append(Pass(data=data, loss=loss, is_training=is_training))
        decay = 0.1 * float(rng.random())
        params = AdamParams(learning_rate=1e-3, weight_decay=decay, eps=1e-6)
        found.append(Step(params=params))
        if step == 2:
            wrong = Datum(tokens=[1, 9999], target_tokens=[1, 2])
            found.append(Pass(data=(wrong,), loss=LOSSES[0], is_training=True))
        if step % 3 == 0:
            save = Save(checkpoint=f"{TENANT}/{model}/weights/{step}", kind="state")
            found += [save, save] if step == 3 else [save]
        if step == 6:
            key = f"{TENANT}/{model}/weights/3"
            found.append(Load(checkpoint=key, with_optimizer=True))
    save = Save(checkpoint=f"{TENANT}/{model}/weights/last", kind="state")
    return [*found, save, Unload()] if model == "c" else [*found, save]


def steps_taken(num_steps: int) -> list[int]:
    """The numbers that the steps of a model have: the load goes back to the third."""
    return [*range(1, 7), *range(4, num_steps - 2)]


def random_datum(rng) -> Datum:
    n = int(rng.integers(2, 30))
    tokens, targets = rng.integers(3, 250, (2, n))
    weights, old, advantages = rng.normal(size=(3, n)).astype(np.float32)
    return Datum(
        tokens=tokens,
        target_tokens=targets,
        weights=weights,
        logprobs=old - 5.0,
        advantages=advantages,
    )


def open_hub(folder: pathlib.Path, model: str, **settings) -> Hub:
    """Opens the hub of a folder; its thread is not started."""
    keep_compiled_programs()
    engine = Engine(load_model(model), SessionConfig(**SETTINGS))
    storage = Storage(folder / "files")
    database = Database(f"sqlite:///{folder}/jaxlora.db")
    return Hub(engine, storage, database, HubSettings(**settings))


def keep_the_log() -> None:
    """Makes snapshots leave the log as it is, so that all of it can be replayed."""
    put = ledger.Ledger._put

    def put_without_cuts(own, *statements, num_bytes=0):
        kept = [
            one
            for one in statements
            if not (
                isinstance(one[0], sa.Update | sa.Delete)
                and one[0].table.name in ("operations", "pieces")
                and "outcome" not in str(one[0])
                and "has_begun" not in str(one[0])
            )
        ]
        return put(own, *kept, num_bytes=num_bytes)

    ledger.Ledger._put = put_without_cuts


class Clients:
    """A client of each model, all of which may be asked for in other processes, too."""

    def __init__(self, hub: Hub, known: dict[str, str], told: set[str], num_steps: int):
        self.hub, self.known, self.told = hub, known, told
        self.num_steps = num_steps
        self._lock = threading.Lock()

    def say(self, *words: str) -> None:
        with self._lock:
            os.write(1, (" ".join(words) + "\n").encode())

    def run(self, model: str) -> None:
        rng, outstanding = np.random.default_rng(), []
        for seq_id, operation in enumerate(operations(model, self.num_steps), 1):
            key = f"{model}:{seq_id}"
            if key in self.told and rng.random() < 1 - 4 / len(self.told):
                continue
            send = functools.partial(self.hub.submit, TENANT, model, seq_id, operation)
            if (request_id := self.known.get(key)) is not None:
                promise = self.hub.promise(TENANT, request_id)
                assert promise is not None, f"{key} was accepted, and is lost"
            else:
                promise = send()
                promise.accepted.result()
                self.say("accepted", key, promise.request_id)
            if rng.random() < 0.2:
                assert send().request_id == promise.request_id, f"{key} is there twice"
            outstanding.append((key, promise))
            while len(outstanding) > rng.integers(MOST_OUTSTANDING):
                self.tell(*outstanding.pop(0))
        for key, promise in outstanding:
            self.tell(key, promise)

    def tell(self, key: str, promise) -> None:
        outcome = promise.outcome.result()
        digest = hashlib.sha256(encode_outcome(outcome)).hexdigest()[:16]
        kind = type(promise.operation).__name__
        text = {"kind": kind, "digest": digest, "is_done": isinstance(outcome, Done)}
        if kind == "Step":
            text["step"] = outcome.result.step
        word = "again" if key in self.told else "outcome"
        self.say(word, key, json.dumps(text))


def live(
    folder: str,
    model: str,
    num_steps: int,
    known: dict[str, str],
    told: list[str],
    output: str,
) -> None:
    """Runs the load in this process.

    Args:
        folder: Folder of the hub.
        model: Folder of the base model.
        num_steps: Steps of each model.
        known: The request ids that earlier processes have told, by operation.
        told: Operations whose outcomes they have told. A few are asked for again.
        output: The file that the lines go to; another one gets errors.
    """
    redirect(output)
    logging.basicConfig(level=logging.WARNING)
    keep_the_log()
    hub = open_hub(pathlib.Path(folder), model, snapshot_steps=3, snapshot_seconds=0.3)
    hub.engine.prepare(is_training=True)  # a process that ends before tells nothing
    clients = Clients(hub, known, {*told}, num_steps)
    clients.say("ready")
    hub.start()
    threads = [threading.Thread(target=clients.run, args=(m,)) for m in MODELS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.stop()
    clients.say("end")


def operations_with_a_killer() -> dict[str, list[Operation]]:
    """Operations of two models; a datum in one of them has the token `KILLER`."""
    rng = np.random.default_rng(0)
    create = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=1)
    step = Step(params=AdamParams(learning_rate=1e-3))

    def given(*more: Datum) -> Pass:
        data = *(random_datum(rng) for _ in range(3)), *more
        return Pass(data=data, loss=LOSSES[0], is_training=True)

    culprit = given(Datum(tokens=[7, KILLER], target_tokens=[1, 2]))
    return {
        "a": [create, given(), culprit, step, given(), step],
        "b": [create, given(), step, given(), step],
    }


def live_with_a_killer(folder: str, model: str, is_logged: bool, output: str) -> None:
    """Runs operations, one of which ends the process when the device gets it.

    Args:
        folder: Folder of the hub.
        model: Folder of the base model.
        is_logged: Whether the log has its microbatch by then.
        output: The file that lines `outcome KEY TEXT` go to; another one gets errors.
    """
    redirect(output)
    queue = Engine._queue_microbatch
    hub = open_hub(pathlib.Path(folder), model)

    def die(rows=None):
        hub._ledger.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def queue_or_die(engine, run, microbatch, places, batches, rows):
        every = [call.samples[number].token_ids for _, call, number in places]
        is_deadly = KILLER in np.concatenate(every)
        if is_deadly and not is_logged:
            run = die  # before the log has the microbatch
        queue(engine, run, microbatch, places, batches, rows)
        if is_deadly:
            die()

    Engine._queue_microbatch = queue_or_die
    hub.start()
    promises = {
        f"{name}:{seq_id}": hub.submit(TENANT, name, seq_id, operation)
        for name, given in operations_with_a_killer().items()
        for seq_id, operation in enumerate(given, 1)
    }
    for key, promise in promises.items():
        outcome = dataclasses.asdict(promise.outcome.result())
        print("outcome", key, json.dumps(outcome, default=lambda _: None), flush=True)
    hub.stop()


def redirect(output: str) -> None:
    """Lets a file get the lines of this process, and another one its errors."""
    for number, suffix in {1: "", 2: ".errors"}.items():
        handle = os.open(output + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)


def main() -> None:
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            given = json.loads(line)
            try:
                (live_with_a_killer if "is_logged" in given else live)(**given)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
