"""Trains adapters with TRL's trainers on preferences, and records every number.

Run from the repository root, where torch, transformers, peft and trl 1.9.0 are
installed:

    python tests/golden/make_preference_runs.py

All is computed in float64, on the base of peft_run/. preference_runs/runs.json has, for
each run, the settings, the records as token ids (without the end-of-sequence token,
which TRL appends), and loss and metrics of each step. preference_runs/<run>.safetensors
has the weights before (`initial/`) and after 10 steps (`final/`; 5 of runs with random
settings), by their names in PEFT and rounded to float32.
"""

import json
import pathlib
import random
import sys
import tempfile
import zlib

import peft
import tokenizers
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

HERE = pathlib.Path(__file__).parent
OUT, BASE = HERE / "preference_runs", HERE / "peft_run" / "base"
STEPS, BATCH, VOCAB, EOS = 10, 4, 97, 1
LEARNING_RATE, EPSILON = 1e-2, 1e-4
RUNS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.3}),
    "dpo-ipo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.5, "loss_type": "ipo"}),
    "kto": (
        trl.KTOTrainer,
        trl.KTOConfig,
        {"beta": 0.3, "desirable_weight": 1.5, "train_sampling_strategy": "sequential"},
    ),
    "cpo": (CPOTrainer, CPOConfig, {"beta": 0.2, "cpo_alpha": 0.5}),
    "simpo": (
        CPOTrainer,
        CPOConfig,
        {"beta": 2.0, "cpo_alpha": 0.0, "loss_type": "simpo", "simpo_gamma": 0.5},
    ),
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.2}),
    "reward": (
        trl.RewardTrainer,
        trl.RewardConfig,
        {"center_rewards_coefficient": 0.1},
    ),
}

# Random settings of each trainer, in the words of TRL.
CHOICES = {
    "dpo": {
        "beta": [0.05, 0.1, 0.5],
        "loss_type": ["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"],
        "label_smoothing": [0.0, 0.1, 0.3],
    },
    "kto": {
        "beta": [0.05, 0.1, 0.5],
        "loss_type": ["kto", "apo_zero_unpaired"],
        "desirable_weight": [0.5, 1.0, 2.0],
        "undesirable_weight": [0.5, 1.0],
    },
    "cpo": {
        "beta": [0.05, 0.1, 0.5],
        "loss_type": ["sigmoid", "hinge", "ipo"],
        "label_smoothing": [0.0, 0.1, 0.3],
        "cpo_alpha": [0.0, 0.5, 1.0],
    },
    "simpo": {
        "beta": [1.0, 2.0, 3.0],
        "simpo_gamma": [0.0, 0.3, 1.0],
        "cpo_alpha": [0.0, 0.5],
        "label_smoothing": [0.0, 0.1],
    },
    "orpo": {"beta": [0.05, 0.1, 0.5, 1.0]},
    "reward": {"center_rewards_coefficient": [0.01, 0.3]},
}
COUNTS = {"dpo": 8, "kto": 4, "cpo": 4, "simpo": 3, "orpo": 3, "reward": 2}


