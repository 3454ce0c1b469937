"""How prompts and the tokens of other sequences share the time of sampling."""

from collections.abc import Collection, Iterable
from typing import NamedTuple


class Beginner(NamedTuple):
    """A prompt that is about to run.

    Attributes:
        tenant: The tenant.
        is_scored_only: Whether nothing is generated after it.
    """

    tenant: str
    is_scored_only: bool

    def delays(self, tenant: str) -> bool:
        """Whether sequences of a tenant that generate wait for others' sake.

        The first tokens of a tenant's own samples need their prompts. Prompts that are
        only scored take no rows for long, so there is no end of them.
        """
        return tenant != self.tenant or self.is_scored_only


class PromptTurns:
    """Keeps count of the time that sequences wait for prompts of others.

    All parts of a prompt run before the sequences beside it go on. So each tenant whose
    sequences generate has an account: the seconds of prompts that delay them, less the
    seconds of their own tokens. While one is too far behind, no such prompt begins. In
    the end, tokens have half of the time or more, however many prompts come.
    """

    def __init__(self, most_behind: float):
        """Starts without tenants.

        Args:
            most_behind: Seconds by which tokens may be behind.
        """
        self._most = most_behind
        self._behind: dict[str, float] = {}

    def follow(self, tenants: Iterable[str]) -> None:
        """Takes the tenants whose sequences generate; accounts of others end."""
        self._behind = {one: self._behind.get(one, 0.0) for one in tenants}

    def is_behind(self, tenants: Iterable[str]) -> bool:
        """Whether the tokens of one of these tenants come before any prompt."""
        return any(self._behind.get(one, 0.0) > self._most for one in tenants)

    def delayed(self, prompt: Beginner) -> list[str]:
        """Returns the tenants that a prompt would delay."""
        return [one for one in self._behind if prompt.delays(one)]

    def add_prompts(self, prompts: Collection[Beginner], seconds: float) -> None:
        """Counts the time of parts of prompts."""
        for tenant in self._behind:
            if any(prompt.delays(tenant) for prompt in prompts):
                self._behind[tenant] += seconds

    def add_tokens(self, tenants: Iterable[str], seconds: float) -> None:
        """Counts the time of tokens of some tenants."""
        for one in tenants:
            if one in self._behind:
                self._behind[one] = max(0.0, self._behind[one] - seconds)
