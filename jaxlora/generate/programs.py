"""The functions of generation, of fixed shapes: on one device, or on a mesh.

One device generates tokens in a loop of its own. On a mesh, the host runs the passes of
the stages, one token after the other. The sequences of a batch are divided among the
devices of a stage. Frozen weights and slots that are divided are gathered one layer at
a time. Between stages, hidden states are passed. The host queues a token's passes
before the token is known to it, so devices wait only where a stage waits for the one
before.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int

from jaxlora.generate.choose_token import choose_tokens
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
from jaxlora.programs.program import Program
from jaxlora.sharding.mesh import STAGE_AXES

MAX_STEPS = 32  # most tokens of each sequence that one call of `decode` generates
NO_TOKEN = -1  # stands in the output of `decode` where no token was generated
MOST_TOP_TOKENS = 20  # that `score` returns

_WHOLE = PartitionSpec()
_SCORED_ROWS = 128  # whose logits are computed together
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
    """The sequences of a batch, as the host knows them before a call.

    Attributes:
        slots: Slot of each sequence's adapter; without slots, any number from 0.
        place: Number of tokens of each sequence that the cache holds.
        step: Number of tokens of each sequence that were generated.
        is_done: Whether a sequence has ended.
        seeds, temperature, top_p, top_k: See `choose_tokens`.
        end_ids: Tokens that end each sequence; `NO_TOKEN` fills the rest.
    """

    slots: Int[Array, " B"]
    place: Int[Array, " B"]
    step: Int[Array, " B"]
    is_done: Bool[Array, " B"]
    seeds: Int[Array, " B"]
    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    end_ids: Int[Array, "B N"]


class State(NamedTuple):
    """State of a batch between two calls.

    Attributes:
        cache: What each layer of each stage keeps, such as keys and values.
        logits: Logits of each sequence's next token.
    """

    cache: tuple[tuple[Cache, ...], ...]
    logits: Float[Array, "B V"]


class Scores(NamedTuple):
    """Log-probabilities of the tokens of prompts.

    Attributes:
        logprobs: Log-probability of each label, in nats.
        top_ids: The most likely tokens in its place, the most likely first.
        top_logprobs: Their log-probabilities.
    """

    logprobs: Float[Array, "B S"]
    top_ids: Int[Array, "B S K"]
    top_logprobs: Float[Array, "B S K"]


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
        num_new: Int[Array, " B"],
        score: "_Score | None" = None,
    ) -> tuple[tuple[Cache, ...], Any]:
        """Runs S tokens of each sequence.

        The rows of a sequence are one token block, so each has its own adapter.

        Args:
            decoder: What `bind` returned.
            cache: Keys and values of the tokens before, for each layer.
            sequences: Properties of the sequences.
            x: The new tokens, or their hidden states after the stage before.
            num_new: Number of new tokens of each sequence, after which padding comes.
            score: Computes more from the hidden states; None: nothing.

        Returns:
            The cache with the new tokens; and their hidden states, or after the last
            stage the logits of the token after them, with what `score` returns.
        """
        place, slots = sequences.place, sequences.slots
        placed = self._placed(len(slots))
        h = decoder.embed(x.reshape(-1), slots) if self.spec.has_embedding else x
        h = before = placed(h)
        positions = place[:, None] + jnp.arange(len(h) // len(slots))
        rows = CachedRows(
            ropes=layer_ropes(decoder.config, positions.reshape(-1)),
            routing=Routing(block_adapter=slots),
            place=place,
            num_new=num_new,
            caches=list(cache),
        )
        for i, number in enumerate(self.spec.layer_numbers):
            before = h
            layer, h = self._whole_layer(decoder.layers[str(number)], h)
            h = placed(layer(h, rows.for_layer(i)))
        if self.spec.has_head:
            scores = () if score is None else (score(decoder, h, before, slots),)
            h = h.reshape(len(slots), -1, h.shape[1])
            last = h[jnp.arange(len(slots)), jnp.maximum(num_new - 1, 0)]
            h = placed(logits_of(decoder, last, before, slots))
            h = (h, *scores) if scores else h
        return tuple(map(placed, rows.caches)), h

    def run_on_mesh(self, weights: Weights, cache, sequences, x, num_new):
        """Runs a program of `bind` and `run`; takes x from the stage before."""
        x = jax.device_put(x, self.sharding(len(sequences.slots)))
        return self._jitted(weights, cache, sequences, x, num_new)

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


# Runs tokens through a stage: cache, sequences, x, num_new -> cache, x; see
# `_Stage.run`.
_Run = Callable[..., tuple[tuple[Cache, ...], Any]]
# Computes scores from a decoder, the hidden states after and before its last layer, and
# slots.
_Score = Callable[..., Scores]


class Programs:
    """The functions for a decoder; each has one program for each shape.

    Attributes:
        is_on_mesh: Whether they run on a mesh, where all prompts begin at once.
        prefill: Runs the next S tokens of some prompts. It takes the state, the weights
            of each stage, the sequences of the prompts, the tokens, how many of them
            each prompt has, and the prompts' rows in the state, which those that begin
            clear; a row that is not there is left out; None: the prompts are all rows,
            and the state was empty when they began. It returns the state.
        repeat: Copies the row of a prompt to other rows. It takes the state, the row,
            and the other rows, of which those that are not there are left out.
        decode: Generates tokens until all sequences have ended, or all steps are done.
            It takes the state, the weights of each stage, the sequences, and the number
            of tokens, at most `MAX_STEPS`. It returns the state; and for each sequence
            and step its token and the log probability that the model gives it, in nats.
    """

    def __init__(self, stages: tuple[tuple[DecoderSpec, Mesh | Sharding], ...]):
        """Makes the functions; none is traced yet.

        Args:
            stages: The layers and the mesh of each stage; or the whole decoder, and
                where its weights are on one device.
        """
        self._places = stages
        self._stages = [_Stage(*stage) for stage in stages]
        self._choose = jax.jit(choose)
        self.is_on_mesh = isinstance(stages[0][1], Mesh)
        self.prefill: Any = self._prefill_on_mesh
        self.decode: Any = self._decode_on_mesh
        self._score: dict[int, Program] = {}
        if not self.is_on_mesh:
            self.prefill = self._program("prompts", self._prefill, 6)
            self.decode = self._program("tokens", self._decode, 4)
            self.repeat = self._program("repeated prompts", _repeat, 3)
            for num in (0, MOST_TOP_TOKENS):
                score = functools.partial(self._prefill_and_score, num)
                self._score[num] = self._program(f"scores of {num}", score, 7)

    def _program(self, what: str, run: Any, num_arguments: int) -> Program:
        jitted = jax.jit(run, donate_argnums=0, compiler_options=_OPTIONS)
        identity = "generation", what, self._places, _OPTIONS
        return Program(jitted, what, identity, varies=range(num_arguments))

    def scorer(self, num_top: int) -> Program:
        """Returns a function like `prefill` that also scores, on one device.

        It also takes the token after each, and returns the state and `Scores`.

        Args:
            num_top: Number of the most likely tokens that are asked for; it returns
                none for 0, and else `MOST_TOP_TOKENS`.
        """
        return self._score[MOST_TOP_TOKENS if num_top else 0]

    def empty(self, num_rows: int, num_tokens: int) -> State:
        """Makes the state of a batch before its prompts."""
        zeros: Any = np.zeros if self.is_on_mesh else jnp.zeros
        vocab_size = self._stages[0].spec.config.vocab_size
        return State(
            cache=tuple(x.empty_cache(num_rows, num_tokens) for x in self._stages),
            logits=zeros((num_rows, vocab_size), np.float32),
        )

    # ---- one device ------------------------------------------------------------------

    def _prefill(self, state, weights, sequences, token_ids, num_new, rows):
        return self._prefill_rows(
            state, weights, sequences, token_ids, num_new, rows, None
        )[0]

    def _prefill_and_score(
        self, num_top, state, weights, sequences, token_ids, num_new, rows, labels
    ):
        score = functools.partial(_score, labels, num_top)
        return self._prefill_rows(
            state, weights, sequences, token_ids, num_new, rows, score
        )

    def _prefill_rows(self, state, weights, sequences, token_ids, num_new, rows, score):
        (stage,), (own,) = self._stages, weights
        run = functools.partial(stage.run, stage.bind(own))
        if score is not None:
            run = functools.partial(run, score=score)
        if rows is None:
            return _next([run], state, sequences, token_ids, num_new)
        begins = sequences.place == 0

        def take(whole):
            taken = whole.at[rows].get(mode="clip")
            return jnp.where(begins.reshape(-1, *[1] * (whole.ndim - 1)), 0, taken)

        part, scores = _next(
            [run], jax.tree.map(take, state), sequences, token_ids, num_new
        )
        put = lambda whole, new: whole.at[rows].set(new, mode="drop")
        return jax.tree.map(put, state, part), scores

    def _decode(self, state, weights, sequences, num_steps):
        (stage,), (own,) = self._stages, weights
        graph, variables = nnx.split(stage.bind(own))
        shape = len(sequences.slots), MAX_STEPS
        tokens = jnp.full(shape, NO_TOKEN, jnp.int32)
        logprobs = jnp.zeros(shape, jnp.float32)

        def goes_on(loop):
            i, _, sequences, *_ = loop
            return (i < num_steps) & ~sequences.is_done.all()

        def generate_one(loop):
            i, state, sequences, tokens, logprobs = loop
            token, logprob, column, is_done = choose(state.logits, sequences)
            tokens = tokens.at[:, i].set(column)
            logprobs = logprobs.at[:, i].set(logprob)
            run = functools.partial(stage.run, nnx.merge(graph, variables))
            state, _ = _next([run], state, sequences, token[:, None])
            sequences = _after_token(sequences)._replace(is_done=is_done)
            return i + 1, state, sequences, tokens, logprobs

        begin = jnp.zeros((), jnp.int32), state, sequences, tokens, logprobs
        _, state, _, *made = jax.lax.while_loop(goes_on, generate_one, begin)
        return state, *made

    # ---- a mesh ----------------------------------------------------------------------

    def _runs_on_mesh(self, weights) -> list[_Run]:
        return [
            functools.partial(stage.run_on_mesh, own)
            for stage, own in zip(self._stages, weights, strict=True)
        ]

    def _prefill_on_mesh(self, state, weights, sequences, token_ids, num_new, rows):
        assert rows is None
        return _next(self._runs_on_mesh(weights), state, sequences, token_ids, num_new)[
            0
        ]

    def _decode_on_mesh(self, state, weights, sequences, num_steps) -> Any:
        runs, done = self._runs_on_mesh(weights), sequences.is_done
        columns, logprobs = [], []
        for number in range(int(num_steps)):
            if number % _LOOK_STEPS == 0 and np.asarray(done).all():
                break
            ending = sequences._replace(is_done=done)
            token, logprob, column, done = self._choose(state.logits, ending)
            columns.append(column)
            logprobs.append(logprob)
            state, _ = _next(runs, state, sequences, token[:, None])
            sequences = _after_token(sequences)
        shape = len(sequences.slots), MAX_STEPS
        made, scores = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        for number, (column, logprob) in enumerate(
            zip(*jax.device_get((columns, logprobs)), strict=True)
        ):
            made[:, number], scores[:, number] = column, logprob
        return state, made, scores


@functools.lru_cache(maxsize=16)
def programs_of(stages: tuple[tuple[DecoderSpec, Mesh | Sharding], ...]) -> Programs:
    """Returns the functions for a decoder, which all of this process share."""
    return Programs(stages)


def _next(
    runs: Sequence[_Run], state: State, sequences: Sequences, token_ids, num_new=None
) -> tuple[State, Any]:
    """Runs the next tokens of each sequence through all stages.

    Args:
        runs: Runs tokens through each stage.
        state: The state.
        sequences: The sequences.
        token_ids: The tokens.
        num_new: How many of them each sequence has, which keeps its logits if it has
            none; None: all.

    Returns:
        The state, and what the last stage computes beside logits, or else None.
    """
    num_rows, num_tokens = token_ids.shape
    has_all = num_new is None
    num_new = jnp.full(num_rows, num_tokens) if has_all else num_new
    x, caches = token_ids, []
    for run, cache in zip(runs, state.cache, strict=True):
        cache, x = run(cache, sequences, x, num_new)
        caches.append(cache)
    logits, scores = x if isinstance(x, tuple) else (x, None)
    if not has_all:
        logits = jnp.where((num_new > 0)[:, None], logits, state.logits)
    return State(cache=tuple(caches), logits=logits), scores


def _repeat(state: State, row: Int[Array, ""], others: Int[Array, " B"]) -> State:
    """Copies a row of the state to others; those that are not there are left out."""
    return jax.tree.map(lambda x: x.at[others].set(x[row], mode="drop"), state)


def _after_token(sequences: Sequences) -> Sequences:
    return sequences._replace(place=sequences.place + 1, step=sequences.step + 1)


def choose(
    logits: Float[Array, "B V"], sequences: Sequences
) -> tuple[Int[Array, " B"], Float[Array, " B"], Int[Array, " B"], Bool[Array, " B"]]:
    """Chooses the next token of each sequence.

    Args:
        logits: Logits of the token.
        sequences: The sequences.

    Returns:
        The tokens; the log probability that the model gives each, in nats; the tokens
        again, with `NO_TOKEN` for sequences that had ended; and whether each has ended.
    """
    token = choose_tokens(
        logits,
        sequences.seeds,
        sequences.step,
        sequences.temperature,
        sequences.top_p,
        sequences.top_k,
    )
    is_done = sequences.is_done
    picked = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    is_end = (token[:, None] == sequences.end_ids).any(1)
    logprob = picked - jax.nn.logsumexp(logits, axis=-1)
    return token, logprob, jnp.where(is_done, NO_TOKEN, token), is_done | is_end


def _score(
    labels: Int[Array, "B S"],
    num_top: int,
    decoder: Decoder,
    h: Float[Array, "T D"],
    before: Float[Array, "T D"],
    slots: Int[Array, " B"],
) -> Scores:
    """Scores the token after each row, in chunks, as all logits take much memory."""
    num_rows = len(h)
    size = math.gcd(num_rows, _SCORED_ROWS)
    chunks = jax.tree.map(
        lambda x: x.reshape(-1, size, *x.shape[1:]),
        (h, jnp.repeat(slots, num_rows // len(slots)), labels.reshape(-1)),
    )

    def score(chunk):
        h, slots, labels = chunk
        logits = logits_of(decoder, h, before, slots)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        found, ids = jax.lax.top_k(logits, min(num_top, logits.shape[1]))
        return Scores((own - total)[:, 0], ids, found - total)

    scores = jax.lax.map(score, chunks)
    return jax.tree.map(lambda x: x.reshape(*labels.shape, *x.shape[2:]), scores)


def logits_of(
    decoder: Decoder,
    h: Float[Array, "N D"],
    before: Float[Array, "T D"],
    slots: Int[Array, " N"],
) -> Float[Array, "N V"]:
    """Returns the logits after some rows.

    Args:
        decoder: The decoder, or its last stage.
        h: Their hidden states after the last layer.
        before: Hidden states before it; see `Decoder.stored_head`.
        slots: Slot of each row's adapter.
    """
    last = decoder.head_input(decoder.final_norm(h))
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
