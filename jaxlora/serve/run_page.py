"""The page of a run that trains, served by a thread of the run's process.

It reads the files that the run writes anyway, and only while somebody looks. So the
thread that trains does nothing for it.
"""

import collections
import datetime
import http.server
import json
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.run.job_progress import JobStatus
from jaxlora.run.live.status_file import SavedStatus, read_status
from jaxlora.run.log import METRICS_FILE
from jaxlora.run.status import RunStatus
from jaxlora.run.status_view import in_display_order
from jaxlora.serve.view import (
    Curves,
    Figures,
    Health,
    ModelRow,
    Page,
    Point,
    Rate,
    Sample,
    View,
)

_HOST = "127.0.0.1"
_STATE = "/page/state"
_MOST_BYTES = 2**22  # of each log that one view reads; the next one goes on
_MOST_SAMPLES = 8
# The groups of a sweep have a folder each.
_LOGS = (METRICS_FILE, f"groups/*/{METRICS_FILE}")


def serve_run(folder: pathlib.Path, base: str, port: int) -> str:
    """Serves the page of a run until the process ends, without keeping it from ending.

    Args:
        folder: Folder of the run, which need not be there yet.
        base: The base model.
        port: Port on 127.0.0.1; 0 takes any free one.

    Returns:
        The address of the page.

    Raises:
        ConfigError: The port cannot be used.
    """
    files = RunFiles(folder, base)
    page = Page.of("run", state=_STATE, needs_key=False)

    class Handler(_Handler):
        run_files, run_page = files, page

    try:
        server = http.server.ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--page: port {port} of {_HOST} cannot be used ({error.strerror}). Give "
            "another one, such as --page 0, which takes any free port."
        ) from error
    threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
    return f"http://{_HOST}:{server.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the page, or with what it shows."""

    run_files: "RunFiles"
    run_page: Page
    timeout = 30.0  # of a client that sends nothing

    def do_GET(self) -> None:
        # A page of another site can name this address by a name of its own.
        host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
        url = urllib.parse.urlsplit(self.path)
        if host not in (_HOST, "localhost", "::1"):
            self._send(403, b"this page is served to this machine only", {})
        elif url.path == "/":
            self._send(200, self.run_page.body, self.run_page.headers)
        elif url.path == _STATE:
            query = urllib.parse.parse_qs(url.query)
            after, epoch = (query.get(name, [""])[0] for name in ("after", "epoch"))
            after = int(after) if after.isdecimal() else 0
            view = self.run_files.view(after, epoch)
            headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
            self._send(200, view.json(), headers)
        else:
            self._send(404, b"not found", {})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, as the page asks once a second."""


class RunFiles:
    """Reads what a run writes into its folder, as it grows."""

    def __init__(self, folder: pathlib.Path, base: str):
        """Makes the object.

        Args:
            folder: Folder of the run.
            base: The base model.
        """
        self._folder, self._base = folder, base
        self._began = datetime.datetime.now().astimezone().replace(microsecond=0)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._read: dict[pathlib.Path, tuple[int, int]] = {}  # inode, bytes read
        self._curves = Curves()
        self._rates: collections.deque[Rate] = collections.deque(maxlen=120)
        self._samples: collections.deque[Sample]
        self._samples = collections.deque(maxlen=_MOST_SAMPLES)

    def view(self, after: int = 0, epoch: str = "") -> View:
        """Returns what the page shows.

        Args:
            after: Cursor of the points that it has.
            epoch: Where it has them from.
        """
        with self._lock:
            self._follow()
            saved, health = self._status()
            run = RunStatus(jobs=(), round=0, num_slots=0) if saved is None else saved
            jobs = in_display_order(run.jobs)
            names = {job.name for job in jobs}
            cursor, points = self._curves.after(after, names, epoch)
            return View(
                kind="run",
                title=self._base,
                subtitle=str(self._folder),
                health=health,
                epoch=self._curves.epoch,
                cursor=cursor,
                time=time.time(),
                figures=_figures(run, self._rates),
                models=[_row(run, job, self._curves.last(job.name)) for job in jobs],
                points=points,
                rates=[*self._rates],
                samples=[*reversed(self._samples)],
            )

    def _status(self) -> tuple[RunStatus | None, Health]:
        try:
            saved = read_status(self._folder)
        except ConfigError:
            return None, _PREPARES
        except JaxloraError as error:
            return None, Health(level="bad", text=str(error))
        if datetime.datetime.fromisoformat(saved.written) < self._began:
            return _ended(saved), _PREPARES  # as an earlier process has left it
        if saved.run.is_live:
            return saved.run, Health(level="good", text="training")
        return saved.run, Health(level="over", text="ended")

    def _follow(self) -> None:
        """Reads what the logs have more than the last time."""
        paths = [path for name in _LOGS for path in sorted(self._folder.glob(name))]
        for path in paths:
            inode, begun = self._read.get(path, (0, 0))
            try:
                with open(path, "rb") as file:
                    found = path.stat()
                    if inode and (found.st_ino != inode or found.st_size < begun):
                        self._forget()  # a resumed run writes its log anew
                        return
                    file.seek(begun)
                    data = file.read(_MOST_BYTES)
            except OSError:
                continue  # it is replaced just now
            whole, _, _ = data.rpartition(b"\n")
            self._read[path] = found.st_ino, begun + (len(whole) + 1 if whole else 0)
            for line in whole.splitlines():
                try:
                    self._note(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    continue  # a damaged line, which the run itself complains about

    def _note(self, event: dict[str, Any]) -> None:
        """Takes an event, as metrics.jsonl has it."""
        if (point := Point.of(event)) is not None:
            self._curves.add(event["job"], point)
        match event["event"]:
            case "window":
                rate = Rate(event["time"], event["tokens_per_second"], event["fill"])
                self._rates.append(rate)
            case "sample":
                sample = Sample(
                    model=event["job"],
                    prompt=event["prompt"],
                    text=event["text"],
                    note=f"step {event['step']}",
                )
                self._samples.append(sample)


_PREPARES = Health(level="busy", text="preparing")


def _ended(saved: SavedStatus) -> RunStatus:
    return saved.seen(is_live=False).run


def _figures(run: RunStatus, rates: "collections.deque[Rate]") -> Figures:
    return Figures(
        tokens_per_second=run.tokens_per_second,
        fill=rates[-1].fill if rates else None,
        steps=sum(job.progress.step for job in run.jobs),
        done=run.done_fraction if run.jobs else None,
        seconds_left=run.seconds_left,
        slots=run.num_slots or None,
        resident=sum(job.progress.slot is not None for job in run.jobs),
    )


def _row(run: RunStatus, job: JobStatus, last: Point | None) -> ModelRow:
    """Returns the row of a job; `last` is its last step, as the log has it."""
    progress = job.progress
    newer = last if last is not None and last.step > progress.step else None
    return ModelRow(
        id=job.name,
        name=job.name,
        state=run.status_of(job),
        step=newer.step if newer else progress.step,
        num_steps=job.num_steps,
        rank=job.rank,
        loss=newer.loss if newer else progress.last_loss,
        held_out=progress.best_eval,
        note=progress.reason,
    )
