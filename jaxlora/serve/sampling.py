"""Calls for samples: opens the version that each needs, and draws from it.

They are in no ledger, and gone when the server ends.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from jaxlora.common.job_name import BASE
from jaxlora.config.session_config import SamplingConfig
from jaxlora.serve.limits import Limits
from jaxlora.serve.operation import Failed
from jaxlora.serve.storage import Storage
from jaxlora.serve.tasks import Tasks
from jaxlora.session.engine import Engine
from jaxlora.session.published import Version
from jaxlora.session.samples import OnTokens, SampleCall, SampleResult, Samples

Outcome = Future[SampleResult | Failed]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A call for samples that was taken.

    Attributes:
        call: The call.
        key: Key in the storage of its version's folder; None: it has none.
        on_tokens: Called in the engine's thread with new tokens; see `Samples`.
        outcome: Gets the result. To cancel it ends the call.
    """

    call: SampleCall
    key: str | None
    on_tokens: OnTokens | None
    outcome: Outcome = dataclasses.field(default_factory=Future)

    def end(self, found: SampleResult | Exception) -> None:
        """Ends the call by its result, or by an error."""
        is_error = isinstance(found, Exception)
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            self.outcome.set_result(Failed.of(found, "a sample") if is_error else found)


class Sampling:
    """Draws samples beside training. Only the engine's thread uses it, but for `ask`.

    Attributes:
        samples: Draws them.
        listeners: Are called with each call that has its result, by any thread.
    """

    def __init__(
        self,
        engine: Engine,
        config: SamplingConfig,
        folder: pathlib.Path | None,
        storage: Storage,
        tasks: Tasks,
        limits: Limits | None = None,
    ):
        """Makes the object; see `Samples` for the first three arguments."""
        self.samples, self._limits = Samples(engine, config, folder, limits), limits
        self.listeners: list[Callable[[SampleCall, SampleResult], None]] = []
        self._storage, self._tasks = storage, tasks

    def ask(self, asked: Asked) -> None:
        """Takes a call, and opens its version from the storage if it has to.

        Raises:
            OverQuota: Its tenant has too many pending tokens.
        """
        if (limits := self._limits) is not None:
            tenant, tokens = asked.call.tenant, asked.call.num_tokens
            limits.begin(tenant, tokens)
            asked.outcome.add_done_callback(lambda _: limits.end(tenant, tokens))
        asked.outcome.add_done_callback(lambda _: self._note_end(asked))
        self._tasks.ask(lambda: self._open(asked))

    def _note_end(self, asked: Asked) -> None:
        if asked.outcome.cancelled():
            self._tasks.ask(lambda: self.samples.cancel(asked.call))
        elif not isinstance(result := asked.outcome.result(), Failed):
            for listener in self.listeners:
                listener(asked.call, result)

    def _open(self, asked: Asked) -> None:
        published, version, key = self.samples.published, asked.call.version, asked.key
        if version == BASE or published.knows(version) or key is None:
            self._begin(asked)
            return
        self._tasks.elsewhere(
            lambda: published.read_folder(self._storage.fetch(key)),
            lambda found: self._begin(asked, found),
            asked.end,
        )

    def _begin(self, asked: Asked, opened: Version | None = None) -> None:
        published, call = self.samples.published, asked.call
        try:
            if opened is not None and published.knows(call.version):
                published.drop(opened)  # another call has opened it
            elif opened is not None:
                published.add(call.version, opened)
            if not asked.outcome.cancelled():
                self.samples.submit(call, asked.end, asked.end, asked.on_tokens)
        except Exception as error:  # nothing was queued, so the engine goes on
            asked.end(error)
