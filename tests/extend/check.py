"""Trains with every change of this folder's patches, in a copy that has them.

`tests/test_extend.py` runs it. Each job has one of the changes, and they train beside a
job without any.
"""

import json
import pathlib
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.pallas_kernels import OPTIONS
from jaxlora.run.log import read_events
from tests import tiny

OUTPUT_SCALE = "lora_output_scale"
GAINED = {"gain": 2.0, "lora_alpha": 8.0}  # which is an alpha of 16


def main() -> None:
    """Checks all changes; an assertion fails if one does not work."""
    folder = pathlib.Path(tempfile.mkdtemp())
    check_quantized()
    plain, *others = make_jobs(folder)
    model = write_seed_oss(folder / "model")
    losses = train(model, folder / "together", [plain, *others])
    assert all(len(found) == 3 for found in losses.values()), losses
    # The others end after one step, and are there for the programs.
    short = [job.replace(steps=1) for job in others]
    alone = train(model, folder / "alone", [plain, *short])
    np.testing.assert_allclose(losses["plain"], alone["plain"], rtol=1e-5)
    check_exported_scale(folder / "together" / "adapters" / "scale")
    # In a slot beside others, and in programs that only it needs.
    (gained,) = (job for job in others if job.name == "gained")
    scaled = gained.replace(gain=1.0, lora_alpha=2 * gained.lora_alpha)
    found = train(model, folder / "gained", [scaled])
    np.testing.assert_allclose(losses["gained"], found["gained"], rtol=1e-5)
    int4 = {"quantize_base": "int4", "quantize_base_args": {"group": 16}}
    quantized = train(model, folder / "int4", [plain], **int4)
    gap = np.array(quantized["plain"]) - alone["plain"]
    assert 0 < np.abs(gap).max() < 0.5, gap
    print("all changes work")


def make_jobs(folder: pathlib.Path) -> list[LoraJob]:
    """A job without a change, and one with each change of a job."""
    changes = {
        "plain": {},
        "scale": {"use_output_scale": True},
        "adagrad": {"optimizer": "adagrad", "optimizer_args": {"eps": 1e-6}},
        "means": {"objective": "sample_mean"},
        "gained": GAINED,
    }
    return [
        LoraJob(
            name=name,
            data={"path": tiny.write_records(folder / f"{name}.jsonl", 12, seed)},
            rank=2,
            steps=3,
            batch_size=3,
            learning_rate=1e-2,
            max_length=96,
            target_modules=["q_proj", "o_proj"],
            **settings,
        )
        for seed, (name, settings) in enumerate(changes.items())
    ]


def write_seed_oss(folder: pathlib.Path) -> pathlib.Path:
    """A model of the new family: a bias of the output projection, and no others."""
    family = {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"]}
    biases = {"head_dim": 8, "attention_bias": False, "attention_out_bias": True}
    config = (
        tiny.CONFIG
        | family
        | biases
        | {"num_hidden_layers": 1, "intermediate_size": 64}
    )
    tiny.write_model(folder, config=config)
    path = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    bias = np.full(tiny.CONFIG["hidden_size"], 0.1, np.float32)
    weights["model.layers.0.self_attn.o_proj.bias"] = bias
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    return folder


def train(model: pathlib.Path, out: pathlib.Path, jobs, **settings) -> dict[str, list]:
    """Returns the losses of each job."""
    config = RunConfig(
        model=str(model),
        output_dir=str(out),
        jobs=jobs,
        microbatch_tokens=512,
        block_tokens=16,
        checkpoint_every=2,
        implementation="xla",
        report_to="none",
        token_cache=False,
        **settings,
    )
    trainer = Trainer(config)
    if group := config.quantize_base_args.get("group"):
        scale = trainer.model.params["layers.0.self_attn.q_proj.kernel.scale"]
        assert scale.shape[1] == tiny.CONFIG["hidden_size"] // group
    trainer.train()
    steps = [e for e in read_events(out / "metrics.jsonl") if e["event"] == "step"]
    return {j.name: [e["loss"] for e in steps if e["job"] == j.name] for j in jobs}


def check_exported_scale(folder: pathlib.Path) -> None:
    """The factors are exported, and have moved from the 1 that they start from."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["use_output_scale"] and not config["use_dora"]
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    scale = tensors[f"base_model.model.{name}.{OUTPUT_SCALE}"]
    moved = np.abs(scale - 1).max()
    assert 1e-3 < moved < 0.1, moved


def check_quantized() -> None:
    """Each value of int4 is within half a step of its group's scale."""
    w = jnp.array(np.random.default_rng(1).normal(size=(5, 64)), jnp.float32)
    for group in (16, 32):
        options = OPTIONS["int4"]().with_settings({"group": group})
        found = options.quantize(w)
        assert found.arrays["scale"].shape == (5, 64 // group)
        error = jnp.abs(found.dequantize(jnp.float32) - w).reshape(5, -1, group)
        largest = jnp.abs(w.reshape(5, -1, group)).max(axis=2, keepdims=True)
        assert (error <= largest / 7 / 2 * 1.001).all()


if __name__ == "__main__":
    sys.exit(main())
