"""A tiny random Llama with a byte-level tokenizer, as a Hugging Face folder."""

import json
import pathlib

import numpy as np
import safetensors.numpy

from jaxlora.bench.byte_data import CHATML, SPECIAL, write_records, write_tokenizer

__all__ = [
    "CHATML",
    "CONFIG",
    "SPECIAL",
    "random_weights",
    "write_model",
    "write_records",
    "write_tokenizer",
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def random_weights(seed: int = 0, config: dict = CONFIG) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name; norms and all else random."""
    rng = np.random.default_rng(seed)
    d, f, v = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = d // 2

    def matrix(*shape):
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(v, d) * 4}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, d),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }.items():
            out[f"{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{name}.weight"] = 1 + 0.2 * matrix(d)
    out["model.norm.weight"] = 1 + 0.2 * matrix(d)
    return out


def write_model(
    folder: pathlib.Path, seed: int = 0, config: dict = CONFIG
) -> pathlib.Path:
    """Writes the whole folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(
        random_weights(seed, config), folder / "model.safetensors", {"format": "pt"}
    )
    write_tokenizer(folder)
    return folder
