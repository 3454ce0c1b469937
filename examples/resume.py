"""A run that breaks off in the middle, continues, and ends in the same bits.

python examples/tiny_model.py
python examples/resume.py
"""

import logging
import pathlib
import shutil

import jaxlora

logging.basicConfig(format="%(message)s")  # show what jaxlora logs
logging.getLogger("jaxlora").setLevel("INFO")


def make_run(output_dir: str) -> jaxlora.RunConfig:
    jobs = [
        jaxlora.LoraJob(
            name=name,
            data={"path": f"examples/data/{name}.jsonl", "chat": name == "orders"},
            max_length=400,
            rank=8,
            dropout=0.05,
            learning_rate=1e-2,
            batch_size=4,
            steps=4,
        )
        for name in ("orders", "bakery")
    ]
    return jaxlora.RunConfig(
        model="models/tiny",
        output_dir=output_dir,
        jobs=jobs,
        microbatch_tokens=1024,
        window_steps=2,
        checkpoint_every=2,
    )


class BreakOff(jaxlora.Callback):
    """Ends the run after its first window, as an error in your own code would."""

    def on_window(self, event):
        raise RuntimeError("an error in the middle of a run")


for folder in ("runs/whole", "runs/broken"):
    shutil.rmtree(folder, ignore_errors=True)
jaxlora.Trainer(make_run("runs/whole")).train()
try:
    jaxlora.Trainer(make_run("runs/broken")).train(callbacks=[BreakOff()])
except RuntimeError as error:
    print(f"the run broke off: {error}")
result = jaxlora.Trainer(make_run("runs/broken")).train(resume=True)
jaxlora.print_summary(result)

for job in result.jobs:
    name = f"adapters/{job.name}/adapter_model.safetensors"
    whole, resumed = (pathlib.Path("runs", run, name) for run in ("whole", "broken"))
    assert whole.read_bytes() == resumed.read_bytes()
    print(f"{job.name}: the same bits as in the run that was not interrupted")
