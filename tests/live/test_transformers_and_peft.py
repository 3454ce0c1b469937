"""Compares with transformers and peft in this process; needs torch.

The golden files hold the same comparisons for machines without torch.
"""

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

from jaxlora import export_peft, import_peft, load_model, merge_adapter
from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.models.structure import linear_shapes
from tests.jaxlora.adapters.forward import adapter_logits
from tests.jaxlora.models.test_logits import CASES, MODELS, packed_logits
from tests.jaxlora.train import test_peft_run
from tests.oracle import relative_error

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("default"),  # torch and transformers give many warnings
]
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
BASE = GOLDEN / "peft_run" / "base"


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers(torch):
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def peft(transformers):
    return pytest.importorskip("peft")


def causal_lm(torch, transformers, folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def torch_logits(torch, model, tokens):
    with torch.no_grad():
        out = model(input_ids=torch.tensor(np.asarray(tokens, np.int64))[None])
    return out.logits[0].float().numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits(torch, transformers, case):
    """Uses tokens that no golden file holds."""
    rng = np.random.default_rng(len(case))
    samples = [rng.integers(0, 64, n).astype(np.int32) for n in (90, 33)]
    model = load_model(MODELS / case, dtype="float32")
    theirs = causal_lm(torch, transformers, MODELS / case)
    for sample, ours in zip(
        samples, packed_logits(model, samples, total=256), strict=True
    ):
        assert relative_error(ours, torch_logits(torch, theirs, sample)) < 1e-5


# One model for each structure of layers.
BASES = [BASE, MODELS / "gemma2", MODELS / "gemma3_v5"]


@pytest.fixture(params=BASES, ids=lambda folder: folder.name)
def model(request):
    return load_model(request.param, dtype="float32")


@pytest.fixture
def adapter(model) -> Adapter:
    """An adapter with ranks, alphas and scalings of all sorts, and a random B."""
    rng = np.random.default_rng(0)
    if model.folder == BASE:
        source = import_peft(
            GOLDEN / "peft_folders" / "patterns", linear_shapes(model.config)
        )
        for weights in source.modules.values():
            weights.b[...] = rng.normal(size=weights.b.shape) * 0.2
        return source
    modules = {}
    for i, (name, (k, n)) in enumerate(linear_shapes(model.config).items()):
        rank = 1 + i % 3
        shapes = {"lora_a": (k, rank), "lora_b": (rank, n)}
        tensors = {
            key: (0.2 * rng.normal(size=shape)).astype(np.float32)
            for key, shape in shapes.items()
        }
        modules[name] = LoraWeights(tensors=tensors, rank=rank, lora_alpha=2.0 + i % 5)
    return Adapter(modules=modules)


def test_exported_adapters_load_in_peft(
    torch, transformers, peft, model, adapter, tmp_path
):
    names = list(linear_shapes(model.config))
    folder = export_peft(adapter, tmp_path / "a", base_model="b", linear_names=names)
    base = causal_lm(torch, transformers, model.folder)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, 31)
    wanted = torch_logits(torch, theirs, tokens)
    ours = adapter_logits(model, [adapter], [tokens])[0]
    assert relative_error(ours, wanted) < 1e-5
    with theirs.disable_adapter():
        assert relative_error(torch_logits(torch, theirs, tokens), wanted) > 1e-2
    layers = theirs.base_model.model.get_submodule("model.layers.0.mlp.down_proj")
    weights = adapter.modules["model.layers.0.mlp.down_proj"]
    loaded = layers.lora_A["default"].weight.detach().cpu().numpy()
    np.testing.assert_array_equal(loaded.T, weights.a)
    assert layers.scaling["default"] == pytest.approx(adapter.scaling(weights))


def test_merged_checkpoints_load_in_transformers(
    torch, transformers, model, adapter, tmp_path
):
    names = list(linear_shapes(model.config))
    export_peft(adapter, tmp_path / "a", base_model="b", linear_names=names)
    merged = merge_adapter(model.folder, tmp_path / "a", tmp_path / "merged")
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, 31)
    theirs = torch_logits(torch, causal_lm(torch, transformers, merged), tokens)
    assert relative_error(adapter_logits(model, [adapter], [tokens])[0], theirs) < 1e-5


