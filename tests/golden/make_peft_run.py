"""Trains adapters with transformers and peft, and records every number.

Run from the repository root, where torch, transformers and peft are installed:

    python tests/golden/make_peft_run.py

peft_run/base/ is a tiny random Llama, whose head is tied to the embedding for jobs in
TIED. peft_run/<job>/ holds initial/ and final/ (PEFT
folders as peft writes them) and run.json: settings, each step's batch (token_ids,
is_target), its loss before the step, gradient norm before clipping, and rate. The loss
of a step is the sum over its target tokens divided by their number in the global batch
of 6 samples, which is accumulated over 3 microbatches of 2; each sample runs alone.
"""

import json
import pathlib
import shutil

import peft
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer

OUT = pathlib.Path(__file__).parent / "peft_run"
STEPS, BATCH, VOCAB = 12, 6, 97
JOBS = {
    "a": {
        "rank": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "lr_schedule": "linear",
        "warmup_steps": 2,
        "seed": 1,
    },
    "b": {
        "rank": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"o_proj": 4},
        "learning_rate": 5e-3,
        "max_grad_norm": None,
        "lr_schedule": "cosine",
        "warmup_steps": 0,
        "lora_plus_ratio": 4.0,
        "seed": 2,
    },
    "c": {
        "rank": 3,
        "lora_alpha": 9,
        "use_dora": True,
        "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"],
        "learning_rate": 1e-2,
        "weight_decay": 0.05,
        "max_grad_norm": 0.5,
        "lr_schedule": "cosine",
        "warmup_steps": 1,
        "lora_plus_ratio": 2.0,
        "seed": 3,
    },
    "d": {
        "rank": 2,
        "lora_alpha": 4,
        "use_rslora": True,
        "init_lora_weights": "pissa",
        "target_modules": ["q_proj", "down_proj"],
        "learning_rate": 2e-3,
        "lr_schedule": "linear",
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "seed": 4,
    },
    "e": {
        "rank": 3,
        "lora_alpha": 6,
        "init_lora_weights": "olora",
        "target_modules": ["v_proj", "up_proj"],
        "learning_rate": 2e-3,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 5,
    },
    "f": {
        "rank": 6,
        "use_vera": True,
        "projection_prng_key": 7,
        "d_initial": 0.5,
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "learning_rate": 5e-2,
        "weight_decay": 0.1,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 6,
    },
    "g": {
        "rank": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": [9, 1, 50, 4],
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 7,
    },
    "h": {
        "rank": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": {"embed_tokens": [9, 1, 50], "lm_head": [4, 1]},
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 8,
    },
    "i": {
        "rank": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 11,
    },
    "j": {
        "rank": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj", "up_proj"],
        "modules_to_save": ["embed_tokens"],
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 10,
    },
    "k": {
        "rank": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": [97, 98],
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "seed": 12,
    },
}
TIED = {"g", "j", "k"}
# Jobs whose base was resized for tokens that take the place of others in the samples.
NEW_TOKENS = {"k": {9: 97, 16: 98}}


def save_base() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(OUT / "base")


def samples(job: dict, new: dict[int, int]) -> list[list[dict]]:
    """Returns the global batch of each step: ragged samples with masked prompts."""
    generator = torch.Generator().manual_seed(job["seed"])

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def sample() -> dict:
        length = number(5, 41)
        # A skewed distribution, so that there is something to learn.
        ids = torch.randint(0, 12, (length,), generator=generator) ** 2 % VOCAB
        prompt = number(1, length)
        is_target = [0] * prompt + [1] * (length - prompt)
        ids = [new.get(token, token) for token in ids.tolist()]
        return {"token_ids": ids, "is_target": is_target}

    return [[sample() for _ in range(BATCH)] for _ in range(STEPS)]


def nll_sum(model, sample: dict) -> torch.Tensor:
    ids = torch.tensor([sample["token_ids"]])
    target = torch.tensor(sample["is_target"][1:], dtype=torch.bool)
    logits = model(input_ids=ids).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return nll[target].sum()


def tie(base) -> None:
    """Makes the embedding the head, too."""
    base.lm_head.weight = base.model.embed_tokens.weight
    base.config.tie_word_embeddings = True


