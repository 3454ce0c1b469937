"""Adapters as peft saves them: the same ranks, scaling, logits and bytes."""

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
from jaxlora.hf.names import linear_path, linear_shapes
from jaxlora.models.stacks import to_paths
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
        adapted=tuple(sorted(map(linear_path, adapter.modules))),
    )
    table = SlotTable(spec, CompiledSteps(spec).write_slot)
    table.load(slot, adapter, "adamw")
    rows = jnp.arange(len(tokens))

    @jax.jit
    def run(base, params, settings):
        tables = to_paths(spec.stacks, params, axis=1)
        decoder = spec.bind(base, tables, settings=settings)
        routing = Routing(block_adapter=jnp.array([slot]))
        hidden = decoder(jnp.array(tokens), rows, jnp.zeros_like(rows), routing)
        head, transposed = decoder.stored_head(hidden)
        logits = hidden @ (head.T if transposed else head)
        return softcap(logits, model.config.logit_softcap)

    return np.asarray(run(model.params, table.state.params, table.settings))


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
