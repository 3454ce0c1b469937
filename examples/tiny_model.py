"""Writes a tiny random Llama into models/tiny, so that the examples need no download.

    python examples/tiny_model.py

It has one layer of width 64 and a token for each byte. Its text is nonsense, before
and after training: it shows how things run, in seconds. For a model that can write,
replace `models/tiny` by a folder of a Hugging Face checkpoint, or by a hub id.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

FOLDER = pathlib.Path("models/tiny")
WIDTH, INNER, LAYERS, HEADS, VOCAB = 64, 128, 1, 4, 288
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: pathlib.Path) -> None:
    """Writes a tokenizer with three special tokens and a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = matrix(WIDTH, WIDTH)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}.mlp.{name}.weight"] = matrix(INNER, WIDTH)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(WIDTH, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = np.ones(WIDTH, np.float32)
    weights["model.norm.weight"] = np.ones(WIDTH, np.float32)

    FOLDER.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights, FOLDER / "model.safetensors")
    write_tokenizer(FOLDER)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2))
    print(f"wrote {FOLDER}")


if __name__ == "__main__":
    main()
