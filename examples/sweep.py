"""The sweep of sweep.yaml from Python, and what its report has.

python examples/tiny_model.py
python examples/sweep.py
"""

import logging
import shutil

import jaxlora

logging.basicConfig(format="%(message)s")  # show what jaxlora logs
logging.getLogger("jaxlora").setLevel("INFO")

shutil.rmtree("runs/sweep", ignore_errors=True)  # of an earlier call
run = jaxlora.load_run("examples/sweep.yaml")
result = jaxlora.Trainer(run).train()
jaxlora.print_summary(result)

best = result.sweep.best
print(f"best: {best.settings.name}, held-out loss {best.loss:.3f}, {best.folder}")
for trial in result.sweep.trials:
    if trial.progress.stopped_by:
        print(f"{trial.settings.name}: {trial.progress.reason}")
