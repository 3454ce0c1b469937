"""Joins the processes of a run."""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import jax

from jaxlora.common.console import complain
from jaxlora.distributed import processes
from jaxlora.distributed.environment import Membership
from jaxlora.distributed.watch import RESUME, Watch
from jaxlora.errors import ConfigError, DeviceError, ProcessError

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
LOST_SECONDS = 60.0


@contextlib.contextmanager
def joined(
    member: Membership,
    *,
    start_seconds: float = START_SECONDS,
    lost_seconds: float = LOST_SECONDS,
) -> Iterator[None]:
    """Connects this process to the others for the time of the block.

    No JAX computation may have run before. If a process fails or is lost, all end: by
    an error here, or by `jaxlora.distributed.watch`. After an error, the process must
    not use JAX any more.

    Args:
        member: The place of this process in the run.
        start_seconds: Time for all processes to connect.
        lost_seconds: Time without a sign of life after which a process is lost.

    Raises:
        ConfigError: The coordinator cannot be reached.
        ProcessError: A computation failed, probably as another process has ended.
    """
    _connect(member, start_seconds, lost_seconds)
    if not processes.is_first():
        logging.getLogger("jaxlora").setLevel(logging.WARNING)
    with Watch(lost_seconds) as watch:
        try:
            yield
            processes.gather(None)  # none may stop its watch while another still works
        except (jax.errors.JaxRuntimeError, DeviceError) as error:
            failed = ProcessError(_explain(error))
            _fail(watch, failed)
            raise failed from error
        except BaseException as error:
            _fail(watch, error)
            raise
    jax.distributed.shutdown()


def _fail(watch: Watch, error: BaseException) -> None:
    """Tells the others of an error, and lets this process end without waiting."""
    # When Python ends, JAX would wait for the other processes. This comes before that.
    atexit.register(_end, 130 if isinstance(error, KeyboardInterrupt) else 1)
    watch.report(error)


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _connect(member: Membership, seconds: float, lost_seconds: float) -> None:
    deadline = time.monotonic() + seconds
    if member.process_id:
        _wait_for_coordinator(member, deadline)
    # JAX would take the handler of SIGTERM, which a run needs to stop between windows.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(deadline - time.monotonic(), _give_up, (member, seconds))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            member.coordinator,
            member.num_processes,
            member.process_id,
            local_device_ids=member.local_device_ids,
            cluster_detection_method="deactivate",
            # The timers here come first, as JAX's abort the process.
            initialization_timeout=int(seconds) + 60,
            heartbeat_timeout_seconds=int(lost_seconds) + 60,
        )
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"process {member.process_id} cannot join the run at "
            f"{member.coordinator}: {error}. Is the port free on process 0, and is "
            "each process id given once?"
        ) from error
    finally:
        timer.cancel()
    logger.info(
        "process %d of %d, %d of %d devices",
        member.process_id,
        member.num_processes,
        jax.local_device_count(),
        jax.device_count(),
    )


def _wait_for_coordinator(member: Membership, deadline: float) -> None:
    """Waits until process 0 listens, as JAX would abort with a stack trace if not."""
    began = time.monotonic()
    while True:
        try:
            with socket.create_connection(member.host_and_port, timeout=5.0):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the coordinator {member.coordinator} cannot be reached from "
                    f"process {member.process_id} on {socket.gethostname()} within "
                    f"{time.monotonic() - began:.0f} s: {error}. Is process 0 started, "
                    "is this its address, and is the port open?"
                ) from error
        time.sleep(0.2)


def _give_up(member: Membership, seconds: float) -> None:
    complain(
        f"jaxlora: error: process {member.process_id} has waited {seconds:g} s for all "
        f"{member.num_processes} processes to connect to {member.coordinator}. Start "
        f"each of them, with the ids 0 to {member.num_processes - 1}."
    )
    # The main thread waits in a call of JAX, where no exception reaches it.
    os._exit(1)


def _explain(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return (
        f"process {processes.index()} of {processes.count()} on "
        f"{socket.gethostname()}: a computation failed: {lines[0]:.300}. If another "
        f"process has ended, this is how the others notice. {RESUME}"
    )
