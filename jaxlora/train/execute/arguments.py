"""Arguments and results of the programs of a stage, by name: placement and shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.optimizer import AdapterState
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.models.spec import DecoderSpec
from jaxlora.programs.program import Prepared, Program

# Options of programs that only read and write arrays, or launch few kernels. XLA would
# compile several kernels for each fusion, time them, and choose by times that vary.
SHORT: dict[str, Any] = {"xla_gpu_autotune_level": 0}

# A program that takes and gives one of these replaces it in place.
_REPLACED = frozenset({"state", "params", "pending"})
# Arguments whose shapes may differ from call to call.
_VARYING = frozenset({"batch", "dh", "measured"})

# The shapes of arguments, by name.
Shapes = dict[str, Any]


class StageProgram(Program):
    """A program of a stage, whose arguments have names."""

    def __init__(self, jitted: Any, what: str, identity: Any, takes: tuple[str, ...]):
        """Makes the function; nothing is traced yet.

        Args:
            jitted: The jitted function.
            what: Its name for the log.
            identity: See `Program`.
            takes: Names of its arguments; see `Arguments`.
        """
        varies = [i for i, name in enumerate(takes) if name in _VARYING]
        super().__init__(jitted, what, identity, varies=varies)
        self._takes = takes

    def args(self, shapes: Shapes) -> tuple[Any, ...]:
        """Returns its arguments among those of the stage."""
        return tuple(shapes[name] for name in self._takes)

    def prepare_from(
        self,
        shapes: Shapes,
        suffix: str,
        before_tracing: Callable[[], Any] | None = None,
    ) -> Prepared:
        """Starts to load or to compile the program; see `Program.prepare`.

        Args:
            shapes: Shapes of the arguments of the stage.
            suffix: What the log adds to its name.
            before_tracing: Is called before the function is traced, if it is.
        """
        what = f"{self.what}{suffix}"
        return self.prepare(
            *self.args(shapes), what=what, before_tracing=before_tracing
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """The arguments and results of the programs of a stage.

    Attributes:
        spec: The stage, or a section of it.
        placement: The devices of the stage.
        state: Partition specs of the state of the slots of the stage.
    """

    spec: DecoderSpec
    placement: StageSharding
    state: AdapterState

    @functools.cached_property
    def _specs(self) -> dict[str, Any]:
        """Partition specs by name, of all that is not whole on each device."""
        p, state = self.placement, self.state
        return {
            "base": self.spec.base_specs(),
            "state": state,
            "params": state.params,
            "optimizer_state": state.optimizer_state,
            "weights": state.params,
            "pending": state.pending,
            "batch": p.rows,
            "losses": p.rows,
            "hidden": p.hidden,
            "dh": p.hidden,
            "residuals": p.by_device,
        }

    def _spec_of(self, name: str) -> Any:
        return self._specs.get(name, REPLICATED)

    @property
    def codes(self) -> tuple[str, ...]:
        """Tells the code of optimizers apart that is not in this package."""
        slots = self.spec.slots
        names = () if slots is None else slots.optimizers
        return tuple(OPTIMIZERS[name].fingerprint for name in names)

    def program(
        self,
        what: str,
        run: Callable[..., Any],
        takes: tuple[str, ...],
        gives: tuple[str, ...] | str,
        compiler_options: dict[str, Any] = SHORT,
    ) -> StageProgram:
        """Makes a program that each device runs on its own part of the arrays.

        Args:
            what: Its name for the log.
            run: The function.
            takes: Names of its arguments.
            gives: Names of its results, or of its only one.
            compiler_options: Options of XLA.
        """
        is_one = isinstance(gives, str)
        given = {gives} if is_one else {*gives}
        replaced = _REPLACED & given
        jitted = self.placement.jit(
            run,
            tuple(map(self._spec_of, takes)),
            self._spec_of(gives) if is_one else tuple(map(self._spec_of, gives)),
            donate_argnums=tuple(i for i, n in enumerate(takes) if n in replaced),
            compiler_options=compiler_options,
        )
        options = compiler_options, takes, gives
        identity = "training", what, self.spec, self.placement, options, self.codes
        return StageProgram(jitted, what, identity, takes)

    def placed(self, shapes: Shapes) -> Shapes:
        """Returns the shapes of arrays that are placed as these arguments are."""

        def place(spec: PartitionSpec, tree: Any) -> Any:
            where = self.placement.sharding(spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
            )

        def is_spec(x: object) -> bool:
            return isinstance(x, PartitionSpec)

        return {
            name: jax.tree.map(place, self._spec_of(name), tree, is_leaf=is_spec)
            for name, tree in shapes.items()
        }
