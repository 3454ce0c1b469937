"""Makes tiny random models of each family, and transformers' logits for them.

Run from the repository root, where torch and transformers are installed:

    python tests/golden/make_logits.py

Each folder under models/ then holds config.json, model.safetensors (float32) and
logits.npz: tokens_0, logits_0 (T V), tokens_1, logits_1; two sequences of unequal
lengths, each computed alone. transformers reads the same config.json that jaxlora
reads; some are in the spelling of transformers 4, some in that of transformers 5.
"""

import json
import pathlib
import shutil

import numpy as np
import safetensors.torch
import torch
import transformers

MODELS = pathlib.Path(__file__).parent / "models"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Wavelengths of 6, 35, 199 and 1117 tokens: kept, blended, stretched, stretched.
    "original_max_position_embeddings": 64,
}
V4 = {"torch_dtype": "float32", "transformers_version": "4.46.0"}
V5 = {"dtype": "float32", "transformers_version": "5.0.0"}

# Beside each config a change of it that must change the logits: the file tests it.
CASES = {
    "llama2": (
        {
            **V4,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            # So large that a wrong one shows.
            "rms_norm_eps": 1e-2,
            "rope_scaling": None,
            "attention_bias": False,
            "pretraining_tp": 1,
            "tie_word_embeddings": False,
        },
        {"rms_norm_eps": 1e-6},
    ),
    "llama3": (
        {
            **V4,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000.0,
            "rope_scaling": LLAMA3,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}},
    ),
    "llama_bias": (
        {
            **V5,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 10000.0,
            },
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "smollm2": (
        {
            **V5,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "mistral": (
        {
            **V4,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 8,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        {"sliding_window": 9},
    ),
    "qwen2": (
        {
            **V4,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            # Without use_sliding_window these two mean nothing.
            "sliding_window": 4,
            "max_window_layers": 1,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        {"use_sliding_window": True},
    ),
    "qwen2_window": (
        {
            **V4,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 6,
            "max_window_layers": 1,
            "use_sliding_window": True,
            "tie_word_embeddings": True,
        },
        {"max_window_layers": 0},
    ),
    "qwen3": (
        {
            **V5,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention"],
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
}
# The first is longer than every sliding window and than LLAMA3's original maximum.
LENGTHS = (83, 21)


def write_weights(folder: pathlib.Path, seed: int) -> None:
    """Draws every weight: unit-variance linears, and norms and biases off 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2 and "embed" not in name:
            # A little more than unit gain, so that attention is not flat.
            noise *= 1.5 * parameter.shape[1] ** -0.5
        elif name.endswith("norm.weight"):
            noise = 1 + 0.3 * noise
        elif name.endswith(".bias"):
            noise *= 0.5
        weights[name] = noise
    file = folder / "model.safetensors"
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)


@torch.no_grad()
def logits_of(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """transformers' logits of one sequence, T V."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()


def write_config(folder: pathlib.Path, config: dict) -> None:
    """Writes config.json."""
    text = json.dumps({**SHAPE, **config}, indent=2) + "\n"
    (folder / "config.json").write_text(text)


def make(name: str, seed: int) -> None:
    """Makes one folder."""
    config, change = CASES[name]
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(folder, {**config, **change})
    write_weights(folder, seed)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, SHAPE["vocab_size"], n) for n in LENGTHS]
    changed = [logits_of(folder, tokens) for tokens in sequences]
    write_config(folder, config)
    logits = [logits_of(folder, tokens) for tokens in sequences]
    difference = max(np.abs(a - b).max() for a, b in zip(logits, changed, strict=True))
    assert difference > 1e-2, f"{name}: {change} changes logits by {difference} only"
    arrays = {}
    for i, (tokens, values) in enumerate(zip(sequences, logits, strict=True)):
        arrays[f"tokens_{i}"] = tokens.astype(np.int32)
        arrays[f"logits_{i}"] = values.astype(np.float32)
    np.savez(folder / "logits.npz", **arrays)
    size = (folder / "model.safetensors").stat().st_size
    print(
        f"{name}: {size} bytes, |logit| up to {np.abs(logits[0]).max():.1f}, "
        f"changed by {difference:.3f}"
    )


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    for number, case in enumerate(CASES):
        make(case, seed=number)