def resize(base, num_new: int) -> None:
    """Adds tokens, whose rows are the mean of the others."""
    base.resize_token_embeddings(VOCAB + num_new, mean_resizing=False)
    with torch.no_grad():
        table = base.model.embed_tokens.weight
        table[VOCAB:] = table[:VOCAB].mean(dim=0)


def adapted(job: dict, *, is_tied: bool, num_new: int):
    base = transformers.AutoModelForCausalLM.from_pretrained(
        OUT / "base", dtype=torch.float32, attn_implementation="eager"
    )
    if is_tied:
        tie(base)
    if num_new:
        resize(base, num_new)
    torch.manual_seed(job["seed"])
    if job.get("use_vera"):
        config = peft.VeraConfig(
            task_type="CAUSAL_LM",
            r=job["rank"],
            target_modules=job["target_modules"],
            projection_prng_key=job["projection_prng_key"],
            d_initial=job["d_initial"],
        )
        return peft.get_peft_model(base, config)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=job["rank"],
        lora_alpha=job["lora_alpha"],
        lora_dropout=0.0,
        use_rslora=job.get("use_rslora", False),
        use_dora=job.get("use_dora", False),
        init_lora_weights=job.get("init_lora_weights", True),
        target_modules=job["target_modules"],
        rank_pattern=job.get("rank_pattern", {}),
        alpha_pattern=job.get("alpha_pattern", {}),
        trainable_token_indices=job.get("trainable_token_indices"),
        modules_to_save=job.get("modules_to_save"),
    )
    return peft.get_peft_model(base, config)


def save(model, folder: pathlib.Path, **options) -> None:
    """Saves as peft does, without fields that differ between machines."""
    model.save_pretrained(folder, save_embedding_layers=False, **options)
    (folder / "README.md").unlink()
    leave_out_machine(folder)


def leave_out_machine(folder: pathlib.Path) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = "base"
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def optimizer_of(model, job: dict):
    """PEFT's optimizer of LoRA+, whose ratio is 1 in jobs without LoRA+."""
    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=job["learning_rate"],
        loraplus_lr_ratio=job.get("lora_plus_ratio", 1.0),
        loraplus_weight_decay=job.get("weight_decay", 0.0),
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    make = {
        "linear": transformers.get_linear_schedule_with_warmup,
        "cosine": transformers.get_cosine_schedule_with_warmup,
    }[job["lr_schedule"]]
    return optimizer, make(optimizer, job["warmup_steps"], STEPS), parameters


def train(name: str, job: dict) -> None:
    new = NEW_TOKENS.get(name, {})
    model = adapted(job, is_tied=name in TIED, num_new=len(new))
    options = {}
    assert sum(len(g["params"]) for g in optimizer_of(model, job)[0].param_groups) == (
        sum(p.requires_grad for p in model.parameters())
    )
    if "init_lora_weights" in job:
        # peft reads these weights again to convert what was trained.
        model.peft_config["default"].init_lora_weights = True
        initial = str(OUT / name / "initial")
        options["path_initial_model_for_weight_conversion"] = initial
    save(model, OUT / name / "initial")
    optimizer, schedule, parameters = optimizer_of(model, job)
    record = {"settings": job, "batches": samples(job, new)}
    losses, norms, rates = [], [], []
    for batch in record["batches"]:
        num_targets = sum(sum(s["is_target"]) for s in batch)
        total = 0.0
        for start in range(0, BATCH, 2):
            loss = sum(nll_sum(model, s) for s in batch[start : start + 2])
            (loss / num_targets).backward()
            total += float(loss.detach())
        losses.append(total / num_targets)
        limit = job["max_grad_norm"] or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if options:
        model.peft_config["default"].init_lora_weights = job["init_lora_weights"]
    save(model, OUT / name / "final", **options)
    leave_out_machine(OUT / name / "initial")  # peft writes it again to convert
    record |= {"losses": losses, "grad_norms": norms, "learning_rates": rates}
    record["versions"] = {
        m.__name__: m.__version__ for m in (torch, transformers, peft)
    }
    (OUT / name / "run.json").write_text(json.dumps(record) + "\n")
    print(name, [round(loss, 4) for loss in losses], [round(n, 3) for n in norms])


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    torch.use_deterministic_algorithms(True)
    save_base()
    for name, job in JOBS.items():
        train(name, job)
    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
