"""A tiny random Llama with a byte-level tokenizer, as a Hugging Face folder."""

import json
import pathlib
import runpy
from collections.abc import Iterable

import numpy as np
import safetensors.numpy

# Its tokenizer is that of the examples. Other packages are named `examples` too, so the
# file is named by its path.
_EXAMPLE = runpy.run_path(
    str(pathlib.Path(__file__).parents[1] / "examples" / "tiny_model.py")
)
CHATML, SPECIAL = _EXAMPLE["CHATML"], _EXAMPLE["SPECIAL"]
write_tokenizer = _EXAMPLE["write_tokenizer"]
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


def write_layers(folder: pathlib.Path, num_layers: int) -> pathlib.Path:
    """Writes a folder with another number of layers; returns it."""
    return write_model(folder, config=CONFIG | {"num_hidden_layers": num_layers})


def write_records(path: pathlib.Path, count: int, seed: int, longest: int = 60) -> str:
    """Writes JSONL of ragged prompts whose completions repeat them in part.

    Args:
        path: File to write.
        count: Number of records.
        seed: Makes the prompts.
        longest: Prompts are shorter than this, in characters.

    Returns:
        The path as text.
    """
    rng = np.random.default_rng(seed)
    letters, records = np.array(list("abcdefgh ")), []
    for _ in range(count):
        prompt = "".join(rng.choice(letters, rng.integers(3, longest)))
        completion = prompt[: rng.integers(2, len(prompt) + 1)].upper()
        records.append({"prompt": prompt, "completion": completion})
    return write_jsonl(path, records)


def write_jsonl(path: pathlib.Path, records: Iterable[object]) -> str:
    """Writes a record a line; returns the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
