"""LoRA on every linear equals torch's, for families with blocks of their own.

These are experts and gated delta nets; see tests/golden.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import DecoderOptions, DecoderSpec, Routing, SlotShape, load_model
from jaxlora.adapters.slot_state import padded_rows
from jaxlora.hf.convert import convert
from jaxlora.models.config import shared_path
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.stacks import to_modules, to_paths
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.modules.loss import target_nll
from tests.jaxlora.models.test_logits import MODELS, pack
from tests.oracle import relative_error

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
CASES = sorted(path.parent.name for path in MODELS.glob("*/lora.safetensors"))
RANK = 2  # of make_logits.py
OF_PEFT = {"lora_a": "lora_A", "lora_b": "lora_B"}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_those_of_torch(case):
    model = load_model(MODELS / case, dtype="float32")
    golden = safetensors.numpy.load_file(MODELS / case / "lora.safetensors")
    sampled = np.load(MODELS / case / "logits.npz")
    # The one that is compared ran alone there; here another one comes before it.
    other, sample = sampled["tokens_1"], sampled["tokens_0"]
    own = slice(len(other), len(other) + len(sample))
    names = {linear_path(name): name for name in linear_shapes(model.config)}
    adapted = tuple(sorted({shared_path(path) for path in names}))
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=128),
        slots=SlotShape(num_slots=1, rank=RANK),
        adapted=adapted,
    )
    ones = np.ones((len(adapted), 1), np.float32)
    settings = SlotSettings(
        scaling=ones, dropout=0 * ones, rank=np.full_like(ones, RANK, np.int32)
    )
    by_path = {
        f"{path}.{table}": golden[f"{name}.{theirs}"].T
        for path, name in names.items()
        for table, theirs in OF_PEFT.items()
    }
    rows = padded_rows(spec.stacks, spec.adapter_shapes(), by_path)
    tables = {name: jnp.asarray(row[None]) for name, row in rows.items()}
    tokens, positions, segments = pack([other, sample], total=128)
    is_target = (jnp.arange(128) >= own.start) & (jnp.arange(128) < own.stop - 1)

    @jax.jit
    def run(tables, base):
        def loss(tables):
            own = to_modules(spec.stacks, tables)
            decoder = spec.bind(base, own, settings=settings)
            routing = Routing(block_adapter=jnp.zeros(1, jnp.int32))
            hidden = decoder(tokens, positions, segments, routing)
            head, transposed = decoder.stored_head(hidden)
            labels = jnp.roll(tokens, -1)
            nll = target_nll(
                hidden, head, labels, is_target, head_transposed=transposed
            )
            return nll.sum(), hidden @ (head.T if transposed else head)

        return jax.grad(loss, has_aux=True)(tables)

    gradients, logits = run(tables, model.params)
    gradients = to_paths(spec.stacks, {n: x[0] for n, x in gradients.items()})
    assert relative_error(logits[own], golden["logits"]) < 1e-5
    for path, name in names.items():
        for table, theirs in OF_PEFT.items():
            wanted = golden[f"{name}.{theirs}.gradient"]
            actual = np.asarray(gradients[f"{path}.{table}"]).T
            assert relative_error(actual, wanted) < 1e-4, name


def test_experts_that_are_stored_in_two_tensors(tmp_path):
    """As transformers 5 can save them; the model is the same to the last bit."""
    weights = safetensors.numpy.load_file(MODELS / "olmoe" / "model.safetensors")
    experts = {name: weights.pop(name) for name in list(weights) if "experts" in name}
    for block in {name.partition(".experts.")[0] for name in experts}:
        for fused, linears in FUSED.items():
            name = f"{block}.experts.{{}}.{{}}.weight".format
            number = sum(x.startswith(block) for x in experts) // 3
            parts = [experts[name(i, x)] for i in range(number) for x in linears]
            rows = np.concatenate(parts).reshape(number, -1, parts[0].shape[1])
            weights[f"{block}.experts.{fused}"] = rows
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(weights))
    config = (MODELS / "olmoe" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    fused, single = load_model(tmp_path), load_model(MODELS / "olmoe")
    assert fused.fingerprint == single.fingerprint
    for path, array in single.params.items():
        np.testing.assert_array_equal(fused.params[path], array)
    out = convert(tmp_path, tmp_path / "out", dtype="float32")
    assert load_model(out).fingerprint == single.fingerprint
