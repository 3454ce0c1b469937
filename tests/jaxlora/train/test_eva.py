"""EVA: adapters that start from the principal components of their inputs."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, RunConfig, Trainer, import_peft
from jaxlora.adapters.eva import Components, num_ranks, update
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError
from jaxlora.hf.names import linear_shapes
from jaxlora.train import eva_start
from jaxlora.train.plan.prepared_job import prepare_job
from tests import tiny
from tests.jaxlora.train.test_contracts import assert_same_training
from tests.oracle import relative_error

JOB = {"rank": 4, "lora_alpha": 8, "init_lora_weights": "eva", "batch_size": 4}
JOB |= {"steps": 3, "max_length": 96, "learning_rate": 1e-2, "adam_eps": 1e-4}
SMALL = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
SLOTS = {"max_concurrent_jobs": 3, "slot_targets": SMALL["target_modules"]}


def incremental(batches, num: int):
    """Components and their shares by the definition, in float64 with whole SVDs."""
    vectors, sizes = np.zeros((0, batches[0].shape[1])), np.zeros(0)
    mean, count, variance = np.zeros(batches[0].shape[1]), 0, 0.0
    for x in batches:
        total, new = count + len(x), x.mean(axis=0)
        shift = np.sqrt(count * len(x) / total) * (mean - new)
        rows = np.vstack([sizes[:, None] * vectors, x - new, shift])
        _, s, vh = np.linalg.svd(rows, full_matrices=False)
        vectors, sizes = vh[:num], s[:num]
        variance += ((x - new) ** 2).sum() + (shift**2).sum()
        mean, count = (count * mean + len(x) * new) / total, total
    return vectors, sizes**2 / variance


def test_components_are_those_of_the_definition():
    """Ragged batches of rows of which some do not count, far from zero."""
    rng = np.random.default_rng(0)
    k, num = 40, 6
    scales = 2.0 ** -np.arange(k) * 8
    basis = np.linalg.qr(rng.normal(size=(k, k)))[0]
    center, batches, found = 3 * rng.normal(size=k), [], Components.none(num, k)
    for count in (30, 64, 11, 50):
        x = (rng.normal(size=(64, k)) * scales) @ basis + center
        is_included = rng.permutation(64) < count
        batches.append(x[is_included])
        probe = rng.normal(size=(k, 2 * num))
        args = jnp.asarray(x, jnp.float32), jnp.asarray(is_included)
        found = update(found, *args, jnp.asarray(probe, jnp.float32))
    vectors, shares = incremental(batches, num)
    assert relative_error(np.asarray(found.shares), shares) < 1e-4
    cosines = (np.asarray(found.vectors) * vectors).sum(axis=1)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-4)
    whole = np.concatenate(batches)
    assert relative_error(np.asarray(found.mean), whole.mean(axis=0)) < 1e-5
    variance = ((whole - whole.mean(axis=0)) ** 2).sum()
    assert float(found.variance) == pytest.approx(variance, rel=1e-5)


def test_ranks_go_where_most_is_explained():
    shares = {"q": [0.5, 0.2], "v": [0.5, 0.2], "o": [0.4, 0.1, 0.05], "down": [0.01]}
    shares = {name: np.array(values) for name, values in shares.items()}
    groups = [["q", "v"], ["o"], ["down"]]
    for budget, wanted in ((4, (2, 1, 1, 0)), (5, (2, 2, 1, 0)), (8, (2, 2, 3, 1))):
        found = num_ranks(shares, groups, budget)
        assert tuple(found[name] for name in ("q", "v", "o", "down")) == wanted


@pytest.fixture
def job(tmp_path) -> LoraJob:
    path = tiny.write_records(tmp_path / "eva.jsonl", 24, seed=1)
    return LoraJob(name="eva", data={"path": path}, **JOB, **SMALL)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(eva_start, "BATCH_TOKENS", 256)
    monkeypatch.setattr(eva_start, "MOST_BATCHES", 3)


def test_a_job_starts_from_the_components_of_its_tokens(
    train, model, job, tmp_path, small_batches
):
    """Of q and v of the first layer, which get the normalized embedding."""
    plain = tiny.write_records(tmp_path / "plain.jsonl", 12, seed=3)
    beside = LoraJob(
        name="plain", data={"path": plain}, **JOB | {"init_lora_weights": True}, **SMALL
    )
    still = job.replace(name="still", learning_rate=0.0, steps=1)
    together = train([job, still, beside], **SLOTS)
    alone = train([job], **SLOTS)
    assert_same_training(together, alone, ["eva"])
    folder = together.result.output_dir / "adapters" / "still"
    config = json.loads((folder / "adapter_config.json").read_text())
    start = import_peft(folder, linear_shapes(model.config))
    ranks = {name: weights.rank for name, weights in start.modules.items()}
    assert sum(ranks.values()) == 4 * len(SMALL["target_modules"])
    assert max(ranks.values()) <= 8 and len(set(ranks.values())) > 1
    assert config["rank_pattern"]
    for weights in start.modules.values():
        assert start.scaling(weights) == pytest.approx(2)
        assert not weights.b.any()
        gram = weights.a.T @ weights.a
        np.testing.assert_allclose(gram, np.eye(weights.rank), atol=1e-5)
    _check_first_layer(model, job, start)
    trained = import_peft(folder.parent / "eva", linear_shapes(model.config))
    assert {n: w.rank for n, w in trained.modules.items()} == ranks


def _check_first_layer(model, job, start) -> None:
    weights = safetensors.numpy.load_file(model.folder / "model.safetensors")
    reader = DataReader(load_tokenizer(model.folder), None)
    data = reader.read(job, "train")
    norm = weights["model.layers.0.input_layernorm.weight"].astype(np.float64)
    table = weights["model.embed_tokens.weight"].astype(np.float64)
    batches, size = [[]], 0
    whole = job.replace(steps=6)
    order = prepare_job(whole, model.config, reader).order
    for i in np.concatenate([order.batch(step) for step in range(6)]).tolist():
        sample = data.samples[i]
        if size + len(sample.token_ids) > 256:
            batches.append([])
            size = 0
        size += len(sample.token_ids)
        h = table[sample.token_ids]
        h = h / np.sqrt((h**2).mean(axis=1, keepdims=True) + 1e-5) * norm
        batches[-1].append(h[sample.is_target])
    rows = [np.concatenate(batch) for batch in batches[:3] if batch]
    a = start.modules["model.layers.0.self_attn.q_proj"].a
    vectors, _ = incremental(rows, 8)
    overlap = np.linalg.svd(vectors[: a.shape[1]] @ a)[1]
    assert overlap.min() > 0.95
    # It explains as much as the best matrix of its rank.
    centered = np.concatenate(rows) - np.concatenate(rows).mean(axis=0)
    best = np.linalg.svd(centered)[1][: a.shape[1]]
    assert np.linalg.norm(centered @ a) > 0.99 * np.linalg.norm(best)


@pytest.mark.grid
@pytest.mark.needs_devices(2)
def test_a_mesh_starts_it_alike(two_layers, job, tmp_path, small_batches):
    """One layer at a time is on one device; of divided weights, too."""
    found = []
    for mesh in ("fsdp=1", "fsdp=2"):
        config = RunConfig(
            model=str(two_layers.folder),
            output_dir=str(tmp_path / mesh),
            jobs=[job.replace(learning_rate=0.0, steps=1)],
            mesh=mesh,
            microbatch_tokens=256,
            block_tokens=16,
            dtype="float32",
        )
        result = Trainer(config).train()
        path = result.jobs[0].folder / "adapter_model.safetensors"
        found.append(safetensors.numpy.load_file(path))
    assert found[0].keys() == found[1].keys()
    for key, array in found[0].items():
        np.testing.assert_array_equal(found[1][key], array)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eva_config": {"rho": 0.5}}, "rho must be at least 1"),
        ({"eva_config": {"tau": 1.5}}, "tau at most 1"),
        ({"eva_config": {"whiten": 2.0}}, "whiten=2.0 must be true or false"),
        ({"eva_config": {"label_mask_value": 1.0}}, "it has 'label_mask_value'"),
        ({"eva_config": {"adjust_scaling_factors": False}}, "would follow the rank"),
        ({"eva_config": {"rho": 1.0}, "init_lora_weights": True}, "it needs init_lora"),
        ({"use_rslora": True}, "Set rho to 1 in eva_config"),
        ({"use_dora": True}, "use_dora and init_lora_weights=eva cannot"),
    ],
)
def test_settings_that_are_refused(job, settings, message):
    with pytest.raises(ConfigError, match=message):
        job.replace(**settings)


def test_too_few_tokens_are_refused(model, job, tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    reader = DataReader(load_tokenizer(model.folder), None)
    short = job.replace(data={"path": str(path)})
    prepared = prepare_job(short, model.config, reader)
    with pytest.raises(ConfigError, match="needs 8 tokens to find so many components"):
        eva_start.check_tokens(prepared)
