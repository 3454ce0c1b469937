"""The forward pass over a microbatch, in the parts that pipeline stages run.

The whole decoder and a stage of it run the same functions: `embed` on the first stage,
`run_layers` on all, `losses` on the last. Between stages only hidden states are passed.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.models.decoder import Decoder
from jaxlora.models.division import gather_options
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.attention import compiler_options
from jaxlora.modules.loss import SoftLabels, target_nll
from jaxlora.modules.routing import Routing
from jaxlora.modules.whole_head import whole_nll
from jaxlora.objectives.base import RowInputs
from jaxlora.objectives.table import OBJECTIVES, has_baseline
from jaxlora.sharding.tensor import gather_rows, whole_rows

Base = dict[str, Array]


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotKeys:
    """Keys of the slots' dropout masks, and baselines of their global batches.

    Attributes:
        seed: Each slot's job seed; None in evaluation, where nothing is dropped.
        step: Each slot's optimizer step; None in evaluation.
        baseline: Each slot's baseline; None: no objective of the run has one.
        first_layer: What is added to the numbers of a decoder's layers, which key the
            masks; None: nothing. See `jaxlora.models.sections`.
    """

    seed: Int[Array, " G"] | None = None
    step: Int[Array, " G"] | None = None
    baseline: Float[Array, " G"] | None = None
    first_layer: Int[Array | np.ndarray, ""] | None = None


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLosses:
    """Losses of a microbatch, by slot.

    Attributes:
        loss: Sum of the losses of the slot's rows.
        metrics: Sums of the metrics of the run's objectives, by name; 0 for slots of
            jobs with another objective.
        is_finite: Whether all of the slot's hidden states are finite.
        nll: Negative log likelihood of each row's label; 0 in rows that are no targets
            and not read. None in training, unless an objective reads rows.
    """

    loss: Float[Array, " G"]
    metrics: dict[str, Float[Array, " G"]]
    is_finite: Bool[Array, " G"]
    nll: Float[Array, " T"] | None


def embed(decoder: Decoder, batch: PackedBatch) -> Float[Array, "T D"]:
    """Hidden states of a microbatch before the first layer."""
    return decoder.embed(batch.token_ids, batch.block_adapter)


def run_layers(
    decoder: Decoder,
    batch: PackedBatch,
    keys: SlotKeys | None,
    h: Float[Array, "T D"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Runs the decoder's layers over a microbatch.

    Args:
        decoder: The decoder, or one stage of it.
        batch: The microbatch.
        keys: Keys of the dropout masks in training; not used if the slots were made
            without dropout. None, or without seeds: evaluation, where nothing is
            dropped.
        h: Hidden states before the first of these layers.

    Returns:
        The output and the input of the last of these layers.
    """
    routing = _routing(decoder, batch, keys)
    return decoder.run_layers(h, batch.positions, batch.segment_ids, routing)


def _routing(decoder: Decoder, batch: PackedBatch, keys: SlotKeys | None) -> Routing:
    routing = Routing(block_adapter=batch.block_adapter)
    uses_dropout = decoder.slots is not None and decoder.slots.use_dropout
    if uses_dropout and keys is not None and keys.seed is not None:
        routing = dataclasses.replace(
            routing,
            token_index=batch.token_index,
            seed=keys.seed,
            step=keys.step,
            first_layer=keys.first_layer,
        )
    return routing


