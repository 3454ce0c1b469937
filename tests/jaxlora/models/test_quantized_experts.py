"""Experts whose frozen weights are quantized, as the arrays of a layer's experts."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import load_model
from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf import load
from jaxlora.hf.base_format import find_base_format, kept_linears
from jaxlora.hf.checkpoint import open_checkpoint
from jaxlora.hf.convert import convert
from jaxlora.hf.quantized import place
from jaxlora.models.registry import model_config
from jaxlora.models.structure import tensor_specs
from jaxlora.pallas_kernels import FORMATS
from tests import tiny
from tests.jaxlora.hf import quantized_checkpoints as stored
from tests.jaxlora.models.test_experts import FUSED
from tests.jaxlora.models.test_logits import NO_ADAPTER, pack, spec_of
from tests.oracle import relative_error
from tests.pallas_kernels.quantized import weights as of_formats

# Every format holds weights of these widths.
COMMON = {
    **tiny.CONFIG,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 192, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 5},
    "olmoe": {},
}
EXPERTS = "layers.0.mlp.experts."
TOKENS = np.random.default_rng(0).integers(0, 288, 40)


def config_of(family: str) -> dict:
    return COMMON | CONFIGS[family] | {"model_type": family}


def weights_of(config: dict) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face's names."""
    rng, weights = np.random.default_rng(0), {}
    for spec in tensor_specs(model_config(config)):
        for part in spec.parts:
            noise = rng.normal(size=part.hf_shape) * part.hf_shape[-1] ** -0.5
            weights[part.hf_name] = noise.astype(np.float32)
    return weights


