"""Saves adapters of many shapes with peft, and the logits they give.

Run from the repository root, where torch, transformers and peft are installed, after
make_peft_run.py, whose base they adapt:

    python tests/golden/make_peft_folders.py

Each peft_folders/<name>/ is a PEFT folder as peft writes it, with random B, and
wanted.npz: tokens, and float32 logits of base and adapter; wanted.json has each
module's rank and scaling as peft computed them.
"""

import json
import pathlib
import shutil

import numpy as np
import peft
import torch
import transformers
from make_peft_run import OUT as RUN
from make_peft_run import VOCAB, save

OUT = pathlib.Path(__file__).parent / "peft_folders"
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 8,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 2, "layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"o_proj": 4, r"layers\.0\.mlp\.up_proj": 5},
    },
    "regex": {
        "r": 3,
        "lora_alpha": 1,
        "target_modules": r".*layers\.0\..*(q|k)_proj",
    },
    "excluded": {
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.1,
        "target_modules": ["up_proj", "down_proj"],
        "exclude_modules": ["layers.0.mlp.up_proj"],
    },
    "bfloat16": {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "o_proj"]},
}


def make(name: str, settings: dict) -> None:
    torch.manual_seed(len(name))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        RUN / "base", dtype=torch.float32, attn_implementation="eager"
    )
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.3)
        if "lora_" in key and name == "bfloat16":
            weight.data = weight.data.bfloat16()
    save(model, OUT / name)
    layers = {
        key.removeprefix("base_model.model."): layer
        for key, layer in model.named_modules()
        if isinstance(layer, peft.tuners.lora.Linear)
    }
    wanted = {k: [m.r["default"], m.scaling["default"]] for k, m in layers.items()}
    (OUT / name / "wanted.json").write_text(json.dumps(wanted, indent=1) + "\n")
    model.float().eval()
    tokens = torch.randint(0, VOCAB, (25,))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0]
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy()}
    np.savez(OUT / name / "wanted.npz", **arrays)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    for name, settings in ADAPTERS.items():
        make(name, settings)
    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
