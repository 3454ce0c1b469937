"""The compiled passes of a stage, or of a kind of sections."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxlora.data.objectives import has_reference
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
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.programs.program import Prepared, Program
from jaxlora.train.execute.arguments import Arguments, Shapes, StageProgram
from jaxlora.train.execute.stage_passes import StagePasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPasses:
    """The passes of a stage that are being compiled; see `StagePrograms`.

    Attributes:
        passes: The forward pass and the backward pass; or the one with both.
        evaluation: The evaluation, if there is any.
        sections: Those of the sections before the head, if the passes are a chain.
    """

    passes: tuple[Prepared, ...]
    evaluation: tuple[Prepared, ...] = ()
    sections: tuple["PreparedPasses", ...] = ()

    @property
    def each(self) -> list[Prepared]:
        """The programs, each once."""
        before = [p for one in self.sections for p in one.each]
        # Alike sections share theirs.
        return [*dict.fromkeys((*before, *self.passes, *self.evaluation))]

    def compiled(self) -> StagePrograms:
        """Waits for the programs."""
        *forward, last = (one.compiled() for one in self.passes)
        return StagePrograms(
            last=last,
            forward=forward[0] if forward else None,
            sections=tuple(one.compiled() for one in self.sections),
        )


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
                run = _of_section(spec, run, takes, axis)
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

    def prepare(
        self, shapes: Shapes, suffix: str = "", *, evaluates: bool = False
    ) -> PreparedPasses:
        """Starts to compile the passes as a run calls them.

        Args:
            shapes: Shapes of the arguments.
            suffix: What the log adds to the name of a pass; empty: there is one stage.
            evaluates: Whether a job has held-out samples; references evaluate, too.
        """
        if not self._spec.has_head:
            passes = self._prepare_both(shapes, suffix)
        else:
            args = self.accumulate.args(shapes)
            what = f"forward and backward pass{suffix}" if suffix else None
            passes = (self.accumulate.prepare(*args, what=what),)
        evaluation = ()
        if evaluates or has_reference(self._spec.options.objectives):
            own = {"keys": SlotKeys(baseline=shapes["keys"].baseline)}
            evaluation = (self.evaluate.prepare_from(shapes | own, suffix),)
        return PreparedPasses(passes=passes, evaluation=evaluation)

    def _prepare_both(self, shapes: Shapes, suffix: str) -> tuple[Prepared, ...]:
        """Starts to compile the forward pass, and the backward pass that follows."""
        forward = self.forward.prepare_from(shapes, suffix)
        if not self.has_backward:
            return (forward,)
        kept = self._arguments.placed({"residuals": forward.out_info[1]})
        args = self.forward.args(shapes)
        backward = self.backward.prepare_from(
            shapes | kept,
            suffix,
            # It is the transpose of this trace, which a loaded program has not made.
            before_tracing=lambda: self.forward.jitted.eval_shape(*args),
        )
        return forward, backward

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Program)}


def _of_section(
    spec: DecoderSpec, run: Callable[..., Any], takes: tuple[str, ...], axis: int
) -> Callable[..., Any]:
    """Makes a pass of a section take what its decoder has, and the section's position.

    Args:
        spec: The section.
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
