"""The compiled passes of a stage, or of a kind of sections."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec

from jaxlora.adapters.optimizer import AdapterState
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.data.objectives import has_reference
from jaxlora.data.pack import PackedBatch
from jaxlora.models.forward import (
    JobLosses,
    SlotKeys,
    evaluation_options,
    training_options,
)
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.memory.inputs import baseline_shape, batch_shapes, key_shapes
from jaxlora.programs.program import Prepared, Program
from jaxlora.scheduler import Limits
from jaxlora.train.execute.section_passes import SectionPasses
from jaxlora.train.execute.stage_passes import StagePasses

# Makes a program of a decoder: of its name, function, partition specs of what it takes
# and gives, and options of `Program` and `jax.jit`.
MakeProgram = Callable[..., Program]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPasses:
    """The passes of a stage that are being compiled; see `StagePrograms`.

    Attributes:
        last: The pass with gradients; `forward` is before it on all but the last stage.
        reference: The evaluation by references, of a run that has any.
        sections: Those of the sections before `last`, if the passes are a chain.
    """

    last: Prepared
    forward: Prepared | None = None
    reference: tuple[Prepared, ...] = ()
    sections: tuple["PreparedPasses", ...] = ()

    @property
    def each(self) -> list[Prepared]:
        """The passes, each once."""
        before = [p for one in self.sections for p in one.each]
        forward = () if self.forward is None else (self.forward,)
        found = (*before, *forward, self.last, *self.reference)
        return [*dict.fromkeys(found)]  # alike sections share theirs

    def compiled(self) -> StagePrograms:
        """Waits for the programs."""
        forward = None if self.forward is None else self.forward.compiled()
        sections = tuple(one.compiled() for one in self.sections)
        return StagePrograms(
            last=self.last.compiled(), forward=forward, sections=sections
        )


class PassPrograms:
    """The passes of a stage; each has one program for each batch shape.

    See `StagePasses` for the arguments; `SectionPasses` for those of a section.

    Attributes:
        accumulate: Forward and backward pass of the last stage, which adds to the
            pending gradients. It takes and returns only the pending part of the state,
            as each array costs host time.
        forward: Forward pass of another stage.
        backward: Backward pass of another stage, which adds to the pending gradients.
        evaluate: Forward pass without dropout and without residuals.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        placement: StageSharding,
        state: AdapterState,
        make: MakeProgram,
        *,
        is_section: bool = False,
    ):
        """Makes the functions; none is traced yet.

        Args:
            spec: The stage, the section, or the whole decoder.
            placement: Its devices.
            state: Partition specs of the state of the slots.
            make: Makes a program of this decoder.
            is_section: Whether the slots are those of a whole decoder, of which this is
                a section.
        """
        self._spec, self._placement = spec, p = spec, placement
        passes: Any = (SectionPasses if is_section else StagePasses)(spec, p)
        at = (PartitionSpec(),) if is_section else ()
        base, params, pending = spec.base_specs(), state.params, state.pending
        h = () if spec.has_embedding else (p.hidden,)
        # Settings, batch, and keys.
        inputs = REPLICATED, p.rows, REPLICATED, *at, *h
        training = training_options(spec)
        self.accumulate = make(
            "training step",
            passes.accumulate,
            (base, params, pending, *inputs),
            (pending, p.rows, p.hidden),
            varies=(4,),
            donate_argnums=2,
            compiler_options=training,
        )
        self.forward = make(
            "forward pass",
            passes.forward,
            (base, params, *inputs),
            (p.hidden, p.by_device),
            varies=(3,),
            compiler_options=training,
        )
        self.backward = make(
            "backward pass",
            passes.backward,
            (base, params, p.by_device, pending, *at, p.hidden),
            (pending, p.hidden),
            varies=(5,) if is_section else (4,),
            donate_argnums=3,
            compiler_options=training,
        )
        self.evaluate = make(
            "evaluation",
            passes.evaluate,
            (base, params, *inputs),
            _evaluated(p) if spec.has_head else p.hidden,
            varies=(3,),
            compiler_options=evaluation_options(spec),
        )

    @property
    def has_backward(self) -> bool:
        """Whether there is anything to train: not in an embedding without adapters."""
        return not self._spec.has_embedding or bool(self._spec.adapter_shapes())

    def prepare(
        self,
        base: Mapping[str, Any],
        state: AdapterState,
        settings: SlotSettings,
        limits: Limits,
        name: str = "",
        at: Sequence[Any] = (),
    ) -> PreparedPasses:
        """Starts to compile the forward and backward pass as a run calls them.

        Args:
            base: Frozen weights of the stage, or their shapes.
            state: State of the slots.
            settings: Settings of the slots.
            limits: Limits of the microbatches.
            name: What the log adds to the name of a pass; empty: there is one stage.
            at: The position, of a section.
        """
        spec, keys = self._spec, key_shapes(self._spec, self._placement)
        hidden = self._hidden_shape(limits)
        h = () if spec.has_embedding else (hidden,)
        inputs = settings, self._batch_shapes(limits), keys, *at, *h
        reference, params = (), state.params
        if has_reference(spec.options.objectives):
            reference = self.prepare_evaluation(
                base, params, settings, limits, name, at
            )
        if spec.has_head:
            args = base, state.params, state.pending, *inputs
            what = f"forward and backward pass{name}" if name else None
            last = self.accumulate.prepare(*args, what=what)
            return PreparedPasses(last=last, reference=reference)
        args = base, state.params, *inputs
        forward = self.forward.prepare(*args, what=f"forward pass{name}")
        if not self.has_backward:
            return PreparedPasses(last=forward, reference=reference)
        where = self._placement.sharding(self._placement.by_device)
        kept = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            forward.out_info[1],
        )
        backward = self.backward.prepare(
            *(base, state.params, kept, state.pending, *at, hidden),
            what=f"backward pass{name}",
            # It is the transpose of this trace, which a loaded program has not made.
            before_tracing=lambda: self.forward.jitted.eval_shape(*args),
        )
        return PreparedPasses(last=backward, forward=forward, reference=reference)

    def prepare_evaluation(
        self,
        base: Mapping[str, Any],
        params: Mapping[str, Any],
        settings: SlotSettings,
        limits: Limits,
        name: str = "",
        at: Sequence[Any] = (),
    ) -> tuple[Prepared, ...]:
        """Starts to compile the evaluation of a microbatch; see `prepare`.

        The parameters may be given by their shapes.
        """
        keys = SlotKeys(baseline=baseline_shape(self._spec, self._placement))
        h = () if self._spec.has_embedding else (self._hidden_shape(limits),)
        args = base, params, settings, self._batch_shapes(limits), keys, *at, *h
        return (self.evaluate.prepare(*args, what=f"evaluation{name}"),)

    def _batch_shapes(self, limits: Limits) -> PackedBatch:
        """Shapes of the rows of a tick."""
        return batch_shapes(limits, self._placement, self._spec.options.objectives)

    def _hidden_shape(self, limits: Limits) -> jax.ShapeDtypeStruct:
        """Shape of the hidden states that go from stage to stage."""
        num_rows = self._placement.num_lanes * limits.capacity
        return jax.ShapeDtypeStruct(
            (num_rows, self._spec.config.hidden_size),
            self._spec.options.dtype,
            sharding=self._placement.sharding(self._placement.hidden),
        )

    @property
    def programs(self) -> dict[str, Program]:
        """The functions, by the name of their attribute."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Program)}


def _evaluated(p: StageSharding) -> JobLosses:
    """Partition specs of the losses of an evaluation, which has those of rows."""
    rows = cast(Any, p.rows)
    return JobLosses(loss=rows, metrics=rows, is_finite=rows, nll=rows)
