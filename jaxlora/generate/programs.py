"""The functions of generation, of fixed shapes: on one device, or on a mesh.

One device generates tokens in a loop of its own. On a mesh, the host runs the passes of
the stages, one token after the other. The sequences of a batch are divided among the
devices of a stage. Frozen weights and slots that are divided are gathered one layer at
a time. Between stages, hidden states are passed. The host queues a token's passes
before the token is known to it, so devices wait only where a stage waits for the one
before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int

from jaxlora.generate.choose_token import Method, choose_tokens
from jaxlora.models.decoder import Decoder
from jaxlora.models.forward import SINGLE_CALLS, Base
from jaxlora.models.layer import DecoderLayer
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.modules.base_param import BaseParam
from jaxlora.modules.loss import head_logits
from jaxlora.modules.routing import Routing
from jaxlora.modules.rows import Cache, CachedRows, layer_ropes
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.modules.whole_head import with_whole_logits
from jaxlora.programs.program import Prepared, Program
from jaxlora.sharding.mesh import STAGE_AXES

MAX_STEPS = 32  # most tokens of each sequence that one call of `decode` generates
NO_TOKEN = -1  # stands in the output of `decode` where no token was generated

_WHOLE = PartitionSpec()
_LOOK_STEPS = 8  # tokens between two looks of the host whether all sequences have ended

# XLA would copy the weights of q, k and v into one matrix for each token.
_OPTIONS = {"xla_disable_hlo_passes": "dot-merger", **SINGLE_CALLS}

Tables = dict[str, Float[Array, "G L ..."]]


class Weights(NamedTuple):
    """Arrays of a decoder, or of a stage of it.

    Attributes:
        base: Frozen weights, by path.
        adapters: Slot tables, by name of the stack; empty without slots.
        settings: Settings of the slots; None without slots.
    """

    base: Base
    adapters: Tables
    settings: SlotSettings | None


class Sequences(NamedTuple):
    """Properties of the sequences of a batch that stay the same.

    Attributes:
        starts: Place in the cache of each sequence's first token.
        slots: Slot of each sequence's adapter; without slots, any number from 0.
        seeds: Random seed of each sequence.
    """

    starts: Int[Array, " B"]
    slots: Int[Array, " B"]
    seeds: Int[Array, " B"]


class State(NamedTuple):
    """State of a batch between two calls of `decode`.

    Attributes:
        cache: What each layer of each stage keeps, such as keys and values.
        logits: Logits of each sequence's next token.
        is_done: Whether a sequence has ended.
        place: Place in the cache of the next token.
        step: Number of tokens of each sequence that were generated.
    """

    cache: tuple[tuple[Cache, ...], ...]
    logits: Float[Array, "B V"]
    is_done: Bool[Array, " B"]
    place: Int[Array, ""]
    step: Int[Array, ""]


class Sampling(NamedTuple):
    """Settings of a call of `decode`, which change no shapes.

    Attributes:
        temperature: Divisor of the logits.
        top_p: Total probability of the tokens to sample from.
        end_ids: Tokens that end a sequence; `NO_TOKEN` fills the rest.
        num_steps: Number of tokens to generate, at most `MAX_STEPS`.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    end_ids: Int[Array, " N"]
    num_steps: Int[Array, ""]