def add_random_runs() -> None:
    for kind, count in COUNTS.items():
        trainer_class, config_class, settings = RUNS[kind]
        for number in range(count):
            rng = random.Random(f"{kind}{number}")
            drawn = {key: rng.choice(some) for key, some in CHOICES[kind].items()}
            if drawn.get("loss_type") in ("hinge", "ipo") or (
                # TRL 1.x has no smoothing of DPO's sigmoid.
                kind == "dpo" and drawn["loss_type"] != "robust"
            ):
                drawn["label_smoothing"] = 0.0
            own = trainer_class, config_class, settings | drawn
            RUNS[f"{kind}-random{number}"] = own


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token is a number with a space before it."""
    words = ["<pad>", "</s>", "<unk>", *map(str, range(3, VOCAB))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def is_random(name: str) -> bool:
    return "-random" in name


def shape_of(name: str) -> tuple[int, int, int]:
    """Returns the steps of a run, its batch size, and how long its answers are."""
    if not is_random(name):
        return STEPS, BATCH, 13
    rng = random.Random(name)
    return 5, rng.randint(2, 6), rng.randint(4, 24)


def records(name: str) -> list[dict]:
    steps, batch, longest = shape_of(name)
    seed = zlib.crc32(name.encode()) if is_random(name) else len(name)
    generator = torch.Generator().manual_seed(seed)
    kind = name.partition("-")[0]

    def some(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        ids = torch.randint(0, 10, (count,), generator=generator) ** 2 % (VOCAB - 3) + 3
        return ids.tolist()

    def record(i: int) -> dict:
        if kind == "kto":
            label = bool(torch.rand(1, generator=generator) > 0.4)
            return {
                "prompt": some(2, 9),
                "completion": some(1, longest),
                "label": label,
            }
        out = {"prompt": some(2, 9)}
        out |= {key: some(1, longest) for key in ("chosen", "rejected")}
        return out | ({"margin": i % 3 / 2} if kind == "reward" else {})

    return [record(i) for i in range(steps * batch)]


def text(name: str, record: dict) -> dict:
    out = {
        key: "".join(f" {i}" for i in value) if isinstance(value, list) else value
        for key, value in record.items()
    }
    if name.startswith("reward"):  # TRL has whole sequences here
        prompt = out.pop("prompt")
        out |= {key: prompt + out[key] for key in ("chosen", "rejected")}
    return out


def train(name: str) -> dict:
    trainer_class, config_class, settings = RUNS[name]
    is_reward = name.startswith("reward")
    num_steps, batch, _ = shape_of(name)
    torch.manual_seed(3)
    auto = transformers.AutoModelForCausalLM
    more = {}
    if is_reward:
        auto, more = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    base = auto.from_pretrained(
        BASE, dtype=torch.float64, attn_implementation="eager", **more
    )
    base.config.pad_token_id = 0
    lora = peft.LoraConfig(
        task_type="SEQ_CLS" if is_reward else "CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["score"] if is_reward else None,
    )
    found = records(name)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_epsilon=EPSILON,
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            max_length=64,
            seed=0,
            **({"train_sampling_strategy": "sequential"} | settings),
        )
        trainer = trainer_class(
            model=base,
            args=config,
            train_dataset=Dataset.from_list([text(name, one) for one in found]),
            processing_class=tokenizer(),
            peft_config=lora,
        )
        for parameter in trainer.model.parameters():
            # The values that jaxlora starts from, whose weights are float32.
            parameter.data = parameter.data.float().double()
        tensors = weights(trainer.model, "initial")
        steps = recorded(trainer)
        trainer.train()
    tensors |= weights(trainer.model, "final")
    save_file(tensors, OUT / f"{name}.safetensors")
    args = {k: v for k, v in settings.items() if k != "train_sampling_strategy"}
    run = {"settings": args, "records": found, "steps": steps}
    return run | ({"batch_size": batch} if is_random(name) else {})


def weights(model, when: str) -> dict[str, torch.Tensor]:
    found = peft.get_peft_model_state_dict(model)
    assert all(one.dtype == torch.float64 for one in found.values())
    return {f"{when}/{name}": one.float().contiguous() for name, one in found.items()}


def recorded(trainer) -> list[dict]:
    """Returns the list that gets loss and metrics of each step, unrounded."""
    steps, compute = [], trainer.compute_loss
    stored = "_stored_metrics" if hasattr(trainer, "_stored_metrics") else "_metrics"

    def compute_loss(*args, **kwargs):
        out = compute(*args, **kwargs)
        loss = out[0] if isinstance(out, tuple) else out
        metrics = getattr(trainer, stored)["train"]
        last = {key: float(values[-1]) for key, values in metrics.items() if values}
        keep = {k: v for k, v in last.items() if not k.startswith(DROPPED)}
        steps.append({"loss": loss.item(), "metrics": keep})
        return out

    trainer.compute_loss = compute_loss
    return steps


DROPPED = ("logits", "entropy", "num_tokens", "mean_token", "aux", "learning")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    add_random_runs()
    about = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "learning_rate": LEARNING_RATE,
        "adam_eps": EPSILON,
        "batch_size": BATCH,
        "eos": EOS,
    }
    path = OUT / "runs.json"
    done = json.loads(path.read_text())["runs"] if path.exists() else {}
    for name in sys.argv[1:] or RUNS:
        done[name] = train(name)
        first, *_, last = done[name]["steps"]
        print(name, first, last, flush=True)
    path.write_text(json.dumps({"about": about, "runs": done}, separators=(",", ":")))


if __name__ == "__main__":
    main()
