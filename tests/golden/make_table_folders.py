"""Saves adapters whose folders hold the embedding or the head, and the logits.

Run from the repository root, where torch, transformers and peft are installed, after
make_peft_run.py, whose base they adapt:

    python tests/golden/make_table_folders.py

peft saves both if the vocabulary was resized, and also below LoRA on them. Each
table_folders/<name>/ is a PEFT folder as peft writes it; wanted.npz has tokens, and
the float32 logits of base and adapter, by name. Where the name begins with `tied`, the
head of the base is tied to its embedding; where it ends with `resized`, the base has
MORE tokens than peft_run/base, whose rows are in the folder.
"""

import pathlib
import shutil

import numpy as np
import peft
import torch
import transformers
from make_peft_run import OUT as RUN
from make_peft_run import VOCAB, leave_out_machine, tie

OUT = pathlib.Path(__file__).parent / "table_folders"
MORE = 5
Q, EMBED, HEAD = "q_proj", "embed_tokens", "lm_head"
# By name: LoraConfig's settings, and whether peft may save frozen weights.
ADAPTERS = {
    "resized": ({"target_modules": [Q]}, "auto"),
    "tied_resized": ({"target_modules": [Q]}, "auto"),
    "head": ({"target_modules": [Q, HEAD], "use_rslora": True}, "auto"),
    "embedding": ({"target_modules": [Q, EMBED]}, "auto"),
    "embedding_alone": ({"target_modules": [EMBED]}, "auto"),
    "bare": ({"target_modules": [Q, EMBED, HEAD]}, False),
    "forced": ({"target_modules": [Q]}, True),
    "patterns_resized": (
        {
            "target_modules": [Q, EMBED, HEAD],
            "rank_pattern": {HEAD: 3},
            "alpha_pattern": {EMBED: 5},
        },
        "auto",
    ),
    "dora": ({"target_modules": [Q, EMBED, HEAD], "use_dora": True}, "auto"),
    "tied_both": ({"target_modules": [Q, EMBED, HEAD]}, "auto"),
    "tied_embedding": ({"target_modules": [Q, EMBED]}, "auto"),
    "tied_embedding_resized": ({"target_modules": [Q, EMBED]}, "auto"),
    "tied_head": ({"target_modules": [Q, HEAD]}, "auto"),
    "rows_resized": (
        {"target_modules": [Q], "trainable_token_indices": [VOCAB, 3]},
        "auto",
    ),
    "tied_rows_resized": (
        {"target_modules": [Q], "trainable_token_indices": [VOCAB, 3]},
        "auto",
    ),
    "both_rows_resized": (
        {
            "target_modules": [Q],
            "trainable_token_indices": {EMBED: [VOCAB, 3], HEAD: [VOCAB + 1]},
        },
        "auto",
    ),
    "copies_resized": ({"target_modules": [Q], "modules_to_save": [EMBED]}, "auto"),
    "copy_and_head": (
        {"target_modules": [Q, HEAD], "modules_to_save": [EMBED]},
        "auto",
    ),
    "rows_and_head": (
        {"target_modules": [Q, HEAD], "trainable_token_indices": [3]},
        "auto",
    ),
    "tied_together": (
        {"target_modules": [Q, HEAD], "ensure_weight_tying": True},
        "auto",
    ),
    "tied_copies_together": (
        {
            "target_modules": [Q],
            "modules_to_save": [EMBED],
            "ensure_weight_tying": True,
        },
        "auto",
    ),
    "tied_rows_and_head": (
        {"target_modules": [Q, HEAD], "trainable_token_indices": [3]},
        "auto",
    ),
}
TRAINED = "lora_B", "lora_embedding", "tokens_delta", "modules_to_save"


def make(name: str, settings: dict, saves, wanted: dict) -> None:
    torch.manual_seed(len(wanted))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        RUN / "base", dtype=torch.float32, attn_implementation="eager"
    )
    if name.startswith("tied"):
        tie(base)
    if name.endswith("resized"):
        base.resize_token_embeddings(VOCAB + MORE, mean_resizing=False)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=3, **settings)
    model = peft.get_peft_model(base, config)
    for key, weight in model.named_parameters():
        if weight.requires_grad and any(part in key for part in TRAINED):
            torch.nn.init.normal_(weight, std=0.2)
        if "magnitude" in key:
            weight.data *= torch.empty_like(weight).uniform_(0.6, 1.4)
    model.eval()
    # peft sees by the base's config whether the vocabulary was resized.
    model.save_pretrained(OUT / name, save_embedding_layers=saves)
    (OUT / name / "README.md").unlink()
    leave_out_machine(OUT / name)
    tokens = torch.randint(0, base.config.vocab_size, (8,))
    tokens[1], tokens[5] = 3, base.config.vocab_size - 1
    wanted[f"{name}.tokens"] = tokens.numpy().astype(np.int32)
    with torch.no_grad():
        wanted[f"{name}.logits"] = model(input_ids=tokens[None]).logits[0].numpy()


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    wanted: dict[str, np.ndarray] = {}
    for name, (settings, saves) in ADAPTERS.items():
        make(name, settings, saves, wanted)
    np.savez_compressed(OUT / "wanted.npz", **wanted)
    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
