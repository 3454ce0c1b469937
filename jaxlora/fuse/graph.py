"""An index of a jaxpr: which equations compute, read and need each of its values."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jax.extend import core

# The parameters of primitives that hold jaxprs.
BODIES = {
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "cond": ("branches",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}
RESULT = -1  # stands for the jaxpr's results among the readers of a value


class Graph:
    """Knows how the equations of a jaxpr depend on each other.

    Attributes:
        jaxpr: The jaxpr.
        live: Whether a result depends on each equation.
        maker: The number of the equation that computes each variable.
        users: The numbers of the live equations that read each variable, and `RESULT`.
        added: Equations of further variables that sites may read, by these.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.live = _live_equations(jaxpr)
        self.maker = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.users: dict[core.Var, list[int]] = {v: [] for v in self.maker}
        for number, eqn in enumerate(jaxpr.eqns):
            if self.live[number]:
                for var in dict.fromkeys(variables(eqn.invars)):
                    self.users.setdefault(var, []).append(number)
        for var in variables(jaxpr.outvars):
            self.users.setdefault(var, []).append(RESULT)
        self.added: dict[core.Var, Any] = {}

    def equation(self, atom: Any) -> Any:
        """Returns the equation that computes an atom; None: none does."""
        if not isinstance(atom, core.Var):
            return None
        is_made = atom in self.maker
        return self.jaxpr.eqns[self.maker[atom]] if is_made else self.added.get(atom)

    def ancestors(
        self,
        atoms: Iterable[Any],
        after: int = -1,
        stops: Callable[[core.Var], bool] = lambda var: False,
    ) -> Iterator[Any]:
        """Yields variables and all from which they are computed, each once.

        Args:
            atoms: The variables; literals among them are passed over.
            after: What this equation and those before it compute is not looked into.
            stops: Returns whether a variable is not looked into.
        """
        todo, seen = list(variables(atoms)), set()
        while todo:
            var = todo.pop()
            if var in seen:
                continue
            seen.add(var)
            yield var
            eqn, last = self.equation(var), len(self.jaxpr.eqns)
            if eqn and self.maker.get(var, last) > after and not stops(var):
                todo += variables(eqn.invars)

    def depends(self, atoms: Iterable[Any], sources: Collection[Any]) -> bool:
        """Returns whether an atom is one of some sources or computed from one."""
        earliest = min(self.maker.get(v, -1) for v in sources)
        return any(v in sources for v in self.ancestors(atoms, after=earliest))

    def is_used_beside(self, var: core.Var, equations: Collection[int]) -> bool:
        """Returns whether an equation other than these, or the caller, reads it."""
        return any(user not in equations for user in self.users.get(var, ()))


def variables(atoms: Iterable[Any]) -> Iterator[core.Var]:
    """Returns the variables among atoms."""
    return (atom for atom in atoms if isinstance(atom, core.Var))


def _live_equations(jaxpr: core.Jaxpr) -> list[bool]:
    """Returns for each equation whether a result of the jaxpr depends on it."""
    needed = set(variables(jaxpr.outvars))
    live = [False] * len(jaxpr.eqns)
    for number in range(len(live) - 1, -1, -1):
        eqn = jaxpr.eqns[number]
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live[number] = True
            needed.update(variables(eqn.invars))
    return live