def fused(weights: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Puts the experts of a layer into two tensors, as transformers 5 can."""
    weights, found = dict(weights), {}
    blocks = {name.partition(".experts.")[0] for name in weights}
    ends = {"weight": "", "weight_scale_inv": "_scale_inv"}
    for block, (name, linears), end in itertools.product(blocks, FUSED.items(), ends):
        if f"{block}.experts.0.{linears[0]}.{end}" in weights:
            each = [f"{block}.experts.{i}.{x}" for i in range(number) for x in linears]
            parts = [weights.pop(f"{linear}.{end}") for linear in each]
            rows = np.concatenate(parts).reshape(number, -1, parts[0].shape[1])
            found[f"{block}.experts.{name}{ends[end]}"] = rows
    return weights | found


def write(folder, config, weights):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    # The weights of an array that is not contiguous would be written in another order.
    arrays = {name: np.ascontiguousarray(x) for name, x in weights.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Dense checkpoints by family, and whether experts are fused."""
    folder, found = tmp_path_factory.mktemp("dense"), {}
    for family in CONFIGS:
        config, weights = config_of(family), weights_of(config_of(family))
        found[family, False] = write(folder / family, config, weights)
        weights = fused(weights, COMMON["num_experts"])
        found[family, True] = write(folder / f"{family}_fused", config, weights)
    return found


def logits_of(model):
    """Logits of a sample, without a gradient."""
    token_ids, *rest = pack([TOKENS], total=64)

    @jax.jit
    def run(params):
        decoder = spec_of(model).bind(params)
        hidden = decoder.head_input(decoder(token_ids, *rest, NO_ADAPTER))
        head, transposed = decoder.stored_head(hidden)
        return hidden @ (head.T if transposed else head)

    return np.asarray(run(model.params))[: len(TOKENS)]


def dequantized(model, dense):
    """Returns the weights of a model whose experts are dequantized one by one."""
    params = dict(model.params)
    for path, like in dense.params.items():
        if ".experts." not in path or path in params:
            continue
        fields = {f: f"{path}.{f}" for f in model.base_format.fields}
        arrays = {f: params.pop(p) for f, p in fields.items() if p in params}
        each = [
            model.base_format.weight({f: x[i] for f, x in arrays.items()})
            for i in range(len(like))
        ]
        dense = [of_formats.dequantized(one, like.dtype).T for one in each]
        params[path] = jnp.asarray(np.stack(dense))
    return params


PATTERNS = {
    "none": (),
    "attention": ("self_attn.*",),
    "down": ("experts.*.down_proj",),
    "gate": ("experts.*.gate_proj", "self_attn.*"),
    "layer": ("layers.1.*",),
    "experts": ("experts.*",),
}


def drawn():
    """Draws settings so that each value of each is tried."""
    rng = np.random.default_rng(1)
    settings = [list(FORMATS), list(CONFIGS), list(PATTERNS), [False, True]]
    columns = [rng.permutation(np.resize(np.arange(len(x)), 10)) for x in settings]
    rows = zip(*columns, strict=True)
    return [tuple(s[i] for s, i in zip(settings, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("name", "family", "pattern", "is_fused"),
    [
        pytest.param(*case, marks=[pytest.mark.grid] if i >= 3 else [])
        for i, case in enumerate(drawn())
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    folders, name, family, pattern, is_fused
):
    folder = folders[family, is_fused]
    patterns = PATTERNS[pattern]
    model = load_model(folder, dtype="float32", quantize=name, keep_bf16=patterns)
    dense = load_model(folder, dtype="float32")
    assert model.fingerprint == dense.fingerprint
    kept = set(kept_linears(dense.config, patterns))
    for path, array in dense.params.items():
        if ".experts." in path:
            assert (path in model.params) == (path.removesuffix(".kernel") in kept)
        if path in model.params:
            np.testing.assert_array_equal(model.params[path], array)
    logits = logits_of(model)
    params, base = dequantized(model, dense), model.base_format
    kernels = (path for path in params if path.endswith(".kernel"))
    kept = tuple(path.removesuffix(".kernel") for path in kernels)
    same = dataclasses.replace(
        model, params=params, base_format=dataclasses.replace(base, kept=kept)
    )
    np.testing.assert_array_equal(logits, logits_of(same))
    assert not np.array_equal(logits, logits_of(dense))


@pytest.mark.parametrize("expression", ["experts.3.*", "experts.[0-3].down_proj"])
def test_experts_of_a_layer_are_kept_together(folders, expression):
    message = r"not this one, but their weights are one array. .*'experts\.\*'"
    with pytest.raises(ConfigError, match=message):
        load_model(folders["olmoe", False], quantize="nf4", keep_bf16=[expression])


def test_narrow_experts_are_refused_and_can_be_kept(tmp_path):
    config = config_of("olmoe") | {"intermediate_size": 96}
    folder = write(tmp_path / "narrow", config, weights_of(config))
    with pytest.raises(ModelError, match=r"mlp.experts.down_proj: .*but K=96 is not"):
        load_model(folder, quantize="nf4")
    load_model(folder, quantize="nf4", keep_bf16=["experts.*.down_proj"])
    load_model(folder, quantize="mxfp4")


# ---- loading -------------------------------------------------------------------------


def test_one_expert_at_a_time_is_held_dense(folders, monkeypatch):
    """On the host and on the device, however many experts a layer has."""
    checkpoint = open_checkpoint(folders["olmoe", False])
    base = find_base_format(checkpoint, "nf4")
    specs = {spec.path: spec for spec in checkpoint.specs()}
    spec = specs[f"{EXPERTS}down_proj.kernel"]
    one = 64 * 128 * 4
    whole = 5 * (64 * 64 + 64 * 2 + 4 + 4)  # with scales
    found = load._host_bytes(checkpoint, spec, np.dtype(np.float32), base)
    assert found == one + whole
    counts, original = [], place.put_converted
    others = jax.live_arrays()  # of tests before
    known = {id(x) for x in others}

    def counted(array, where, dtype, **options):
        made = original(array, where, dtype, **options)
        if 128 in array.shape:
            own = [x for x in jax.live_arrays() if id(x) not in known]
            counts.append(sum(x.shape == array.shape for x in own))
        return made

    monkeypatch.setattr(place, "put_converted", counted)
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda process: range(1))
    model = load_model(folders["olmoe", False], quantize="nf4")
    assert counts == [1] * (2 * 3 * 5)
    assert model.params[f"{spec.path}.values"].shape == (5, 64, 64)


def write_quantized(
    folder, kind, *, dense=(), family="qwen3_moe", num_layers=2, is_fused=False
):
    """Writes a checkpoint whose experts are of a kind; returns what it stands for.

    Args:
        folder: Folder to make.
        kind: Key of `stored.KINDS` or `stored.BLOCKS`.
        dense: Parts of names of experts' linears that stay dense.
        family: Key of `CONFIGS`.
        num_layers: Number of layers.
        is_fused: See `fused`.
    """
    quantization, quantize, _ = (stored.KINDS | stored.BLOCKS)[kind]
    config = config_of(family) | {"num_hidden_layers": num_layers}
    wanted = weights_of(config)
    weights = dict(wanted)
    for name in [name for name in weights if ".experts." in name]:
        if not any(part in name for part in dense):
            tensors, wanted[name] = quantize(weights.pop(name))
            start = name.removesuffix("weight")
            weights |= {start + part: np.asarray(x) for part, x in tensors.items()}
    if is_fused:
        weights = fused(weights, COMMON["num_experts"])
    write(folder, config | {"quantization_config": quantization}, weights)
    return wanted


@pytest.mark.parametrize("kind", ["int8-channel", "nf4-nested", "fp8-blocks"])
def test_experts_of_a_checkpoint_are_taken_as_they_are(tmp_path, kind):
    wanted = write_quantized(tmp_path / "stored", kind)
    model = load_model(tmp_path / "stored", dtype="float32")
    assert model.base_format.name == (stored.KINDS | stored.BLOCKS)[kind][2]
    dense = load_model(convert(tmp_path / "stored", tmp_path / "out", dtype="float32"))
    rounding = 0.1 if kind == "fp8-blocks" else 1e-6  # is quantized again
    for path, array in dequantized(model, dense).items():
        if ".experts." in path:
            _, _, linear, _ = path.rsplit(".", 3)
            for i, one in enumerate(array):
                name = f"model.{EXPERTS}{i}.{linear}.weight"
                assert relative_error(dense.params[path][i].T, wanted[name]) < 1e-6
                assert relative_error(one.T, wanted[name]) < rounding
    if kind == "int8-channel":
        assert relative_error(logits_of(model), logits_of(dense)) < 1e-5


def test_fused_experts_in_fp8_are_those_of_single_ones(tmp_path):
    """A block does not have rows of both gate and up."""
    given = {"family": "olmoe", "num_layers": 1}
    loaded = []
    for is_fused in (False, True):
        folder = tmp_path / f"{is_fused}"
        write_quantized(folder, "fp8-blocks", is_fused=is_fused, **given)
        loaded.append(load_model(folder).params)
    single, whole = loaded
    assert single.keys() == whole.keys()
    for path, array in single.items():
        np.testing.assert_array_equal(whole[path], array)


def test_experts_of_which_some_are_quantized_are_refused(tmp_path):
    write_quantized(tmp_path / "some", "int8-channel", dense=[".experts.3.up_proj"])
    message = r"layers.0.mlp.experts.0.up_proj is quantized .* other experts is not"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "some")
    write_quantized(tmp_path / "all", "int8-channel", dense=["up_proj"])
    model = load_model(tmp_path / "all", dtype="float32")
    assert f"{EXPERTS}up_proj.kernel" in model.params
    assert f"{EXPERTS}down_proj.kernel.values" in model.params
