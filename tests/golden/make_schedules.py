"""Writes schedules.json: factors of the learning rate by transformers' schedulers.

It needs torch and transformers, and was run with transformers 5.17.0:

    python tests/golden/make_schedules.py
"""

import json
import pathlib
import random

import torch
import transformers

RATE = 3e-4
# The name, and its settings; each with several lengths of warm-up and of training.
CASES = [
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_restarts", {}),
    ("cosine_with_min_lr", {"min_lr": 2e-5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.4}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-5, "warmup_lr_rate": 0.05}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 30}),
    ("warmup_stable_decay", {"num_decay_steps": 7}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 9, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    ),
    (
        "warmup_stable_decay",
        {
            "num_decay_steps": 8,
            "num_stable_steps": 3,
            "warmup_type": "cosine",
            "decay_type": "linear",
            "min_lr_ratio": 0.2,
        },
    ),
    ("warmup_stable_decay", {"num_decay_steps": 6, "warmup_type": "1-sqrt"}),
]


def rates(name: str, settings: dict, warmup: int, total: int) -> list[float]:
    """Learning rates of all steps of training."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(settings),
    )
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def main() -> None:
    """Writes the file."""
    draw = random.Random(0)
    cases = []
    for name, settings in CASES:
        for warmup in (0, draw.randint(1, 6)):
            total = draw.randint(20, 27)
            cases.append(
                {
                    "lr_schedule": name.removesuffix("_with_warmup"),
                    "lr_schedule_args": settings,
                    "warmup_steps": warmup,
                    "steps": total,
                    "rates": rates(name, settings, warmup, total),
                }
            )
    path = pathlib.Path(__file__).with_name("schedules.json")
    text = json.dumps({"learning_rate": RATE, "cases": cases})
    path.write_text(text.replace('{"lr_schedule"', '\n{"lr_schedule"') + "\n")


if __name__ == "__main__":
    main()
