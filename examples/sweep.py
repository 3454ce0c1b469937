"""A sweep: four settings on the same data, two at a time; bad ones stop early.

python examples/tiny_model.py
python examples/sweep.py
"""

import itertools
import logging
import shutil

import jaxlora

logging.basicConfig(format="%(message)s")  # show what jaxlora logs
logging.getLogger("jaxlora").setLevel("INFO")

jobs = [
    jaxlora.LoraJob(
        name=f"rank{rank}-rate{rate}",
        data={"path": "examples/data/orders.jsonl", "chat": True, "limit": 24},
        eval_fraction=0.25,  # the same records for every job
        max_length=400,
        rank=rank,
        lora_alpha=2 * rank,
        dropout=0.05,
        learning_rate=rate,
        batch_size=6,
        epochs=3,
        eval_every=2,
        early_stopping=1,
        early_stopping_delta=0.05,
        keep_best=True,
    )
    for rank, rate in itertools.product((4, 8), (1e-2, 1e-5))
]
shutil.rmtree("runs/sweep", ignore_errors=True)  # of an earlier call
run = jaxlora.RunConfig(
    model="models/tiny",
    output_dir="runs/sweep",
    jobs=jobs,
    max_concurrent_jobs=2,  # a job that ends makes room for the next one
    slot_rank=8,
    microbatch_tokens=1024,
    window_steps=2,
)
result = jaxlora.Trainer(run).train()
jaxlora.print_summary(result)
best = min(result.jobs, key=lambda job: job.progress.best_eval)
print(f"best: {best.name}, held-out loss {best.progress.best_eval:.3f}, {best.folder}")
