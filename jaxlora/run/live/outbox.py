"""Answers to requests, which another thread writes while the run trains."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from jaxlora.errors import JaxloraError
from jaxlora.run.live.mailbox import Mailbox
from jaxlora.run.message import Answer

logger = logging.getLogger(__name__)


class Outbox:
    """The answers that are not known to be written yet, by the request's id.

    Writing an answer syncs it to the disk, so it must not hold up training. One thread
    calls the methods.
    """

    def __init__(self, mailbox: Mailbox, answers: Mapping[str, Answer]):
        """Makes the object.

        Args:
            mailbox: Where the answers are written.
            answers: Answers that an earlier process recorded.
        """
        self._mailbox, self._answers = mailbox, dict(answers)
        self._sent: dict[str, Future[None]] = {}
        self._failed: set[str] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="answers")

    def __contains__(self, name: str) -> bool:
        return name in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def answers(self) -> dict[str, Answer]:
        """Answers that must be in the run's record before `deliver`."""
        return dict(self._answers)

    def add(self, name: str, answer: Answer) -> None:
        """Adds an answer, which is written after the next `deliver`."""
        self._answers[name] = answer

    def deliver(self) -> None:
        """Lets the thread write the answers, which the record already holds."""
        self.collect()
        for name, answer in self._answers.items():
            if name not in self._sent:
                self._sent[name] = self._writer.submit(
                    self._mailbox.answer, name, answer
                )

    def collect(self, *, waits: bool = False) -> None:
        """Drops the answers that are written; those that cannot be are tried again.

        Args:
            waits: Whether to wait until the thread has tried all of them.
        """
        for name, future in list(self._sent.items()):
            if not (waits or future.done()):
                continue
            del self._sent[name]
            try:
                future.result()
            except (OSError, JaxloraError) as error:
                if name not in self._failed:
                    logger.warning("a request cannot be answered: %s", error)
                self._failed.add(name)
            else:
                del self._answers[name]

    def close(self) -> None:
        """Waits until the thread has tried to write what was delivered."""
        self._writer.shutdown()
        self.collect()
