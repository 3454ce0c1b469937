"""Adapters as peft saves them: the same ranks, scaling, logits and bytes."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import (
    DecoderOptions,
    DecoderSpec,
    Routing,
    SlotShape,
    export_peft,
    import_peft,
    load_model,
)
from jaxlora.adapters.slots import SlotTable
from jaxlora.models.stacks import to_paths
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.modules.scoring import softcap
from jaxlora.train.execute.step import CompiledSteps
from tests.oracle import relative_error

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FOLDERS = sorted(path for path in (GOLDEN / "peft_folders").iterdir())
NAMES = [path.name for path in FOLDERS]


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "peft_run" / "base", dtype="float32")


def logits(model, adapter, tokens, *, slot: int) -> np.ndarray:
    """Logits of base and adapter, from one of three slots of a larger rank."""
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=len(tokens)),
        slots=SlotShape(num_slots=3, rank=11),
        # Those of all adapters, which share one program.
        adapted=tuple(sorted(map(linear_path, linear_shapes(model.config)))),
    )
    table = SlotTable(spec, _steps(spec).write_slot)
    table.load(slot, adapter, "adamw")
    tables = table.state.params, table.settings
    return np.asarray(_program(spec)(model.params, *tables, np.array(tokens), slot))


_steps = functools.cache(CompiledSteps)


@functools.cache
def _program(spec: DecoderSpec):
    @jax.jit
    def run(base, params, settings, tokens, slot):
        tables = to_paths(spec.stacks, params, axis=1)
        decoder = spec.bind(base, tables, settings=settings)
        rows, routing = jnp.arange(len(tokens)), Routing(block_adapter=slot[None])
        hidden = decoder(tokens, rows, jnp.zeros_like(rows), routing)
        head, transposed = decoder.stored_head(hidden)
        logits = hidden @ (head.T if transposed else head)
        return softcap(logits, spec.config.logit_softcap)

    return run


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_means_what_peft_means(model, folder):
    adapter = import_peft(folder, linear_shapes(model.config))
    wanted = json.loads((folder / "wanted.json").read_text())
    assert adapter.modules.keys() == wanted.keys()
    for name, weights in adapter.modules.items():
        actual = [weights.rank, adapter.scaling(weights)]
        assert actual == pytest.approx(wanted[name])
    golden = np.load(folder / "wanted.npz")
    out = logits(model, adapter, golden["tokens"], slot=1)
    assert relative_error(out, golden["logits"]) < 1e-5
    # The negative control: the adapter is felt.
    bare = {n: np.zeros_like(w.b) for n, w in adapter.modules.items()}
    for name, zero in bare.items():
        adapter.modules[name].b[...] = zero
    out = logits(model, adapter, golden["tokens"], slot=1)
    assert relative_error(out, golden["logits"]) > 1e-2


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_round_trip_keeps_every_byte(model, folder, tmp_path):
    shapes = linear_shapes(model.config)
    adapter = import_peft(folder, shapes)
    export_peft(adapter, tmp_path / "out", base_model="b", linear_names=list(shapes))
    before, after = (
        safetensors.numpy.load_file(path / "adapter_model.safetensors")
        for path in (folder, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert array.astype(np.float32).tobytes() == after[key].tobytes()
    again = import_peft(tmp_path / "out", shapes)
    assert again.dropout == adapter.dropout
    for name, weights in adapter.modules.items():
        assert again.scaling(again.modules[name]) == adapter.scaling(weights)
        assert again.modules[name].rank == weights.rank
