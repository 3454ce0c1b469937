"""Limits of requests and quotas of tenants."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxlora.config.serve_config import Quota, ServeConfig
from jaxlora.errors import DataError, JaxloraError
from jaxlora.serve.registry import Registry
from jaxlora.session.datum import Datum


class OverQuota(JaxloraError):
    """A tenant has used its quota for now; the client sends the request again."""


class OverStorage(JaxloraError):
    """A tenant has no room left in the storage, and must delete something."""


class TokenBucket:
    """Tokens that flow in at a rate, up to those of some seconds.

    A tenant may go below zero with one request, which then must be paid back before the
    next one begins, so a request larger than the bucket does not wait forever.
    """

    SECONDS = 10.0

    def __init__(self, rate: float, now: float):
        """Makes a full bucket.

        Args:
            rate: Tokens a second.
            now: Seconds of the clock.
        """
        self.rate = rate
        self._level, self._at = rate * self.SECONDS, now

    def wait(self, now: float) -> float:
        """Returns the seconds until a request may begin."""
        self._fill(now)
        return max(0.0, -self._level / self.rate)

    def take(self, tokens: float, now: float) -> None:
        """Takes the tokens of a request that begins."""
        self._fill(now)
        self._level -= tokens

    def _fill(self, now: float) -> None:
        full = self.rate * self.SECONDS
        self._level = min(full, self._level + (now - self._at) * self.rate)
        self._at = now


class Limits:
    """Limits of requests, and the tenants' use of their quotas.

    Any thread may use it.
    """

    def __init__(
        self,
        config: ServeConfig,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes the object.

        Args:
            config: The server's settings.
            registry: Counts what tenants have.
            clock: Returns seconds, of any origin.
        """
        self.config, self._registry, self._clock = config, registry, clock
        self._lock = threading.Lock()
        self._pending: defaultdict[str, int] = defaultdict(int)
        self._buckets: dict[str, TokenBucket] = {}

    def quota(self, tenant: str) -> Quota:
        """Returns the quota of a tenant."""
        return self.config.quota(tenant)

    def check_data(self, data: Sequence[Datum]) -> int:
        """Checks the size of a pass; returns its tokens.

        Raises:
            DataError: It has more datums or tokens than a request may have.
        """
        most = self.config.limits
        if len(data) > most.datums:
            raise DataError(
                f"the request has {len(data)} datums, and this server takes at most "
                f"{most.datums} at once. Send several requests; their gradients add up."
            )
        tokens = sum(len(datum.tokens) for datum in data)
        if tokens > most.tokens:
            raise DataError(
                f"the request has {tokens} tokens, and this server takes at most "
                f"{most.tokens} at once. Send several requests; their gradients add up."
            )
        return tokens

    def check_new_model(self, tenant: str) -> None:
        """Checks that a tenant may have another model.

        Raises:
            OverQuota: It has as many as it may have.
        """
        most = self.quota(tenant).models
        if most is not None and (has := self._registry.count(tenant, "model")) >= most:
            raise OverQuota(
                f"you have {has} models, and your quota is {most}. Unload one first."
            )

    def check_storage(self, tenant: str, num_bytes: int = 0) -> None:
        """Checks that a tenant has room for more bytes.

        Raises:
            OverStorage: It has not.
        """
        most = self.quota(tenant).storage_bytes
        if most is None:
            return
        has = self._registry.stored_bytes(tenant)
        if has + num_bytes > most or has >= most:
            raise OverStorage(
                f"you have stored {has:,} bytes, and your quota is {most:,}. Delete "
                "checkpoints or uploads first."
            )

    def begin(self, tenant: str, tokens: int) -> None:
        """Counts tokens of a request as pending until `end`.

        Raises:
            OverQuota: The tenant has too many already. One request is always taken.
        """
        most = self.quota(tenant).pending_tokens
        with self._lock:
            pending = self._pending[tenant]
            if most is not None and pending and pending + tokens > most:
                raise OverQuota(
                    f"you have {pending:,} pending tokens, and your quota is {most:,}. "
                    "Wait for results before you send more."
                )
            self._pending[tenant] += tokens

    def end(self, tenant: str, tokens: int) -> None:
        """Takes back what `begin` has counted."""
        with self._lock:
            self._pending[tenant] -= tokens

    def pending(self, tenant: str) -> int:
        """Returns a tenant's pending tokens."""
        with self._lock:
            return self._pending[tenant]

    def may_run(self, tenant: str) -> bool:
        """Whether a tenant's next request may begin, by its tokens a second."""
        with self._lock:
            bucket = self._bucket(tenant)
            return bucket is None or bucket.wait(self._clock()) == 0.0

    def spend(self, tenant: str, tokens: int) -> None:
        """Takes the tokens of a request that begins from the tenant's rate."""
        with self._lock:
            if (bucket := self._bucket(tenant)) is not None:
                bucket.take(tokens, self._clock())

    def _bucket(self, tenant: str) -> TokenBucket | None:
        rate = self.quota(tenant).tokens_per_second
        if rate is None:
            return None
        if tenant not in self._buckets:
            self._buckets[tenant] = TokenBucket(rate, self._clock())
        return self._buckets[tenant]