def label_nll(
    decoder: Decoder,
    batch: PackedBatch,
    hidden: Float[Array, "T D"],
    before: Float[Array, "U D"],
) -> Float[Array, " T"]:
    """Negative log likelihood of the labels, in nats; 0 in rows that need none.

    Args:
        decoder: The decoder, or its last stage.
        batch: The microbatch; the objectives of the decoder say which rows are targets,
            and which are read without a gradient.
        hidden: Hidden states after the final norm, all rows.
        before: Hidden states before the last layer, see `Decoder.stored_head`.
    """
    names = decoder.options.objectives
    is_target = functools.reduce(
        jnp.logical_or,
        [OBJECTIVES[name].is_target(batch.loss_inputs[name]) for name in names],
    )
    hidden = decoder.head_input(hidden)
    head, transposed = decoder.stored_head(before)
    labels, cap = _labels(decoder, batch), decoder.config.logit_softcap

    def nll_of(rows, hidden, whole, own):
        by_frozen = rows
        if whole is not None:
            by_frozen = rows & (whole.slots(len(hidden)) < 0)
        nll = target_nll(
            hidden,
            head,
            labels,
            by_frozen,
            head_transposed=transposed,
            logit_softcap=cap,
            own=own,
            vocab_parts=decoder.options.tensor,
        )
        if whole is not None:
            nll += whole_nll(hidden, whole, labels, rows, logit_softcap=cap)
        return nll

    block = batch.block_adapter
    given = hidden, decoder.whole_heads(block), decoder.own_head_rows(block)
    nll = nll_of(is_target, *given)
    for name in names:
        if (is_read := OBJECTIVES[name].is_read) is not None:
            rows = is_read(batch.loss_inputs[name]) & ~is_target
            # Without a gradient, these rows cost a product with the head, not two.
            nll += nll_of(rows, *jax.lax.stop_gradient(given))
    return nll


def _labels(decoder: Decoder, batch: PackedBatch) -> Int[Array, " T"] | SoftLabels:
    """Returns the targets of the rows: next tokens, or those of a row's objective."""
    labels: Array | SoftLabels = batch.labels
    for name in decoder.options.objectives:
        objective, inputs = OBJECTIVES[name], batch.loss_inputs[name]
        if objective.soft_labels is None:
            continue
        ids, shares, scale = (inputs[key] for key in objective.soft_labels)
        # float32 holds tokens up to 2^24.
        soft = SoftLabels(ids.astype(jnp.int32), shares, scale)
        is_own = objective.is_target(inputs)
        if not isinstance(labels, SoftLabels):
            labels = SoftLabels.of(labels, soft.ids.shape[1])
        pick = lambda x, y, own=is_own: jnp.where(
            own.reshape(-1, *[1] * (x.ndim - 1)), x, y
        )
        labels = jax.tree.map(pick, soft, labels)
    return labels


