"""A job for sweeps, whose configurations never share a microbatch."""

import json
import pathlib

import numpy as np

from jaxlora import LoraJob


def write_job(folder: pathlib.Path) -> LoraJob:
    """Writes data for eight steps of one whole microbatch each; returns the job."""
    path = folder / "records.jsonl"
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ab "), 15)) for _ in range(32)]  # and an end
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return LoraJob(
        name="c",
        data={"path": str(path)},
        eval_fraction=0.25,
        rank=4,
        target_modules=["q_proj"],
        batch_size=8,
        steps=8,
        lr_schedule="constant",
        dropout=0.1,
        max_length=48,
    )
