"""Saves variants of LoRA of many shapes with peft, and the logits they give.

Run from the repository root, where torch, transformers and peft are installed, after
make_peft_run.py, whose base they adapt:

    python tests/golden/make_variant_folders.py

Each variant_folders/<name>/ is a PEFT folder as peft writes it, with random ranks,
targets and trained tensors. wanted.npz has tokens, the float32 logits of base and
adapter, by name, and for some folders the logits of the merged model.
"""

import pathlib
import random
import shutil

import numpy as np
import peft
import torch
import transformers
from make_peft_run import OUT as RUN
from make_peft_run import VOCAB, save

OUT = pathlib.Path(__file__).parent / "variant_folders"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_DORA = 24


def random_settings(draw: random.Random) -> dict:
    """Settings in which adapters of one kind differ."""
    targets = draw.sample(LINEARS, draw.randint(1, 3))
    settings = {
        "r": draw.randint(1, 4),
        "lora_alpha": draw.choice([1, 3, 8, 16]),
        "use_rslora": draw.random() < 0.3,
        "lora_dropout": draw.choice([0.0, 0.1]),
        "target_modules": targets,
    }
    if draw.random() < 0.4:
        settings["layers_to_transform"] = [draw.randint(0, 1)]
    if draw.random() < 0.3:
        settings["rank_pattern"] = {targets[0]: draw.randint(1, 3)}
        settings["alpha_pattern"] = {targets[-1]: draw.choice([2, 5])}
    return settings


def base():
    return transformers.AutoModelForCausalLM.from_pretrained(
        RUN / "base", dtype=torch.float32, attn_implementation="eager"
    )


def logits_of(model, tokens) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0].numpy()


def make_dora(name: str, seed: int, wanted: dict) -> None:
    torch.manual_seed(seed)
    settings = random_settings(random.Random(seed))
    config = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=True, **settings)
    model = peft.get_peft_model(base(), config)
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.2)
        if "magnitude" in key:
            weight.data *= torch.empty_like(weight).uniform_(0.6, 1.4)
    save(model, OUT / name)
    model.eval()
    tokens = torch.randint(0, VOCAB, (8,))
    wanted[f"{name}.tokens"] = tokens.numpy().astype(np.int32)
    wanted[f"{name}.logits"] = logits_of(model, tokens)
    wanted[f"{name}.merged"] = logits_of(model.merge_and_unload(), tokens)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    wanted: dict[str, np.ndarray] = {}
    for number in range(NUM_DORA):
        make_dora(f"dora{number:02}", number, wanted)
    np.savez_compressed(OUT / "wanted.npz", **wanted)
    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
