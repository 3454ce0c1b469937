"""Logits of a base and of adapters on it, to be compared with those of peft."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora import DecoderOptions, DecoderSpec, Routing, SlotShape
from jaxlora.adapters.slots import SlotTable
from jaxlora.models.config import shared_path
from jaxlora.models.stacks import to_modules
from jaxlora.models.structure import linear_path
from jaxlora.modules.loss import head_logits
from jaxlora.modules.scoring import softcap
from jaxlora.modules.trained_tensors import tensor_settings
from jaxlora.modules.whole_head import with_whole_logits
from jaxlora.train.execute.step import CompiledSteps


def base_logits(model, tokens) -> np.ndarray:
    spec = DecoderSpec(config=model.config, options=_options(model, tokens))
    return np.asarray(_base_program(spec)(model.params, tokens))


def adapter_logits(model, adapters: Sequence, tokens: Sequence) -> list[np.ndarray]:
    """Logits of each adapter's tokens, all in one microbatch, beside an empty slot."""
    names = {name for adapter in adapters for name in adapter.modules}
    paths = {shared_path(linear_path(name)) for name in names}
    spec = DecoderSpec(
        config=model.config,
        options=_options(model, tokens[0]),
        slots=SlotShape(
            num_slots=len(adapters) + 1,
            rank=11,
            settings=tensor_settings(),
            outside=(
                *(("token_rows", 6), ("head_rows", 6)),
                *(("whole_embedding", 1), ("whole_head", 1)),
            ),
        ),
        adapted=tuple(sorted(paths)),
    )
    write_slot, run = _slot_programs(spec)
    table = SlotTable(spec, write_slot)
    for slot, adapter in enumerate(adapters, 1):
        table.load(slot, adapter, "adamw")
    tables = table.state.params, table.settings
    out = run(model.params, *tables, np.array(tokens))
    return list(np.asarray(out).reshape(*np.shape(tokens), -1))


def _options(model, tokens) -> DecoderOptions:
    return DecoderOptions(dtype=model.dtype, max_segment_tokens=len(tokens))


@functools.cache
def _base_program(spec: DecoderSpec):
    @jax.jit
    def run(base, tokens):
        rows = jnp.arange(len(tokens))
        routing = Routing(block_adapter=jnp.zeros(1, jnp.int32))
        decoder = spec.bind(base)
        hidden = decoder(tokens, rows, jnp.zeros_like(rows), routing)
        head, transposed = decoder.stored_head(hidden)
        logits = hidden @ (head.T if transposed else head)
        return softcap(logits, spec.config.logit_softcap)

    return run


@functools.cache
def _slot_programs(spec: DecoderSpec):
    @jax.jit
    def run(base, params, settings, tokens):
        tables = to_modules(spec.stacks, params)
        decoder = spec.bind(base, tables, settings=settings)
        num, size = tokens.shape
        blocks, positions = jnp.arange(num), jnp.tile(jnp.arange(size), num)
        routing = Routing(block_adapter=blocks + 1)
        segments = jnp.repeat(blocks, size)
        hidden = decoder(tokens.reshape(-1), positions, segments, routing)
        head, transposed = decoder.stored_head(hidden)
        own = decoder.own_head_rows(blocks + 1)
        logits = head_logits(hidden, head, head_transposed=transposed, own=own)
        whole = decoder.whole_heads(blocks + 1)
        logits = with_whole_logits(logits, hidden, whole)
        return softcap(logits, spec.config.logit_softcap)

    return CompiledSteps(spec).write_slot, run
