"""Trains adapters on a teacher's log-probabilities, and records every number.

Run from the repository root, where torch, transformers and peft are installed:

    python tests/golden/make_distill_runs.py

All is computed in float64, on the base of peft_run/. Gradients are those of a loss in
PyTorch; the losses that are recorded are computed from the logits again, token by token
with NumPy, and compared. distill_runs/runs.json has, for each run, the settings, the
records and the loss of each step. distill_runs/<run>.safetensors has the weights before
(`initial/`) and after 8 steps (`final/`), by their names in PEFT, rounded to float32.
"""

import json
import pathlib

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
OUT, BASE = HERE / "distill_runs", HERE / "peft_run" / "base"
STEPS, BATCH, VOCAB = 8, 3, 97
LEARNING_RATE, EPSILON = 1e-2, 1e-4
RUNS = {
    "plain": {},
    "warm": {"temperature": 2.0},
    "mixed": {"kd_alpha": 0.7, "kd_ce_alpha": 0.5},
    "cool": {"temperature": 0.5, "kd_alpha": 0.25},
}


def records(name: str) -> list[dict]:
    rng = np.random.default_rng(len(name))

    def record() -> dict:
        prompt, length = int(rng.integers(1, 6)), int(rng.integers(6, 20))
        ids = rng.integers(3, VOCAB, length).tolist()
        tops, logprobs = [], []
        for t in range(length):
            k = 0 if t < prompt else int(rng.integers(1, 7))
            logits = rng.normal(size=VOCAB) * 2
            logits[ids[t]] += 3  # which is often, but not always, among the k
            logp = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logp)[:k]
            tops.append(best.tolist())
            logprobs.append(logp[best].astype(np.float32).tolist())
        return {"input_ids": ids, "target_token_ids": tops, "target_logprobs": logprobs}

    return [record() for _ in range(STEPS * BATCH)]


def teacher(top: list[float], temperature: float) -> np.ndarray:
    scaled = np.exp(np.array(top, np.float64) / temperature)
    return scaled / scaled.sum()


def targets(record: dict) -> list[int]:
    return [t for t, top in enumerate(record["target_token_ids"]) if t and top]


def numpy_loss(logits: np.ndarray, record: dict, t: int, args: dict) -> float:
    temperature = args.get("temperature", 1.0)
    row = logits[t - 1].astype(np.float64)
    log_q = row / temperature - np.log(np.exp(row / temperature).sum())
    p = teacher(record["target_logprobs"][t], temperature)
    ids = record["target_token_ids"][t]
    kl = sum(a * (np.log(a) - log_q[i]) for a, i in zip(p, ids, strict=True))
    label = record["input_ids"][t]
    ce = -(row[label] - np.log(np.exp(row).sum()))
    return args.get("kd_alpha", 1.0) * kl + args.get("kd_ce_alpha", 0.0) * ce


def torch_loss(logits: torch.Tensor, record: dict, t: int, args: dict) -> torch.Tensor:
    temperature = args.get("temperature", 1.0)
    p = torch.tensor(teacher(record["target_logprobs"][t], temperature))
    log_q = torch.log_softmax(logits[t - 1] / temperature, -1)
    log_q = log_q[record["target_token_ids"][t]]
    kl = torch.nn.functional.kl_div(log_q, p, reduction="sum")
    label = torch.tensor(record["input_ids"][t])
    ce = torch.nn.functional.cross_entropy(logits[t - 1], label)
    return args.get("kd_alpha", 1.0) * kl + args.get("kd_ce_alpha", 0.0) * ce


def weights(model, when: str) -> dict[str, torch.Tensor]:
    found = peft.get_peft_model_state_dict(model)
    return {f"{when}/{name}": x.float().contiguous() for name, x in found.items()}


def train(name: str) -> dict:
    args, found = RUNS[name], records(name)
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        BASE, dtype=torch.float64, attn_implementation="eager"
    )
    modules = ["q_proj", "v_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules)
    model = peft.get_peft_model(base, lora)
    for parameter in model.parameters():
        parameter.data = parameter.data.float().double()
    tensors, steps = weights(model, "initial"), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0
    )
    for step in range(STEPS):
        batch = found[step * BATCH : (step + 1) * BATCH]
        num = sum(len(targets(record)) for record in batch)
        total, check = torch.zeros(()), 0.0
        for record in batch:
            logits = model(torch.tensor([record["input_ids"]])).logits[0]
            for t in targets(record):
                total = total + torch_loss(logits, record, t, args) / num
                check += numpy_loss(logits.detach().numpy(), record, t, args) / num
        assert abs(check - total.item()) < 1e-12 * max(1, abs(check))
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        steps.append({"loss": check})
    tensors |= weights(model, "final")
    save_file(tensors, OUT / f"{name}.safetensors")
    return {"settings": args, "records": found, "steps": steps}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    about = {
        "torch": torch.__version__,
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "learning_rate": LEARNING_RATE,
        "adam_eps": EPSILON,
        "batch_size": BATCH,
    }
    done = {name: train(name) for name in RUNS}
    for name, run in done.items():
        print(name, run["steps"][0], run["steps"][-1])
    path = OUT / "runs.json"
    path.write_text(json.dumps({"about": about, "runs": done}, separators=(",", ":")))


if __name__ == "__main__":
    main()
