"""The compiled functions of generation, of fixed shapes."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxlora.generate.choose_token import Method, choose_tokens
from jaxlora.models.decoder import Decoder
from jaxlora.models.forward import SINGLE_CALLS, Base
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_paths
from jaxlora.modules.cached_attention import LayerCache
from jaxlora.modules.loss import head_logits
from jaxlora.modules.routing import Routing
from jaxlora.modules.rows import CachedRows, layer_ropes
from jaxlora.modules.trained_tensors import tensor_of
from jaxlora.modules.whole_head import with_whole_logits
from jaxlora.programs.program import Prepared, Program

MAX_STEPS = 32  # most tokens of each sequence that one call of `decode` generates
NO_TOKEN = -1  # stands in the output of `decode` where no token was generated

# XLA would copy the weights of q, k and v into one matrix for each token.
_OPTIONS = {"xla_disable_hlo_passes": "dot-merger", **SINGLE_CALLS}

Tables = dict[str, Float[Array, "G L ..."]]


class Weights(NamedTuple):
    """Arrays of a decoder.

    Attributes:
        base: Frozen weights, by path.
        adapters: Slot tables, by name of the stack; empty without slots.
        settings: Settings of the slots; None without slots.
    """

    base: Base
    adapters: Tables
    settings: SlotSettings | None


class Rows(NamedTuple):
    """Properties of the sequences of a batch that stay the same.

    Attributes:
        starts: Place in the cache of each sequence's first token.
        slots: Slot of each sequence's adapter.
        seeds: Random seed of each sequence.
    """

    starts: Int[Array, " B"]
    slots: Int[Array, " B"]
    seeds: Int[Array, " B"]


class State(NamedTuple):
    """State of a batch between two calls of `decode`.

    Attributes:
        cache: Keys and values, for each layer.
        logits: Logits of each sequence's next token.
        is_done: Whether a sequence has ended.
        place: Place in the cache of the next token.
        step: Number of tokens of each sequence that were generated.
    """

    cache: tuple[LayerCache, ...]
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


class Programs:
    """The functions for a decoder; each has one program for each shape.

    Attributes:
        prefill: Runs the next S tokens of the prompts.
        decode: Generates up to `MAX_STEPS` tokens of each sequence, by how tokens are
            chosen.
    """

    def __init__(self, spec: DecoderSpec, device: Sharding):
        """Makes the functions; none is traced yet.

        Args:
            spec: The whole decoder.
            device: Where its weights are.
        """
        self._spec, self._device = spec, device
        self._empties: dict[tuple[int, int], Program] = {}
        self.prefill = self._program("prompts", self._prefill, range(4))
        self.decode: dict[Method, Program] = {
            method: self._program(
                f"{method} tokens",
                functools.partial(self._decode, method=method),
                range(5),
            )
            for method in get_args(Method)
        }

    def _program(self, what: str, run: Any, varies: Sequence[int]) -> Program:
        jitted = jax.jit(run, donate_argnums=0, compiler_options=_OPTIONS)
        identity = "generation", what, self._spec, self._device, _OPTIONS
        return Program(jitted, what, identity, varies=varies)

    def empty(self, num_rows: int, num_tokens: int) -> State:
        """Makes the state of a batch before its prompts."""
        sizes = num_rows, num_tokens
        if sizes not in self._empties:
            jitted = jax.jit(functools.partial(self._zeros, *sizes))
            identity = "generation", "empty", self._spec, self._device, sizes
            self._empties[sizes] = Program(jitted, "empty cache", identity)
        return self._empties[sizes]()

    def prepare(
        self,
        state: State,
        weights: Weights,
        rows: Rows,
        token_ids: Int[Array, "B S"],
        sampling: Sampling,
        is_done: Bool[Array, " B"],
        method: Method,
    ) -> list[Prepared]:
        """Starts to compile the programs of a batch side by side.

        Args:
            state, weights, rows, token_ids: Arguments of `prefill`; shapes will do for
                the weights.
            sampling, is_done: Further arguments of `decode`.
            method: How tokens are chosen.
        """
        args = state, weights, rows
        return [
            self.prefill.prepare(*args, token_ids),
            self.decode[method].prepare(*args, sampling, is_done),
        ]

    def num_compilations(self) -> int:
        """Programs compiled so far."""
        functions = self.prefill, *self.decode.values(), *self._empties.values()
        return sum(function.num_compilations() for function in functions)

    def _zeros(self, num_rows: int, num_tokens: int) -> State:
        return State(
            cache=empty_cache(self._spec, num_rows, num_tokens),
            logits=jnp.zeros((num_rows, self._spec.config.vocab_size), jnp.float32),
            is_done=jnp.zeros(num_rows, bool),
            place=jnp.zeros((), jnp.int32),
            step=jnp.zeros((), jnp.int32),
        )

    def _bind(self, weights: Weights) -> Decoder:
        tables = to_paths(self._spec.stacks, weights.adapters, axis=1)
        # The linears would cast them anyway, and again for each token.
        cast = rounded(tables, self._spec.options.dtype)
        decoder = self._spec.bind(weights.base, cast, settings=weights.settings)
        decoder.keep_constants()
        return decoder

    def _prefill(
        self,
        state: State,
        weights: Weights,
        rows: Rows,
        token_ids: Int[Array, "B S"],
    ) -> State:
        logits, cache = next_logits(
            self._bind(weights),
            state.cache,
            token_ids,
            state.place,
            rows.starts,
            rows.slots,
        )
        place = state.place + token_ids.shape[1]
        return state._replace(cache=cache, logits=logits, place=place)

    def _decode(
        self,
        state: State,
        weights: Weights,
        rows: Rows,
        sampling: Sampling,
        is_done: Bool[Array, " B"],
        *,
        method: Method,
    ) -> tuple[State, Int[Array, "B M"], Float[Array, "B M"]]:
        """Generates tokens until all sequences have ended, or all steps are done.

        Args:
            state: State of the batch.
            weights: Arrays of the decoder.
            rows: Properties of the sequences.
            sampling: Settings.
            is_done: Sequences that the caller has ended.
            method: How tokens are chosen.

        Returns:
            The state; and for each sequence and step its token and the log probability
            that the model gives it, in nats.
        """
        graph, variables = nnx.split(self._bind(weights))
        shape = len(is_done), MAX_STEPS
        tokens = jnp.full(shape, NO_TOKEN, jnp.int32)
        logprobs = jnp.zeros(shape, jnp.float32)
        state = state._replace(is_done=state.is_done | is_done)

        def goes_on(loop):
            i, state, *_ = loop
            return (i < sampling.num_steps) & ~state.is_done.all()

        def generate_one(loop):
            i, state, tokens, logprobs = loop
            token, logprob, column, is_done = choose(
                method, state.logits, rows, state.step, sampling, state.is_done
            )
            tokens, logprobs = (
                tokens.at[:, i].set(column),
                logprobs.at[:, i].set(logprob),
            )
            logits, cache = next_logits(
                nnx.merge(graph, variables),
                state.cache,
                token[:, None],
                state.place,
                rows.starts,
                rows.slots,
            )
            state = State(
                cache=cache,
                logits=logits,
                is_done=is_done,
                place=state.place + 1,
                step=state.step + 1,
            )
            return i + 1, state, tokens, logprobs

        begin = jnp.zeros((), jnp.int32), state, tokens, logprobs
        _, state, tokens, logprobs = jax.lax.while_loop(goes_on, generate_one, begin)
        return state, tokens, logprobs


def choose(
    method: Method,
    logits: Float[Array, "B V"],
    rows: Rows,
    step: Int[Array, ""],
    sampling: Sampling,
    is_done: Bool[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"], Int[Array, " B"], Bool[Array, " B"]]:
    """Chooses the next token of each sequence.

    Args:
        method: How tokens are chosen.
        logits: Logits of the token.
        rows: Properties of the sequences.
        step: Number of tokens of each sequence that were generated.
        sampling: Settings.
        is_done: Whether a sequence has ended.

    Returns:
        The tokens; the log probability that the model gives each, in nats; the tokens
        again, with `NO_TOKEN` for sequences that had ended; and whether each has ended.
    """
    token = choose_tokens(
        logits, method, rows.seeds, step, sampling.temperature, sampling.top_p
    )
    picked = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    is_end = (token[:, None] == sampling.end_ids).any(1)
    logprob = picked - jax.nn.logsumexp(logits, axis=-1)
    return token, logprob, jnp.where(is_done, NO_TOKEN, token), is_done | is_end


def rounded(
    tables: dict[str, Float[Array, "G ..."]], dtype: DTypeLike
) -> dict[str, Float[Array, "G ..."]]:
    """Rounds slot tables that are multiplied by rows to the dtype of the rows.

    Args:
        tables: Slot tables by path.
        dtype: Dtype of the rows.
    """
    return {
        path: table.astype(dtype) if tensor_of(path).is_matrix else table
        for path, table in tables.items()
    }


def empty_cache(
    spec: DecoderSpec, num_rows: int, num_tokens: int
) -> tuple[LayerCache, ...]:
    """Returns an empty cache for each layer of a decoder, or of a stage of it."""
    layers = spec.abstract().layers
    return tuple(
        layers[str(i)].empty_cache(num_rows, num_tokens) for i in spec.layer_numbers
    )


@functools.lru_cache(maxsize=16)
def programs_of(spec: DecoderSpec, device: Sharding) -> Programs:
    """Returns the functions for a decoder, which all of this process share."""
    return Programs(spec, device)


def next_logits(
    decoder: Decoder,
    cache: tuple[LayerCache, ...],
    token_ids: Int[Array, "B S"],
    place: Int[Array, ""],
    starts: Int[Array, " B"],
    slots: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...]]:
    """Runs S tokens of each sequence, and returns the logits of the token after them.

    The rows of a sequence are one token block, so each sequence has its own adapter.

    Args:
        decoder: The whole decoder, with weights that are not divided among devices.
        cache: Keys and values of the tokens before, for each layer.
        token_ids: The new tokens.
        place: Place in the cache of the first new token, the same for all sequences.
        starts: Place in the cache of each sequence's first token.
        slots: Slot of each sequence's adapter; without slots, any number from 0.
    """
    num_new = token_ids.shape[1]
    positions = place + jnp.arange(num_new) - starts[:, None]
    ropes = layer_ropes(decoder.config, jnp.maximum(positions, 0).reshape(-1))
    routing = Routing(block_adapter=slots)
    h = before = decoder.embed(token_ids.reshape(-1), slots)
    updated = []
    for number, layer_cache in enumerate(cache):
        rows = CachedRows(
            ropes=ropes, routing=routing, place=place, starts=starts, cache=layer_cache
        )
        before, h = h, decoder.layers[str(number)](h, rows)
        updated.append(rows.cache)
    return last_logits(decoder, h, before, slots), tuple(updated)


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