class _Stage:
    """Runs the next tokens of a batch through the layers of one stage.

    Attributes:
        spec: Its layers, with weights as a whole.
    """

    def __init__(self, spec: DecoderSpec, where: Mesh | Sharding):
        """Makes the stage; nothing is traced yet.

        Args:
            spec: Its layers.
            where: Its mesh, or the placement of its weights on one device.
        """
        self.spec = spec
        self._mesh = where if isinstance(where, Mesh) else None
        self._jitted = jax.jit(
            lambda weights, *args: self.run(self.bind(weights), *args), donate_argnums=1
        )

    @functools.cached_property
    def _layers(self) -> list[DecoderLayer]:
        layers = self.spec.abstract().layers
        return [layers[str(i)] for i in self.spec.layer_numbers]

    def empty_cache(self, num_rows: int, num_tokens: int) -> tuple[Cache, ...]:
        """Makes the cache of the stage's layers."""
        cache = tuple(x.empty_cache(num_rows, num_tokens) for x in self._layers)
        return jax.device_put(cache, self.sharding(num_rows))

    def sharding(self, num_rows: int) -> NamedSharding | None:
        """Returns where the rows of sequences are: divided, if that is possible."""
        if self._mesh is None:
            return None
        divides = num_rows % self._mesh.size == 0
        return NamedSharding(
            self._mesh, PartitionSpec(STAGE_AXES) if divides else _WHOLE
        )

    def bind(self, weights: Weights) -> Decoder:
        """Returns the stage with these arrays."""
        tables = to_modules(self.spec.stacks, weights.adapters)
        # The linears would cast them anyway, and again for each token.
        cast = {
            path: table.astype(self.spec.options.dtype)
            if tensor_of(path).is_matrix
            else table
            for path, table in tables.items()
        }
        settings = self._gathered(weights.settings)
        decoder = self.spec.bind(weights.base, cast, settings=settings)
        if self._mesh is None:
            decoder.keep_constants()
        return decoder

    def run(
        self,
        decoder: Decoder,
        cache: tuple[Cache, ...],
        sequences: Sequences,
        x: Int[Array, "B S"] | Float[Array, "T D"],
        place: Int[Array, ""],
    ) -> tuple[tuple[Cache, ...], Float[Array, "T D"] | Float[Array, "B V"]]:
        """Runs S tokens of each sequence.

        The rows of a sequence are one token block, so each has its own adapter.

        Args:
            decoder: What `bind` returned.
            cache: Keys and values of the tokens before, for each layer.
            sequences: Properties of the sequences.
            x: The new tokens, or their hidden states after the stage before.
            place: Place in the cache of the first new token, the same for all.

        Returns:
            The cache with the new tokens; and their hidden states, or after the last
            stage the logits of the token after them.
        """
        starts, slots = sequences.starts, sequences.slots
        placed = self._placed(len(slots))
        h = decoder.embed(x.reshape(-1), slots) if self.spec.has_embedding else x
        h = before = placed(h)
        positions = place + jnp.arange(len(h) // len(slots)) - starts[:, None]
        rows = CachedRows(
            ropes=layer_ropes(decoder.config, jnp.maximum(positions, 0).reshape(-1)),
            routing=Routing(block_adapter=slots),
            place=place,
            starts=starts,
            caches=list(cache),
        )
        for i, number in enumerate(self.spec.layer_numbers):
            before = h
            layer, h = self._whole_layer(decoder.layers[str(number)], h)
            h = placed(layer(h, rows.for_layer(i)))
        if self.spec.has_head:
            h = placed(last_logits(decoder, h, before, slots))
        return tuple(map(placed, rows.caches)), h

    def run_on_mesh(self, weights: Weights, cache, sequences, x, place):
        """Runs a program of `bind` and `run`; takes x from the stage before."""
        x = jax.device_put(x, self.sharding(len(sequences.slots)))
        return self._jitted(weights, cache, sequences, x, place)

    def _placed(self, num_rows: int) -> Callable[[Any], Any]:
        """Returns a function that keeps the rows of sequences where they are."""
        sharding = self.sharding(num_rows)
        if sharding is None:
            return lambda x: x
        return lambda x: jax.lax.with_sharding_constraint(x, sharding)

    def _gathered(self, x: Any) -> Any:
        if self._mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, _WHOLE))

    def _whole_layer(
        self, layer: DecoderLayer, h: Float[Array, "T D"]
    ) -> tuple[DecoderLayer, Float[Array, "T D"]]:
        """Gathers a layer's weights and slots, and not before the layer before ran."""
        if self._mesh is None:
            return layer, h
        graph, state, rest = nnx.split(layer, nnx.Any(BaseParam, nnx.LoRAParam), ...)
        h, state = jax.lax.optimization_barrier((h, state))
        return nnx.merge(graph, self._gathered(state), rest), h


# Runs tokens through a stage: cache, sequences, x, place -> cache, x; see `_Stage.run`.
_Run = Callable[..., tuple[tuple[Cache, ...], Any]]


