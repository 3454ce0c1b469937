"""What happens in a run, as JSON lines and for TensorBoard."""

import json
import pathlib
import time
from typing import Any

from tensorboardX import SummaryWriter

from jaxlora.atomic import write_text

METRICS_FILE = "metrics.jsonl"
_PLOTTED = ("loss", "eval_loss", "grad_norm", "learning_rate")


class RunLog:
    """Writes events; reads them back for the plot.

    Every event has its round, so that a resumed run can drop what came after its
    checkpoint and is about to happen again.
    """

    def __init__(self, folder: pathlib.Path, *, keep_rounds: int | None):
        """Opens the log of a run.

        Args:
            folder: Where metrics.jsonl and tensorboard/ go.
            keep_rounds: Rounds behind the checkpoint that the run goes on from; what
                was written after it is dropped. None: the run starts.
        """
        self._path = folder / METRICS_FILE
        last = -1 if keep_rounds is None else keep_rounds
        kept = [e for e in read_events(self._path) if e["round"] <= last]
        write_text(self._path, "".join(json.dumps(e) + "\n" for e in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=last + 1,
        )

    def event(self, kind: str, round_number: int, **values: Any) -> None:
        """Writes one event.

        Args:
            kind: What happened: window, step, eval or job.
            round_number: The round that it belongs to.
            **values: Numbers and words; `job` and `step` say whose and when.
        """
        record = {
            "event": kind,
            "round": round_number,
            "time": round(time.time(), 3),
            **values,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        job, step = values.get("job"), values.get("step", round_number)
        for key in _PLOTTED if job else ("tokens_per_second",):
            if key in values:
                tag = f"{key}/{job}" if job else key
                self._board.add_scalar(tag, values[key], step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        self._board.close()


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl; a line cut short by a kill is left out."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
