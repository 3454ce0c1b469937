"""Saves adapters of experts with peft, and checks folders that this library writes.

Run from the repository root, where torch, transformers and peft are installed, after
make_logits.py, whose models they adapt:

    python tests/golden/make_expert_folders.py [FOLDER ...]

Each expert_folders/<name>/ is a PEFT folder as peft writes it, with random A and B, and
wanted.npz: tokens, and float32 logits. A FOLDER, such as one that a test has written,
is not made: it is loaded with peft, and compared with the wanted.npz in it.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import peft
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "expert_folders"
MODELS = pathlib.Path(__file__).parent / "models"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
ADAPTERS = {
    "both": {"r": 3, "lora_alpha": 5, "target_parameters": [GATE_UP, DOWN]},
    "attention_too": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": [f"model.layers.1.{GATE_UP}", f"model.layers.1.{DOWN}"],
        "rank_pattern": {"experts.down_proj": 1},
        "alpha_pattern": {"experts.gate_up_proj": 7},
    },
    "down": {
        "r": 2,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": [DOWN],
    },
    "per_expert": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "gpt_oss": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["k_proj", "o_proj"],
        "target_parameters": [GATE_UP, DOWN],
        "rank_pattern": {"experts.down_proj": 2},
    },
}
BASES = {"gpt_oss": "gpt_oss"}  # those of the others are qwen3_moe


def base_of(name: str):
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / name,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )


@torch.no_grad()
def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()


def make(name: str, settings: dict) -> None:
    torch.manual_seed(len(name))
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    base = BASES.get(name, "qwen3_moe")
    model = peft.get_peft_model(base_of(base), config)
    for key, weight in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(weight, std=0.3)
    model.peft_config["default"].base_model_name_or_path = base
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    for path in folder.iterdir():
        path.chmod(0o644)
    tokens = np.random.default_rng(0).integers(0, 64, 40)
    np.savez(
        folder / "wanted.npz", tokens=tokens, logits=logits_of(model.eval(), tokens)
    )


def check(folder: pathlib.Path) -> None:
    base = json.loads((folder / "adapter_config.json").read_text())
    name = pathlib.Path(base["base_model_name_or_path"]).name
    model = peft.PeftModel.from_pretrained(base_of(name), folder).eval()
    golden = np.load(folder / "wanted.npz")
    error = np.abs(logits_of(model, golden["tokens"]) - golden["logits"]).max()
    print(f"{folder}: logits differ by {error:.2g} of {np.abs(golden['logits']).max()}")
    assert error < 1e-4


if __name__ == "__main__":
    for given in sys.argv[1:]:
        check(pathlib.Path(given))
    if not sys.argv[1:]:
        for case, settings in ADAPTERS.items():
            make(case, settings)
