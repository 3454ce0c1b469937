"""Kinds of replicas of a model on GPUs: what they cost, and what fits into them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from jaxlora.costs.gpus import DeviceSpeed
from jaxlora.costs.stages import DecoderSeconds, decoder_seconds, stage_borders
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.memory.estimate import StepBytes, part_bytes
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.mesh.candidates import is_divided
from jaxlora.plan.mesh.predict import (
    EXCHANGED_AGAIN,
    EXCHANGES,
    Rates,
    exchange_seconds,
    step_seconds,
)
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
            borders=stage_borders(self.spec, stage, self.rates.links.speed),
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

        The slowest stage sets the pace. Each microbatch takes the time of reading the
        weights and of launches; the pipeline fills and drains once a step; and all
        replicas exchange the gradients.
        """
        tensor = stages.sizes.tensor
        share, num_layers = self._slowest(stages)
        weights, launches = self._microbatch_seconds()
        each = self._sample_seconds() * (share / tensor)
        exchanges = 2 * EXCHANGES + EXCHANGED_AGAIN[self.spec.options.remat]
        exchanged = num_layers * exchanges * self._exchange_of_token(tensor)
        once = share * (weights / tensor + launches)
        per_token = each.per_token + exchanged + once / capacity
        ramp = (stages.sizes.stage - 1) * capacity * per_token
        return AffineCost(
            base=ramp + self._exchange_seconds(),
            per_token=per_token,
            per_square=each.per_square,
        )

    def _slowest(self, stages: MeshStages) -> tuple[float, int]:
        """Returns the slowest stage's share of the time, and its number of layers."""
        times = [t.both for t in self._decoder.stages(stages.borders)]
        at = times.index(max(times))
        return times[at] / sum(times), len(stages.specs[at].layer_numbers)

    @property
    def _speed(self) -> DeviceSpeed:
        return self.rates.links.speed

    @property
    def _decoder(self) -> DecoderSeconds:
        return decoder_seconds(self.spec, self._speed, mean_tokens=self.mean_tokens)

    def _sample_seconds(self) -> AffineCost:
        """Returns the seconds of samples in both passes of one GPU, without a base."""
        if (profile := self.rates.profile) is not None:
            measured = functools.partial(profile.seconds, self.spec, self._speed)
            base = measured(0, 0)
            return AffineCost(
                base=0.0,
                per_token=measured(1, 0) - base,
                per_square=measured(0, 1) - base,
            )
        none = decoder_seconds(self.spec, self._speed, mean_tokens=0.0).whole.both
        attention = (self._decoder.whole.both - none) / self.mean_tokens
        return AffineCost(base=0.0, per_token=none, per_square=attention)

    def _microbatch_seconds(self) -> tuple[float, float]:
        """Returns the seconds of reading all weights once, and of launches."""
        weights = self._speed.weight_tokens * self._sample_seconds().per_token
        if (profile := self.rates.profile) is not None:
            base = profile.seconds(self.spec, self._speed, 0, 0)
            return min(weights, base), max(0.0, base - weights)
        return weights, self._speed.layer_seconds * self.spec.config.num_layers

    def _exchange_of_token(self, tensor: int) -> float:
        """Returns the seconds in which a token's hidden state is gathered by GPUs."""
        itemsize = self.spec.options.dtype.itemsize
        moved = (tensor - 1) / tensor * self.spec.config.hidden_size * itemsize
        return self.rates.links.seconds(moved, tensor)

    def _exchange_seconds(self) -> float:
        """Returns the seconds of summing all gradients over replicas, and of steps."""
        if not self.spec.slots:
            return 0.0
        slots = num_bytes(self.spec.adapter_shapes())
        summed = self.rates.links.seconds(2 * slots, self.num_gpus)
        alone = self._stages(1, 1), self.rates
        own = step_seconds(*alone) + exchange_seconds(*alone)
        return own + (summed if self.num_gpus > 1 else 0.0)
