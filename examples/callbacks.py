"""Your own code follows a run: it sees every step, and stops and adds jobs.

python examples/tiny_model.py
python examples/callbacks.py
"""

import logging
import shutil

import jaxlora

logging.basicConfig(format="%(message)s")  # show what jaxlora logs
logging.getLogger("jaxlora").setLevel("INFO")


def make_job(name: str, rate: float) -> jaxlora.LoraJob:
    return jaxlora.LoraJob(
        name=name,
        data={"path": "examples/data/bakery.jsonl"},
        max_length=400,
        rank=8,
        dropout=0.05,
        learning_rate=rate,
        batch_size=4,
        steps=6,
    )


class Tamer(jaxlora.Callback):
    """Replaces a job whose loss grows by one with a smaller learning rate."""

    def on_step(self, event):
        first = event.progress.first_loss
        if event.step > 1 and event.loss > first and "slower" not in event.job:
            self.trainer.stop_job(event.job, f"its loss grew above {first:.2f}")
            self.trainer.add_job(
                make_job(f"{event.job}-slower", event.learning_rate / 30)
            )

    def on_job_end(self, event):
        print(f"{event.job}: {event.status}: {event.reason}")


shutil.rmtree("runs/callbacks", ignore_errors=True)  # of an earlier call
run = jaxlora.RunConfig(
    model="models/tiny",
    output_dir="runs/callbacks",
    jobs=[make_job("steady", 1e-2), make_job("wild", 1.0)],
    max_concurrent_jobs=2,
    microbatch_tokens=1024,
    window_steps=2,
)
result = jaxlora.Trainer(run).train(callbacks=[Tamer()])
jaxlora.print_summary(result)
