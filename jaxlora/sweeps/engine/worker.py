"""The process that trains the configurations of one group of a sweep.

The driver starts it with `python -m jaxlora.sweeps.engine.worker`, and it connects
back. JAX is imported when the group's devices are set.
"""

import logging
import os
import queue
import signal
import sys
import threading
import time

from jaxlora.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    DataError,
    JaxloraError,
    ModelError,
)
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.transport import Link

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 5.0  # between two signs of life
_END_SECONDS = 120.0  # to write a checkpoint, after which the process is ended
# Errors that another start would meet again, such as a damaged checkpoint.
_FINAL = ConfigError, ModelError, DataError, AdapterError, CheckpointError


class _Driver:
    """Messages of the driver, kept until the run can take them."""

    def __init__(self):
        self.waiting: queue.SimpleQueue[m.ToWorker] = queue.SimpleQueue()
        self.control = None
        self._lock = threading.Lock()

    def receive(self, message: m.ToWorker) -> None:
        with self._lock:
            if self.control is None:
                self.waiting.put(message)
            else:
                self.control.receive(message)

    def ended(self) -> None:
        """Lets the run write a checkpoint; a process that hangs is ended."""
        with self._lock:
            if self.control is None:
                os._exit(1)  # nothing was trained
            self.control.end()
        threading.Timer(_END_SECONDS, os._exit, (1,)).start()
        os.kill(os.getpid(), signal.SIGTERM)

    def on_signal(self, *_) -> None:
        """Ends a process that does not train yet; lets one that is ending go on.

        A run follows its first signal itself. A second one comes when a scheduler ends
        all processes of a job: from it, and at the end of the connection.
        """
        if self.control is None or not self.control.has_begun:
            os._exit(1)

    def attach(self, control) -> None:
        """Lets a `GroupControl` have all messages from now on."""
        with self._lock:
            while not self.waiting.empty():
                control.receive(self.waiting.get())
            self.control = control


def main() -> int:
    """Trains; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    driver = _Driver()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, driver.on_signal)
    link = Link.of_this_process()
    link.listen(driver.receive, driver.ended)
    threading.Thread(target=beat, args=(link,), daemon=True, name="beat").start()
    return follow(link, driver)


def beat(link: Link) -> None:
    """Sends signs of life, which a process that is stopped does not."""
    while True:
        link.send(m.Alive())
        time.sleep(_BEAT_SECONDS)


def follow(link: Link, driver: _Driver) -> int:
    """Trains what the driver sends, and reports a failure; returns the exit status."""
    begin = driver.waiting.get()
    assert isinstance(begin, m.Begin)
    try:
        return train(begin, link, driver)
    except JaxloraError as error:
        logger.error("%s", error)
        is_final = isinstance(error, _FINAL)
        link.send(m.Failed(reason=str(error), is_final=is_final))
    except Exception as error:
        logger.exception("the worker has failed")
        link.send(m.Failed(reason=f"{type(error).__name__}: {error}", is_final=False))
    return 1


def train(begin: m.Begin, link: Link, driver: _Driver) -> int:
    """Trains what the driver gives, until nothing is left or it ends."""
    from jaxlora.config import RunConfig
    from jaxlora.plan.memory.gpu_share import take_free_gpus

    config = RunConfig.model_validate(begin.run)
    take_free_gpus(gathers=config.may_gather)
    from jaxlora.common.heap import keep_freed_memory
    from jaxlora.device_check import start_backend

    keep_freed_memory()
    start_backend()
    from jaxlora.sweeps.engine.group_control import GroupControl
    from jaxlora.train.trainer import RunTrainer

    assert config.sweep is not None
    control = GroupControl(link, config.sweep.early_exit)
    trainer = RunTrainer(config, None, control)
    driver.attach(control)
    trainer.train(callbacks=[control])
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # threads that read data and the connection may still wait
