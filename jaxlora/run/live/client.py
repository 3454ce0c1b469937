"""Sends requests to a live run, and waits for the answers."""

import math
import pathlib
import time
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.run.live.mailbox import FOLDER, Action, Answer, ControlRequest, Mailbox
from jaxlora.run.live.status_file import STATUS_FILE, read_status
from jaxlora.run.lock import find_owner

_POLL_SECONDS = 0.2
_LIVENESS_SECONDS = 2.0


def send(
    folder: pathlib.Path,
    action: Action,
    job: str,
    *,
    reason: str = "",
    settings: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Answer:
    """Makes a request to the run that trains in a folder, and returns the answer.

    A request to resume a job waits in the folder if no process trains the run: a run
    ends when only paused jobs are left, and could not continue otherwise.

    Args:
        folder: Folder of the run.
        action: What is asked for.
        job: Name of the job.
        reason: Text that says why, for `stop` and `pause`.
        settings: Settings of the job to add; see `job_settings`.
        timeout: Seconds to wait for the answer; None: until the run ends.

    Raises:
        ConfigError: No run trains in the folder, it is still compiling, this user may
            not steer it, or it did not answer in time.
        CheckpointError: A file of the run is damaged.
    """
    mailbox = Mailbox(folder)
    if not (folder / FOLDER).exists() and (owner := find_owner(folder)) is not None:
        raise ConfigError(
            f"the run in {folder} takes no requests yet: {owner} is still compiling. "
            "Make the request again once jaxlora status shows the jobs."
        )
    mailbox.check()
    request = ControlRequest(action=action, job=job, reason=reason, settings=settings)
    if find_owner(folder) is None:
        if action != "resume":
            cure = "Continue the run with jaxlora train --resume first."
            if action == "add":
                cure = "Add the job to the run file, and run jaxlora train --resume."
            raise ConfigError(
                f"no process trains the run in {folder}, so the request was not made. "
                f"{cure}"
            )
        return _post_for_later(folder, mailbox, request)
    name = mailbox.post(request)
    end = math.inf if timeout is None else time.monotonic() + timeout
    checked, has_ended = time.monotonic(), False
    while (answer := mailbox.take_answer(name)) is None:
        now = time.monotonic()
        if has_ended:  # its last answer was looked for since
            mailbox.withdraw(name)
            raise ConfigError(
                f"the run in {folder} ended before it answered, and the request is "
                "taken back. If the process was killed, it may have taken effect just "
                "before: see jaxlora status. Continue the run with jaxlora train "
                "--resume."
            )
        if now > end:
            raise ConfigError(
                f"the run in {folder} has not answered in {timeout:g} s. The request "
                "stays, and takes effect when its window ends."
            )
        if now - checked > _LIVENESS_SECONDS:
            has_ended, checked = find_owner(folder) is None, now
        time.sleep(_POLL_SECONDS)
    return answer


def _post_for_later(
    folder: pathlib.Path, mailbox: Mailbox, request: ControlRequest
) -> Answer:
    """Leaves a request for the process that continues the run."""
    text = f"the request for job {request.job!r} waits for --resume."
    if (folder / STATUS_FILE).exists():
        jobs = {job.name: job.progress for job in read_status(folder).run.jobs}
        found = jobs.get(request.job)
        if found is None:
            text = f"there is no job {request.job!r}; there are: {', '.join(jobs)}."
            return Answer(is_accepted=False, text=text)
        if found.is_over:
            text = f"job {request.job!r} has ended already ({found.status}): "
            return Answer(is_accepted=False, text=f"{text}{found.reason}.")
        text = f"job {request.job!r} continues when you run jaxlora train --resume."
    mailbox.post(request)
    return Answer(is_accepted=True, text=text)


def job_settings(path: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Reads the settings of a job to add from a YAML file.

    Paths that exist are made absolute, as the run may have another working directory.

    Args:
        path: A mapping with the keys of a job in a run file.
        folder: Folder of the run. The job takes the `defaults` of the run file with
            which the run has begun, if it was one.

    Returns:
        The settings that the files have, as JSON values.

    Raises:
        ConfigError: A file or a setting is invalid.
    """
    from jaxlora.config.run_file import begun_defaults, load_job
    from jaxlora.run.folder import RUN_FILE_COPY

    copy = folder / RUN_FILE_COPY
    job = load_job(path, begun_defaults(copy) if copy.exists() else {})
    settings = job.model_dump(mode="json", exclude_unset=True)
    for name in ("data", "eval_data"):
        for data in _sets(settings.get(name)):
            data["path"] = _absolute(data["path"])
    for name in ("init_from", "continue_from"):
        if settings.get(name):
            settings[name] = _absolute(settings[name])
    args = settings.get("objective_args", {})
    if args.get("reference") not in (None, "base", "start"):
        args["reference"] = _absolute(args["reference"])
    return settings


def _sets(data: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if data is None else data.get("datasets") or [data]


def _absolute(path: str) -> str:
    found = pathlib.Path(path)
    return str(found.absolute()) if found.exists() else path  # or an id on the hub