class Programs:
    """The functions for a decoder; each has one program for each shape.

    Attributes:
        prefill: Runs the next S tokens of the prompts. It takes the state, the weights
            of each stage, the sequences and the tokens, and returns the state.
        decode: Generates tokens until all sequences have ended, or all steps are done,
            by how tokens are chosen. It takes the state, the weights of each stage, the
            sequences, `Sampling`, and which sequences the caller has ended. It returns
            the state; and for each sequence and step its token and the log probability
            that the model gives it, in nats.
    """

    def __init__(self, stages: tuple[tuple[DecoderSpec, Mesh | Sharding], ...]):
        """Makes the functions; none is traced yet.

        Args:
            stages: The layers and the mesh of each stage; or the whole decoder, and
                where its weights are on one device.
        """
        self._places = stages
        self._stages = [_Stage(*stage) for stage in stages]
        self._choose = jax.jit(choose, static_argnums=0)
        self._is_on_mesh = isinstance(stages[0][1], Mesh)
        self.prefill: Any = self._next_on_mesh
        decode = self._decode_on_mesh if self._is_on_mesh else self._decode
        self.decode: dict[Method, Any] = {
            method: functools.partial(decode, method) for method in get_args(Method)
        }
        if not self._is_on_mesh:
            self.prefill = self._program("prompts", self._prefill, 4)
            for method, run in self.decode.items():
                self.decode[method] = self._program(f"{method} tokens", run, 5)

    def _program(self, what: str, run: Any, num_arguments: int) -> Program:
        jitted = jax.jit(run, donate_argnums=0, compiler_options=_OPTIONS)
        identity = "generation", what, self._places, _OPTIONS
        return Program(jitted, what, identity, varies=range(num_arguments))

    def empty(self, num_rows: int, num_tokens: int) -> State:
        """Makes the state of a batch before its prompts."""
        zeros: Any = np.zeros if self._is_on_mesh else jnp.zeros
        vocab_size = self._stages[0].spec.config.vocab_size
        return State(
            cache=tuple(x.empty_cache(num_rows, num_tokens) for x in self._stages),
            logits=zeros((num_rows, vocab_size), np.float32),
            is_done=zeros(num_rows, bool),
            place=zeros((), np.int32),
            step=zeros((), np.int32),
        )

    def prepare(
        self,
        state: State,
        weights: tuple[Weights, ...],
        sequences: Sequences,
        token_ids: Int[Array, "B S"],
        sampling: Sampling,
        is_done: Bool[Array, " B"],
        method: Method,
    ) -> list[Prepared]:
        """Starts to compile the programs of a batch side by side; on a mesh, none.

        Args:
            state, weights, sequences, token_ids: Arguments of `prefill`; shapes will do
                for the weights.
            sampling, is_done: Further arguments of `decode`.
            method: How tokens are chosen.
        """
        if self._is_on_mesh:
            return []
        args = state, weights, sequences
        return [
            self.prefill.prepare(*args, token_ids),
            self.decode[method].prepare(*args, sampling, is_done),
        ]

    # ---- one device ------------------------------------------------------------------

    def _prefill(self, state, weights, sequences, token_ids):
        (stage,), (own,) = self._stages, weights
        run = functools.partial(stage.run, stage.bind(own))
        return _next([run], state, sequences, token_ids)

    def _decode(self, method, state, weights, sequences, sampling, is_done):
        (stage,), (own,) = self._stages, weights
        graph, variables = nnx.split(stage.bind(own))
        shape = len(is_done), MAX_STEPS
        tokens = jnp.full(shape, NO_TOKEN, jnp.int32)
        logprobs = jnp.zeros(shape, jnp.float32)
        state = state._replace(is_done=state.is_done | is_done)

        def goes_on(loop):
            i, state, *_ = loop
            return (i < sampling.num_steps) & ~state.is_done.all()

        def generate_one(loop):
            i, state, tokens, logprobs = loop
            chosen = choose(
                method, state.logits, sequences, state.step, sampling, state.is_done
            )
            token, logprob, column, is_done = chosen
            tokens = tokens.at[:, i].set(column)
            logprobs = logprobs.at[:, i].set(logprob)
            run = functools.partial(stage.run, nnx.merge(graph, variables))
            state = _next([run], state, sequences, token[:, None])
            state = state._replace(is_done=is_done, step=state.step + 1)
            return i + 1, state, tokens, logprobs

        begin = jnp.zeros((), jnp.int32), state, tokens, logprobs
        _, *made = jax.lax.while_loop(goes_on, generate_one, begin)
        return tuple(made)

    # ---- a mesh ----------------------------------------------------------------------

    def _next_on_mesh(self, state, weights, sequences, token_ids):
        runs = [
            functools.partial(stage.run_on_mesh, own)
            for stage, own in zip(self._stages, weights, strict=True)
        ]
        return _next(runs, state, sequences, token_ids)

    def _decode_on_mesh(
        self, method, state, weights, sequences, sampling, is_done
    ) -> Any:
        done: Any = np.asarray(state.is_done) | np.asarray(is_done)
        columns, logprobs = [], []
        for number in range(int(sampling.num_steps)):
            if number % _LOOK_STEPS == 0 and np.asarray(done).all():
                break
            token, logprob, column, done = self._choose(
                method, state.logits, sequences, state.step, sampling, done
            )
            columns.append(column)
            logprobs.append(logprob)
            state = self._next_on_mesh(state, weights, sequences, token[:, None])
            state = state._replace(step=state.step + 1)
        shape = len(sequences.slots), MAX_STEPS
        made, scores = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        for number, (column, logprob) in enumerate(
            zip(*jax.device_get((columns, logprobs)), strict=True)
        ):
            made[:, number], scores[:, number] = column, logprob
        return state._replace(is_done=done), made, scores