def _loss_inputs(
    decoder: Decoder,
    batch: PackedBatch,
    keys: SlotKeys | None,
    hidden: Float[Array, "U D"],
) -> dict[str, RowInputs]:
    """Inputs of the run's objectives, with baselines, scores and the reference."""
    names, block = decoder.options.objectives, batch.block_adapter
    inputs = {name: batch.loss_inputs[name] for name in names}
    for name in names:
        if OBJECTIVES[name].needs_reference:
            assert batch.reference_nll is not None, "an objective needs it"
            inputs[name] = inputs[name] | {"reference_nll": batch.reference_nll}
    if has_baseline(names):
        assert keys is not None and keys.baseline is not None, "an objective needs it"
        by_block = jnp.where(block >= 0, keys.baseline[jnp.maximum(block, 0)], 0.0)
        rows = jnp.repeat(by_block, len(batch.token_ids) // len(block))
        for name in names:
            if OBJECTIVES[name].baseline is not None:
                inputs[name] = inputs[name] | {"baseline": rows}
    for name in names:
        if (is_scored := OBJECTIVES[name].is_scored) is not None:
            assert decoder.score is not None, "an objective needs it"
            whole = whole_rows(hidden, decoder.options.tensor)
            wanted = jnp.where(is_scored(inputs[name])[:, None], whole, 0)
            score = decoder.score(wanted, block)
            inputs[name] = inputs[name] | {"score": score}
    return inputs


def losses(
    decoder: Decoder,
    batch: PackedBatch,
    h: Float[Array, "T D"],
    before: Float[Array, "T D"],
    keys: SlotKeys | None = None,
) -> JobLosses:
    """Losses of a microbatch.

    A value that is not finite in an earlier layer stays so in the row's residual
    stream, so that the last hidden states tell it for all layers and stages.

    Args:
        decoder: The decoder, or its last stage.
        batch: The microbatch.
        h: Hidden states after the last layer.
        before: Hidden states before the last layer, see `Decoder.stored_head`.
        keys: Has the baselines of the slots, if an objective of the run has one.
    """
    normed, tensor = decoder.final_norm(h), decoder.options.tensor
    hidden = gather_rows(normed, tensor)
    nll = label_nll(decoder, batch, hidden, before)
    loss_inputs = _loss_inputs(decoder, batch, keys, normed)
    loss_T = functools.reduce(
        jnp.add,
        [
            OBJECTIVES[name].losses(nll, inputs, batch.group_ids)
            for name, inputs in loss_inputs.items()
        ],
    )
    metrics_T: dict[str, Array] = {}
    for name, inputs in loss_inputs.items():
        found = OBJECTIVES[name].metrics(nll, inputs, batch.group_ids)
        for key, values in found.items():
            metrics_T[key] = metrics_T[key] + values if key in metrics_T else values
    num_blocks = batch.block_adapter.shape[0]
    finite_T = jnp.isfinite(hidden).all(axis=-1) | (batch.segment_ids < 0)
    assert decoder.slots is not None
    mine = batch.block_adapter == jnp.arange(decoder.slots.num_slots)[:, None]

    def by_slot(values_T: Array) -> Array:
        values_B = values_T.reshape(num_blocks, -1).sum(axis=1)
        return jnp.where(mine, values_B, 0.0).sum(axis=1)

    finite_B = finite_T.reshape(num_blocks, -1).all(axis=1)
    return JobLosses(
        loss=by_slot(loss_T),
        metrics={key: by_slot(values) for key, values in metrics_T.items()},
        is_finite=(finite_B | ~mine).all(axis=1),
        nll=nll,
    )


def run_stage(
    spec: DecoderSpec,
    base: Base,
    adapters: dict[str, Array],
    settings: SlotSettings,
    batch: PackedBatch,
    keys: SlotKeys | None,
    h: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"] | JobLosses:
    """Runs one stage forward over a microbatch.

    Args:
        spec: The stage, or the whole decoder.
        base: Frozen weights of the stage, by path.
        adapters: Slot tables A and B of the stage, by path.
        settings: Settings of the slots in the stage's adapted linears.
        batch: The microbatch; each stage gets all of it.
        keys: Keys of the dropout masks in training; None, or without seeds: evaluation.
        h: Hidden states from the stage before; None on the first stage.

    Returns:
        Hidden states for the next stage; losses on the last stage.
    """
    decoder = spec.bind(base, adapters, settings=settings)
    if spec.has_embedding:
        assert h is None
        h = embed(decoder, batch)
    assert h is not None
    h, before = run_layers(decoder, batch, keys, h)
    return losses(decoder, batch, h, before, keys) if spec.has_head else h


def job_losses(
    spec: DecoderSpec,
    base: Base,
    adapters: dict[str, Array],
    settings: SlotSettings,
    batch: PackedBatch,
    keys: SlotKeys | None,
) -> JobLosses:
    """Runs a whole decoder over a microbatch; arguments are those of `run_stage`."""
    out = run_stage(spec, base, adapters, settings, batch, keys)
    assert isinstance(out, JobLosses)
    return out


# XLA would put a kernel that reads a part of a table, such as one linear's adapters,
# into a "dynamic slice fusion" with the slice. Such a call is part of no CUDA graph,
# and the host takes about 30 us for it: a step of SmolLM2 took 33 ms of the host, not
# 11, and one of Llama-3.1-8B 447.5 ms, not 442.8 (H100, jax 0.11.2).
SINGLE_CALLS = {"xla_gpu_enable_dynamic_slice_fusion": False}


def training_options(spec: DecoderSpec) -> dict[str, str | bool | int]:
    """Compiler options for a program with the decoder's gradient.

    They disable XLA's own rematerialization, which depends on the available memory and
    would make the time and memory of a step unpredictable. The setting `remat` decides
    what is recomputed.

    Args:
        spec: The decoder, or one stage of it.
    """
    no_remat = {"xla_disable_hlo_passes": "rematerialization"}
    return no_remat | evaluation_options(spec)


def evaluation_options(spec: DecoderSpec) -> dict[str, bool | int]:
    """Compiler options for a program with the decoder's forward pass alone.

    With cuDNN's attention they are those of training, with which XLA compiles one
    kernel per fusion. It would otherwise compile several and choose the fastest, which
    takes long, and which may give other losses in the next process.

    Args:
        spec: The decoder, or one stage of it.
    """
    return {
        **SINGLE_CALLS,
        **compiler_options(spec.options.attention),
        **gather_options(spec),
    }
