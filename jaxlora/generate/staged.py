"""Generates tokens on a mesh: the passes of its stages, one token after the other.

The sequences of a batch are divided among the devices of a stage. Frozen weights that
are divided, and slots that are, are gathered one layer at a time. Between stages,
hidden states are passed. The host queues a token's passes before the token is known to
it, so devices wait only where a stage waits for the one before.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlora.generate.choose_token import Method
from jaxlora.generate.programs import (
    MAX_STEPS,
    NO_TOKEN,
    Rows,
    Sampling,
    State,
    Tables,
    choose,
    empty_cache,
    last_logits,
    rounded,
)
from jaxlora.models.forward import Base
from jaxlora.models.layer import DecoderLayer
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_paths
from jaxlora.modules.base_param import BaseParam
from jaxlora.modules.cached_attention import LayerCache
from jaxlora.modules.routing import Routing
from jaxlora.modules.rows import CachedRows, layer_ropes
from jaxlora.sharding.mesh import STAGE_AXES

_LOOK_STEPS = 8  # tokens between two looks whether all sequences have ended
_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedStage:
    """A stage of a decoder on its devices.

    Attributes:
        spec: Its layers, with weights as a whole.
        mesh: Its devices.
        base: Its frozen weights, which may be divided.
        adapters: Its slot tables, which may be divided.
        settings: Settings of its slots.
    """

    spec: DecoderSpec
    mesh: Mesh
    base: Base
    adapters: Tables
    settings: SlotSettings | None

    @property
    def arrays(self) -> tuple[Base, Tables, SlotSettings | None]:
        """Its arrays, for `StagePass`."""
        return self.base, self.adapters, self.settings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedDecoder:
    """A decoder on the devices of a mesh; see `LoadedDecoder`.

    Attributes:
        stages: The stages, from the embedding to the head.
    """

    stages: tuple[LoadedStage, ...]

    @property
    def spec(self) -> DecoderSpec:
        """The first stage, which has the configuration of the whole model."""
        return self.stages[0].spec

    @property
    def weights(self) -> tuple[LoadedStage, ...]:
        """The stages, which `programs` runs."""
        return self.stages

    @property
    def weight_shapes(self) -> tuple[LoadedStage, ...]:
        """The same: nothing is compiled before the weights are there."""
        return self.stages

    @property
    def programs(self) -> "StagedPrograms":
        """The functions that run it."""
        return _programs_of(tuple((stage.spec, stage.mesh) for stage in self.stages))


class _StagePass:
    """Runs the next tokens of a batch through the layers of one stage."""

    def __init__(self, spec: DecoderSpec, mesh: Mesh):
        self._spec, self.mesh = spec, mesh
        self._run = jax.jit(self._pass, donate_argnums=0)

    def rows(self, num_rows: int) -> NamedSharding:
        """Returns where the rows of sequences are: divided, if that is possible."""
        divides = num_rows % self.mesh.size == 0
        spec = PartitionSpec(STAGE_AXES) if divides else _WHOLE
        return NamedSharding(self.mesh, spec)

    def empty_cache(self, num_rows: int, num_tokens: int) -> tuple[LayerCache, ...]:
        """Makes the cache of the stage's layers."""
        cache = empty_cache(self._spec, num_rows, num_tokens)
        return jax.device_put(cache, self.rows(num_rows))

    def __call__(self, cache, arrays, rows: Rows, x: Array, place: int):
        """Returns the cache with the tokens, and hidden states or logits."""
        x = jax.device_put(x, self.rows(len(rows.slots)))
        return self._run(cache, arrays, rows, x, np.int32(place))

    def _pass(self, cache, arrays, rows: Rows, x: Array, place: Array):
        decoder = self._bind(*arrays)
        num_rows = len(rows.slots)
        num_new = x.shape[0] // num_rows if not self._spec.has_embedding else x.shape[1]
        positions = place + jnp.arange(num_new) - rows.starts[:, None]
        ropes = layer_ropes(decoder.config, jnp.maximum(positions, 0).reshape(-1))
        routing = Routing(block_adapter=rows.slots)
        place_rows = functools.partial(
            jax.lax.with_sharding_constraint, shardings=self.rows(num_rows)
        )
        h = x
        if self._spec.has_embedding:
            h = decoder.embed(x.reshape(-1), rows.slots)
        h = before = place_rows(h)
        updated = []
        for number, layer_cache in zip(self._spec.layer_numbers, cache, strict=True):
            before = h
            layer, h = self._gathered(decoder.layers[str(number)], h)
            own = CachedRows(
                ropes=ropes,
                routing=routing,
                place=place,
                starts=rows.starts,
                cache=layer_cache,
            )
            h = place_rows(layer(h, own))
            updated.append(LayerCache(*map(place_rows, own.cache)))
        if self._spec.has_head:
            h = place_rows(last_logits(decoder, h, before, rows.slots))
        return tuple(updated), h

    def _bind(self, base: Base, adapters: Tables, settings: SlotSettings | None) -> Any:
        tables = to_paths(self._spec.stacks, adapters, axis=1)
        cast = rounded(tables, self._spec.options.dtype)
        settings = jax.tree.map(self._whole, settings)
        return self._spec.bind(base, cast, settings=settings)

    def _whole(self, x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, _WHOLE))

    def _gathered(
        self, layer: DecoderLayer, h: Float[Array, "T D"]
    ) -> tuple[DecoderLayer, Float[Array, "T D"]]:
        """Gathers a layer's weights and slots, and not before the layer before ran."""
        graph, state, rest = nnx.split(layer, nnx.Any(BaseParam, nnx.LoRAParam), ...)
        leaves, tree = jax.tree.flatten(state)
        h, *leaves = jax.lax.optimization_barrier((h, *leaves))
        whole = tree.unflatten([self._whole(x) for x in leaves])
        return nnx.merge(graph, whole, rest), h


