"""The programs of a stage: their arguments by name, and those of the passes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.optimizer import AdapterState
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.models.division import weight_specs
from jaxlora.models.forward import (
    SlotKeys,
    evaluation_options,
    training_options,
)
from jaxlora.models.sections import (
    Position,
    own_settings,
    own_tables,
    with_own_tables,
)
from jaxlora.models.spec import DecoderSpec
from jaxlora.objectives.table import OBJECTIVES, has_reference
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.programs.program import Prepared, Program
from jaxlora.train.execute.stage_passes import StagePasses

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
        what: str | None = None,
        before_tracing: Callable[[], Any] | None = None,
    ) -> Prepared:
        """Starts to load or to compile the program; see `Program.prepare`.

        Args:
            shapes: Shapes of the arguments of the stage.
            suffix: What the log adds to its name.
            what: Its name for the log, if it is another one.
            before_tracing: Is called before the function is traced, if it is.
        """
        return self.prepare(
            *self.args(shapes),
            what=f"{what or self.what}{suffix}",
            before_tracing=before_tracing,
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
            "base": weight_specs(self.spec),
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
        """Tells the code of optimizers and objectives apart that users registered."""
        slots, objectives = self.spec.slots, self.spec.options.objectives
        names = () if slots is None else slots.optimizers
        optimizers = tuple(OPTIMIZERS[name].fingerprint for name in names)
        own = (OBJECTIVES[name].fingerprint for name in objectives)
        return optimizers + tuple(filter(None, own))

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


class PassPrograms:
    """The passes of a stage; each has one program for each batch shape.

    See `StagePasses` for the arguments. A section takes the slots of its whole decoder,
    and its position as a last argument.

    Attributes:
        accumulate: Forward and backward pass of the last stage, which adds to the
            pending gradients. It takes and returns only the pending part of the state,
            as each array costs host time.
        forward: Forward pass of another stage.
        backward: Backward pass of another stage, which adds to the pending gradients.
        evaluate: Forward pass without dropout and without residuals.
    """

    def __init__(self, arguments: Arguments, *, is_section: bool = False):
        """Makes the functions; none is traced yet.

        Args:
            arguments: The arguments of the stage, of the section, or of the decoder.
            is_section: Whether the slots are those of a whole decoder, of which this is
                a section.
        """
        self._arguments, self._spec = arguments, arguments.spec
        spec, passes = self._spec, StagePasses(self._spec, arguments.placement)
        axis = 2 if arguments.placement.num_devices > 1 else 1

        def make(what: str, run: Any, takes: Any, *more: Any) -> StageProgram:
            if is_section:
                run = _of_section(spec.own_part, run, takes, axis)
                takes = *takes, "position"
            return arguments.program(what, run, takes, *more)

        h = () if spec.has_embedding else ("hidden",)
        inputs = "settings", "batch", "keys", *h
        training = training_options(spec)
        self.accumulate = make(
            "training step",
            passes.accumulate,
            ("base", "params", "pending", *inputs),
            ("pending", "losses", "dh"),
            training,
        )
        self.forward = make(
            "forward pass",
            passes.forward,
            ("base", "params", *inputs),
            ("hidden", "residuals"),
            training,
        )
        self.backward = make(
            "backward pass",
            passes.backward,
            ("base", "params", "residuals", "pending", "dh"),
            ("pending", "dh"),
            training,
        )
        self.evaluate = make(
            "evaluation",
            passes.evaluate,
            ("base", "params", *inputs),
            "losses" if spec.has_head else "hidden",
            evaluation_options(spec),
        )

    @property
    def has_backward(self) -> bool:
        """Whether there is anything to train: not in an embedding without adapters."""
        return not self._spec.has_embedding or bool(self._spec.adapter_shapes())

    def prepare(self, shapes: Shapes, suffix: str = "") -> StagePrograms[Prepared]:
        """Starts to compile the passes as a run calls them.

        Args:
            shapes: Shapes of the arguments.
            suffix: What the log adds to the name of a pass; empty: there is one stage.
        """
        if self._spec.has_head:
            what = "forward and backward pass" if suffix else None
            both = self.accumulate.prepare_from(shapes, suffix, what)
            return StagePrograms(last=both)
        forward = self.forward.prepare_from(shapes, suffix)
        if not self.has_backward:
            return StagePrograms(last=forward)
        kept = self._arguments.placed({"residuals": forward.out_info[1]})
        args = self.forward.args(shapes)
        backward = self.backward.prepare_from(
            shapes | kept,
            suffix,
            # It is the transpose of this trace, which a loaded program has not made.
            before_tracing=lambda: self.forward.jitted.eval_shape(*args),
        )
        return StagePrograms(last=backward, forward=forward)

    def prepare_evaluation(
        self, shapes: Shapes, suffix: str, *, evaluates: bool
    ) -> list[Prepared]:
        """Starts to compile the evaluation, if a run calls it.

        Args:
            shapes: Shapes of the arguments.
            suffix: What the log adds to its name.
            evaluates: Whether a job has held-out samples; references evaluate, too.
        """
        if not (evaluates or has_reference(self._spec.options.objectives)):
            return []
        own = {"keys": SlotKeys(baseline=shapes["keys"].baseline)}
        return [self.evaluate.prepare_from(shapes | own, suffix)]

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Program)}


def _of_section(
    spec: DecoderSpec, run: Callable[..., Any], takes: tuple[str, ...], axis: int
) -> Callable[..., Any]:
    """Makes a pass of a section take what its decoder has, and the section's position.

    Args:
        spec: The section, as each device runs it.
        run: The pass; see `StagePasses`.
        takes: Names of its arguments.
        axis: Axis of the layers in pending gradients.
    """

    @functools.wraps(run)
    def run_at(*args: Any) -> Any:
        at: Position = args[-1]
        own = dict(zip(takes, args[:-1], strict=True))
        own["params"] = own_tables(spec, own["params"], at, axis=1)
        if "settings" in own:
            own["settings"] = own_settings(spec, own["settings"], at)
            own["keys"] = dataclasses.replace(own["keys"], first_layer=at.layer)
        if "pending" not in own:
            return run(*own.values())
        every = own["pending"].gradients
        gradients = own_tables(spec, every, at, axis=axis)
        own["pending"] = dataclasses.replace(own["pending"], gradients=gradients)
        new, *others = run(*own.values())
        gradients = with_own_tables(spec, every, new.gradients, at, axis=axis)
        return dataclasses.replace(new, gradients=gradients), *others

    return run_at
