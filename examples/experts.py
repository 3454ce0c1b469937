"""Trains adapters on the experts of a tiny OLMoE, in a minute on a CPU.

    python examples/tiny_model.py
    python examples/experts.py

It writes a random OLMoE into models/tiny_olmoe, whose layers have eight experts, two of
which each token passes. Three jobs then train together: on attention alone, on experts
too with the rank that they have by default, and with the whole rank. For a model that
can write, use a folder or hub id of an OLMoE, a Qwen3-30B-A3B or another one of
docs/support.md.
"""

import json
import logging
import pathlib
import shutil

import numpy as np
import safetensors.numpy

import jaxlora

FOLDER, OUT = pathlib.Path("models/tiny_olmoe"), pathlib.Path("runs/experts")
WIDTH, INNER, LAYERS, EXPERTS, CHOSEN, VOCAB = 64, 48, 1, 8, 2, 288


def write_model() -> None:
    """Writes the model, with the tokenizer of models/tiny."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32)

    weights = {name: matrix(VOCAB, WIDTH) for name in ("model.embed_tokens", "lm_head")}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{layer}.self_attn.{name}"] = matrix(WIDTH, WIDTH)
        weights[f"{layer}.mlp.gate"] = matrix(EXPERTS, WIDTH)
        for j in range(EXPERTS):
            expert = f"{layer}.mlp.experts.{j}"
            weights[f"{expert}.gate_proj"] = matrix(INNER, WIDTH)
            weights[f"{expert}.up_proj"] = matrix(INNER, WIDTH)
            weights[f"{expert}.down_proj"] = matrix(WIDTH, INNER)
        norms = "input_layernorm", "post_attention_layernorm"
        for name in (*norms, "self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{layer}.{name}"] = np.ones(WIDTH, np.float32)
    weights["model.norm"] = np.ones(WIDTH, np.float32)
    config = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": False,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.weight": array for name, array in weights.items()}
    safetensors.numpy.save_file(tensors, FOLDER / "model.safetensors")
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER.parent / "tiny" / name, FOLDER)


def job(name: str, **settings) -> jaxlora.LoraJob:
    """Returns a job on the orders of a bakery."""
    return jaxlora.LoraJob(
        name=name,
        data={"path": "examples/data/orders.jsonl", "chat": True},
        rank=8,
        lora_alpha=16,
        batch_size=4,
        steps=8,
        learning_rate=1e-2,
        max_length=400,
        eval_fraction=0.1,
        **settings,
    )


logging.basicConfig(format="%(message)s")  # show what jaxlora logs
logging.getLogger("jaxlora").setLevel("INFO")

write_model()
shutil.rmtree(OUT, ignore_errors=True)  # of an earlier call
jobs = (
    job("attention", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    job("experts"),  # all linears; experts have rank 8 / 2
    job("whole_rank", expert_rank="full"),
)
run = jaxlora.RunConfig(
    model=str(FOLDER), output_dir=str(OUT), microbatch_tokens=1024, jobs=jobs
)
result = jaxlora.Trainer(run).train()
jaxlora.print_summary(result)

for name in ("experts", "whole_rank"):  # peft and vLLM read these names
    file = OUT / "adapters" / name / "adapter_model.safetensors"
    tensor = "base_model.model.model.layers.0.mlp.experts.7.down_proj.lora_A.weight"
    print(f"{name}: {tensor} {safetensors.numpy.load_file(file)[tensor].shape}")