def expert_adapter(shapes, *, are_alike: bool) -> Adapter:
    """An adapter of all linears; those of all experts are alike, or of each layer."""
    rng, modules = np.random.default_rng(0), {}
    kinds = list(dict.fromkeys(map(shared_path, shapes)))
    for i, (name, (k, n)) in enumerate(shapes.items()):
        rank, alpha = 1 + i % 3, 2.0 + i % 5
        if is_of_expert(name):
            kind = 0 if are_alike else kinds.index(shared_path(name))
            rank, alpha = 2 + kind % 3, 3.0 + kind % 2
        tensors = {"lora_a": (k, rank), "lora_b": (rank, n)}
        modules[name] = LoraWeights(
            tensors={
                key: (0.3 * rng.normal(size=size)).astype(np.float32)
                for key, size in tensors.items()
            },
            rank=rank,
            lora_alpha=alpha,
        )
    return Adapter(modules=modules)


@pytest.mark.parametrize(
    ("has_others", "are_alike", "is_known"),
    [(True, True, True), (True, False, True), (False, True, True), (True, True, False)],
    ids=["all", "unlike", "experts", "unknown"],
)
@pytest.mark.parametrize(
    "case",
    [
        *("gemma4_experts", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
        *("qwen3_moe_dense", "qwen3_next", "qwen3_5_moe"),
    ],
)
def test_adapters_of_experts(
    torch, transformers, peft, tmp_path, case, has_others, are_alike, is_known
):
    """peft reads the folder whether or not `export_peft` knows the kind of the base."""
    # Gated delta nets magnify rounding.
    own = 2e-4 if case in ("qwen3_next", "qwen3_5_moe") else 1e-5
    model = load_model(MODELS / case, dtype="float32")
    shapes = linear_shapes(model.config)
    adapter = expert_adapter(shapes, are_alike=are_alike)
    if not has_others:
        kept = {n: x for n, x in adapter.modules.items() if is_of_expert(n)}
        adapter = Adapter(modules=kept)
    folder = export_peft(
        adapter,
        tmp_path / "a",
        base_model="b",
        linear_names=list(shapes),
        model_type=model.config.model_type if is_known else None,
    )
    read = import_peft(folder, shapes)
    assert read.modules.keys() == adapter.modules.keys()
    theirs = peft.PeftModel.from_pretrained(
        causal_lm(torch, transformers, model.folder), folder
    ).eval()
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, 64)
    wanted = torch_logits(torch, theirs, tokens)
    ours, again = adapter_logits(model, [adapter, read], [tokens, tokens])
    assert relative_error(ours, wanted) < own
    assert relative_error(again, wanted) < own
    with theirs.disable_adapter():
        assert relative_error(torch_logits(torch, theirs, tokens), wanted) > 1e-2
    merged = merge_adapter(model.folder, folder, tmp_path / "merged")
    merged_logits = torch_logits(torch, causal_lm(torch, transformers, merged), tokens)
    assert relative_error(merged_logits, wanted) < 5 * own


def test_a_training_run(torch, transformers, peft, tmp_path, monkeypatch):
    """Makes the golden run anew, and reproduces it."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    make = importlib.import_module("make_peft_run")
    monkeypatch.setattr(make, "OUT", tmp_path)
    make.save_base()
    for name, job in make.JOBS.items():
        make.train(name, job)
    sys.modules.pop("make_peft_run")
    records = {
        n: json.loads((tmp_path / n / "run.json").read_text()) for n in make.JOBS
    }
    monkeypatch.setattr(test_peft_run, "GOLDEN", tmp_path)
    monkeypatch.setattr(test_peft_run, "RECORDS", records)
    trained = test_peft_run.train_together(("a", "b"))
    test_peft_run.test_losses_norms_and_rates(trained)
    test_peft_run.test_final_weights(trained)
