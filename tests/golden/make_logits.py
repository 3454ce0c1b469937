"""Makes tiny random models of each family, and transformers' logits for them.

Run from the repository root, where torch and transformers are installed:

    python tests/golden/make_logits.py [NAME ...]

Each folder under models/ then holds config.json, model.safetensors (float32) and
logits.npz, which holds of two sequences of unequal lengths, each computed alone:

    tokens_0, logits_0 (T V), tokens_1, logits_1
    gradient_0 (D)      gradient of the first one's summed loss by the first norm
    bfloat16_error_1    largest error of the second one's logits in bfloat16

transformers reads the same config.json that jaxlora reads; some are in the spelling of
transformers 4, some in that of version 5.
"""

import json
import pathlib
import shutil
import sys

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
    # Wavelengths of 6, 35, 199 and 1117 tokens are kept, blended, stretched, stretched.
    "original_max_position_embeddings": 64,
}
V4 = {"torch_dtype": "float32", "transformers_version": "4.46.0"}
V5 = {"dtype": "float32", "transformers_version": "5.0.0"}

GEMMA = {
    "head_dim": 16,
    # transformers ignores hidden_act for these models.
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-3,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "pad_token_id": 0,
}

# After each config come changes of it. The script checks that each changes the logits.
CASES = {
    "llama2": (
        {
            **V4,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            # It is so large that a wrong value shows.
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
            # Without use_sliding_window these two have no effect.
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
    "gemma2": (
        {
            **V4,
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            **GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "rope_theta": 10000.0,
        },
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
        {"sliding_window": 9},
        {"hidden_activation": "silu"},
    ),
    "gemma3_v4": (
        {
            **V4,
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "rope_theta": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_local_base_freq": 100.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {"sliding_window_pattern": 3},
        {"rope_scaling": None},
        {"rope_local_base_freq": 1000.0},
        {"query_pre_attn_scalar": 16},
    ),
    "gemma3_v5": (
        {
            **V5,
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            **GEMMA,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "_sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 10000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "use_bidirectional_attention": False,
            "final_logit_softcapping": 3.0,
        },
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window": 9},
    ),
}
# The first is longer than every sliding window and than LLAMA3's original maximum.
LENGTHS = (83, 21)


def write_weights(folder: pathlib.Path, seed: int) -> None:
    """Draws all weights at random, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2 and "embed" not in name:
            # The gain is a little above 1, so that attention is not flat.
            noise *= 1.5 * parameter.shape[1] ** -0.5
        elif name.endswith("norm.weight"):
            # Gemma multiplies by 1 + weight.
            noise = 0.3 * noise + (0 if "gemma" in config.model_type else 1)
        elif name.endswith(".bias"):
            noise *= 0.5
        weights[name] = noise
    file = folder / "model.safetensors"
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float32):
    """Loads a folder with transformers."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def logits_of(
    folder: pathlib.Path, tokens: np.ndarray, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Returns transformers' logits of one sequence, T V."""
    logits = load(folder, dtype)(torch.from_numpy(tokens)[None]).logits[0]
    return logits.float().numpy()


def gradient_of(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the gradient of a sequence's loss by the first norm's weight, D."""
    model, ids = load(folder), torch.from_numpy(tokens)
    logits = model(ids[None]).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").backward()
    return model.model.layers[0].input_layernorm.weight.grad.numpy()


def write_config(folder: pathlib.Path, config: dict) -> None:
    """Writes config.json."""
    text = json.dumps({**SHAPE, **config}, indent=2) + "\n"
    (folder / "config.json").write_text(text)


def make(name: str, seed: int) -> None:
    """Makes one folder."""
    config, *changes = CASES[name]
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(folder, config)
    write_weights(folder, seed)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, SHAPE["vocab_size"], n) for n in LENGTHS]
    logits = [logits_of(folder, tokens) for tokens in sequences]
    arrays = {}
    for i, (tokens, values) in enumerate(zip(sequences, logits, strict=True)):
        arrays[f"tokens_{i}"] = tokens.astype(np.int32)
        arrays[f"logits_{i}"] = values.astype(np.float32)
    arrays["gradient_0"] = gradient_of(folder, sequences[0])
    narrow = logits_of(folder, sequences[1], torch.bfloat16)
    arrays["bfloat16_error_1"] = np.abs(narrow - logits[1]).max()
    np.savez(folder / "logits.npz", **arrays)
    for change in changes:
        write_config(folder, {**config, **change})
        changed = [logits_of(folder, tokens) for tokens in sequences]
        pairs = zip(logits, changed, strict=True)
        difference = max(np.abs(a - b).max() for a, b in pairs)
        assert difference > 1e-2, f"{name}: {change} changes logits by {difference}"
        print(f"{name}: {change} changes logits by up to {difference:.3f}")
    write_config(folder, config)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name}: {size} bytes, |logit| up to {np.abs(logits[0]).max():.1f}")


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    chosen = sys.argv[1:] or list(CASES)
    for number, case in enumerate(CASES):
        if case in chosen:
            make(case, seed=number)
