"""Kinds of replicas of a model on GPUs: what they cost, and what fits into them."""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxlora.costs.stages import stage_borders
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.memory.estimate import StepBytes, part_bytes
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.mesh.candidates import is_divided
from jaxlora.plan.mesh.predict import Rates, shape_seconds, step_seconds
from jaxlora.plan.stages import MeshStages, stages_footprint
from jaxlora.scheduler import AffineCost
from jaxlora.scheduler.replicas import ReplicaKind
from jaxlora.sharding.mesh_sizes import MeshSizes

# Degrees that are weighed: LobRA's deployments have up to six stages and 16 GPUs.
_TENSOR, _STAGE = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8)
_MAX_GPUS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaModel:
    """A decoder with its slots, and the GPUs that its replicas are for.

    Attributes:
        spec: The decoder.
        rates: Rates of the GPUs and links, which are known.
        free_bytes: Memory of a GPU that a run may use; None: it is not known.
        num_gpus: Number of GPUs.
        block_tokens: Tokens of a block.
        capacity: Tokens of a microbatch. A replica with less memory, or with a
            pipeline, has smaller ones, except for longer samples.
        mean_tokens: Mean length of the sample of a token, by which attention's time is
            linear in the squared lengths.
    """

    spec: DecoderSpec
    rates: Rates
    free_bytes: int | None
    num_gpus: int
    block_tokens: int
    capacity: int
    mean_tokens: float

    def kinds(self) -> tuple[ReplicaKind, ...]:
        """Returns the kinds of replicas that hold the model and a block of tokens."""
        return tuple(filter(None, itertools.starmap(self._kind, self._degrees())))

    def _degrees(self) -> Iterator[tuple[int, int]]:
        """Yields numbers of GPUs that share a layer, and of pipeline stages."""
        layers, most = self.spec.config.num_layers, min(self.num_gpus, _MAX_GPUS)
        tensors = [
            n
            for n in _TENSOR
            if n <= most and is_divided(self.spec, n, self.block_tokens)
        ]
        for tensor, stage in itertools.product(tensors, _STAGE):
            if stage <= layers and tensor * stage <= most:
                yield tensor, stage

    def _kind(self, tensor: int, stage: int) -> ReplicaKind | None:
        """Describes a kind of replica; None: the model does not fit into it."""
        stages = self._stages(stage, tensor)
        longest = self._longest(stages)
        if longest < self.block_tokens:
            return None
        # The ramp of a pipeline takes the longer, the larger its microbatches are.
        blocks = max(1, self.capacity // stage // self.block_tokens)
        capacity = min(blocks * self.block_tokens, longest)
        return ReplicaKind(
            tensor=tensor,
            stage=stage,
            longest=longest,
            cost=self._cost(stages, capacity),
        )

    def _stages(self, stage: int, tensor: int) -> MeshStages:
        return MeshStages(
            spec=self.spec,
            sizes=MeshSizes(stage=stage, tensor=tensor),
            borders=stage_borders(self.spec, stage, self.rates.speed),
            in_flight=stage,
        )

    # ---- memory ----------------------------------------------------------------------

    def _longest(self, stages: MeshStages) -> int:
        """Returns the most tokens of a microbatch that fits, in whole blocks."""
        if self.free_bytes is None:
            return self.capacity
        found = stages_footprint(stages, self._step_bytes(stages.sizes.tensor))
        fitting = found.fitting_tokens(self.free_bytes)
        return max(0, fitting // self.block_tokens * self.block_tokens)

    def _step_bytes(self, tensor: int) -> StepBytes:
        """Returns the bytes per token on each of the GPUs that share a layer.

        Arrays are whole on each of them or divided, so those of one and of two GPUs
        give those of more. Tracing a decoder takes seconds.
        """
        if tensor <= 2:
            sizes = self.block_tokens, self.capacity
            return part_bytes(self.spec, tensor, *sizes)
        one, two = (dataclasses.asdict(self._step_bytes(n)) for n in (1, 2))
        whole = {name: 2 * two[name] - one[name] for name in one}
        return StepBytes(
            **{name: own + (one[name] - own) / tensor for name, own in whole.items()}
        )

    # ---- time ------------------------------------------------------------------------

    def _cost(self, stages: MeshStages, capacity: int) -> AffineCost:
        """Returns the seconds of a replica's part of a step.

        The slowest stage sets the pace of full microbatches; the pipeline fills and
        drains once a step; and all replicas exchange the gradients.
        """
        mean = self.mean_tokens
        short, whole = (self._slowest(stages, capacity, n) for n in (0.0, mean))
        # The stage with the head takes a smaller share of launches with longer samples.
        per_square = max(0.0, whole - short) / (capacity * mean)
        per_token = whole / capacity - per_square * mean
        exchanged = 0.0
        if self.spec.slots:
            alone = self._stages(1, 1)
            exchanged = step_seconds(alone, self.rates)
            if self.num_gpus > 1:
                slots = num_bytes(self.spec.adapter_shapes())
                exchanged += self.rates.exchange_seconds(2 * slots, self.num_gpus)
        return AffineCost(
            base=(stages.sizes.stage - 1) * capacity * per_token + exchanged,
            per_token=per_token,
            per_square=per_square,
        )

    def _slowest(self, stages: MeshStages, capacity: int, mean_tokens: float) -> float:
        """Returns the seconds of a full microbatch in the slowest stage.

        Args:
            stages: Stages of the replica.
            capacity: Tokens of a microbatch.
            mean_tokens: Mean length of the sample of a token.
        """
        cost = shape_seconds(
            stages,
            capacity,
            self.rates,
            squares=capacity * mean_tokens,
            mean_tokens=mean_tokens,
        )
        return max(
            one.forward(capacity, 0.0) + one.backward(capacity, 0.0)
            for one in cost.stages
        )