@functools.lru_cache(maxsize=16)
def programs_of(stages: tuple[tuple[DecoderSpec, Mesh | Sharding], ...]) -> Programs:
    """Returns the functions for a decoder, which all of this process share."""
    return Programs(stages)


def _next(runs: Sequence[_Run], state: State, sequences: Sequences, token_ids) -> State:
    """Runs the next tokens of each sequence through all stages."""
    x, caches = token_ids, []
    for run, cache in zip(runs, state.cache, strict=True):
        cache, x = run(cache, sequences, x, state.place)
        caches.append(cache)
    place = state.place + token_ids.shape[1]
    return state._replace(cache=tuple(caches), logits=x, place=place)


def choose(
    method: Method,
    logits: Float[Array, "B V"],
    sequences: Sequences,
    step: Int[Array, ""],
    sampling: Sampling,
    is_done: Bool[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"], Int[Array, " B"], Bool[Array, " B"]]:
    """Chooses the next token of each sequence.

    Args:
        method: How tokens are chosen.
        logits: Logits of the token.
        sequences: Properties of the sequences.
        step: Number of tokens of each sequence that were generated.
        sampling: Settings.
        is_done: Whether a sequence has ended.

    Returns:
        The tokens; the log probability that the model gives each, in nats; the tokens
        again, with `NO_TOKEN` for sequences that had ended; and whether each has ended.
    """
    token = choose_tokens(
        logits, method, sequences.seeds, step, sampling.temperature, sampling.top_p
    )
    picked = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    is_end = (token[:, None] == sampling.end_ids).any(1)
    logprob = picked - jax.nn.logsumexp(logits, axis=-1)
    return token, logprob, jnp.where(is_done, NO_TOKEN, token), is_done | is_end


def last_logits(
    decoder: Decoder,
    h: Float[Array, "T D"],
    before: Float[Array, "T D"],
    slots: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """Returns the logits after the last token of each sequence.

    Args:
        decoder: The decoder, or its last stage.
        h: Hidden states after the last layer.
        before: Hidden states before it; see `Decoder.stored_head`.
        slots: Slot of each sequence's adapter.
    """
    last = decoder.final_norm(h.reshape(len(slots), -1, h.shape[1])[:, -1])
    last = decoder.head_input(last)
    head, transposed = decoder.stored_head(before)
    cap, whole = decoder.config.logit_softcap, decoder.whole_heads(slots)
    logits = head_logits(
        last,
        head,
        head_transposed=transposed,
        logit_softcap=cap,
        own=decoder.own_head_rows(slots),
    )
    if whole is not None:
        logits = with_whole_logits(logits, last, whole, logit_softcap=cap)
    return logits