class StagedPrograms:
    """The functions of a decoder on a mesh, with the interface of `Programs`.

    Attributes:
        decode: Generates tokens, by how they are chosen.
    """

    def __init__(self, stages: tuple[tuple[DecoderSpec, Mesh], ...]):
        """Makes the functions; each is compiled when it is called first.

        Args:
            stages: The layers and the devices of each stage.
        """
        self._passes = [_StagePass(*stage) for stage in stages]
        self._choose = jax.jit(choose, static_argnums=0)
        self.decode = {
            method: functools.partial(self._decode, method)
            for method in get_args(Method)
        }

    def empty(self, num_rows: int, num_tokens: int) -> State:
        """Makes the state of a batch before its prompts; its cache is by stage."""
        caches: Any = tuple(p.empty_cache(num_rows, num_tokens) for p in self._passes)
        is_done: Any = np.zeros(num_rows, bool)
        place: Any = 0
        logits: Any = None
        return State(caches, logits, is_done, place, place)

    def prepare(self, *_: Any) -> list:
        """Compiles nothing ahead."""
        return []

    def prefill(self, state: State, stages: Any, rows: Rows, x: Array) -> State:
        """Runs the next tokens of all prompts."""
        num_new, caches = x.shape[1], []
        place: Any = state.place
        for run, stage, cache in zip(self._passes, stages, state.cache, strict=True):
            cache, x = run(cache, stage.arrays, rows, x, place)
            caches.append(cache)
        new: Mapping[str, Any] = {"cache": tuple(caches), "place": place + num_new}
        return state._replace(logits=x, **new)

    def _decode(
        self,
        method: Method,
        state: State,
        stages: Any,
        rows: Rows,
        sampling: Sampling,
        is_done: Array,
    ) -> tuple[State, np.ndarray, np.ndarray]:
        """Generates tokens until all sequences have ended, or all steps are done."""
        done: Any = np.asarray(state.is_done) | np.asarray(is_done)
        columns, logprobs = [], []
        for number in range(int(sampling.num_steps)):
            if number % _LOOK_STEPS == 0 and np.asarray(done).all():
                break
            step: Any = state.step
            token, logprob, column, done = self._choose(
                method, state.logits, rows, np.int32(step), sampling, done
            )
            columns.append(column)
            logprobs.append(logprob)
            state = self.prefill(state, stages, rows, token[:, None])
            state = state._replace(step=step + 1)
        shape = len(rows.slots), MAX_STEPS
        made, scores = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        for number, (column, logprob) in enumerate(
            zip(*jax.device_get((columns, logprobs)), strict=True)
        ):
            made[:, number], scores[:, number] = column, logprob
        return state._replace(is_done=done), made, scores


@functools.lru_cache(maxsize=16)
def _programs_of(stages: tuple[tuple[DecoderSpec, Mesh], ...]) -> StagedPrograms:
    """Returns the functions for a decoder, which all of this process share."""
    return StagedPrograms(stages)
