"""`jaxlora train` imports no package before it needs it."""

import subprocess
import sys

from jaxlora.run.live.mailbox import Mailbox
from jaxlora.run.live.status_file import StatusFile
from jaxlora.run.status import StatusTracker
from scripts import arrows
from tests.jaxlora.run import made_events

# The modules that may import each package, of which a run needs none before its first
# step, or none at all.
IMPORTED_BY = {
    "jax.experimental.mosaic": ("jaxlora.pallas_kernels.mosaic",),
    "jax.experimental.pallas": ("jaxlora.pallas_kernels.mosaic",),
    "jinja2": (
        "jaxlora.data.templates.sandbox",
        "jaxlora.data.templates.template_worker",
    ),
    "matplotlib": (
        "jaxlora.train.report.plot",
        "jaxlora.scheduler.picture",
    ),
    "networkx": ("jaxlora.fuse.place",),
    "orbax": ("jaxlora.train.saved.checkpoint",),
    "pulp": (
        "jaxlora.scheduler.papers",
        "jaxlora.scheduler.solver",
        "jaxlora.scheduler.sweep.plora",
        "jaxlora.scheduler.replicas.deploy",
        "jaxlora.scheduler.replicas.lobra",
    ),
    "highspy": ("jaxlora.scheduler.solver",),
    "scipy": (
        "jaxlora.scheduler.calibrate",
        "jaxlora.scheduler.sweep.bound",
        "jaxlora.scheduler.replicas.bound",
    ),
    "tensorboardX": ("jaxlora.trackers.tensorboard",),
    "gguf": ("jaxlora.adapters.files.gguf_export",),
    "huggingface_hub.errors": ("jaxlora.hf",),
    "pyarrow.parquet": ("jaxlora.data.records.files",),
}
# The packages above would bring these along.
_WITH_THEM = ("google.protobuf", "httpx", "httpx2", "PIL", "pandas", "IPython")
# Packages that no run needs.
_NEVER = ("torch", "triton", "transformers", "datasets", "wandb", "trackio")
_PROGRAM = """
import sys
import jaxlora.cli.main
import jaxlora.config.run_file
import jaxlora.sweeps.control
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


def test_the_trainer_is_imported_without_heavy_packages():
    names = (*IMPORTED_BY, *_WITH_THEM, *_NEVER)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *names],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [], "imported before the first step"


def test_only_these_modules_import_the_packages():
    by_package = {
        f"{package}.": tuple(f"{one}." for one in modules)
        for package, modules in IMPORTED_BY.items()
    }
    wrong, used = [], set()
    for module, path in arrows.find_modules().items():
        if not module.startswith("jaxlora."):
            continue
        for name in arrows.imported_names(path):
            for package, allowed in by_package.items():
                if f"{name}.".startswith(package):
                    used.add(package)
                    if not f"{module}.".startswith(allowed):
                        wrong.append(f"{module} imports {package[:-1]}")
    assert not wrong
    assert used == by_package.keys()


def test_commands_that_look_or_ask_start_at_once(tmp_path):
    """They would import JAX, or build the run file's models, for seconds."""
    tracker = StatusTracker()
    start = made_events.run_start(made_events.info("a"))
    tracker.on_event(start)
    StatusFile(tmp_path, tracker).on_event(start)
    Mailbox(tmp_path).create()
    program = """
import sys
from jaxlora.cli.main import main
for command in ("status", "stop", "pause", "resume"):
    main([command, sys.argv[1], *["a"] * (command != "status")])
print(*sys.modules)
"""
    command = [sys.executable, "-c", program, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "job 'a' continues when" in done.stdout
    slow = {"jax", "flax", "optax", "numpy", "pyarrow", "transformers", "matplotlib"}
    slow |= {"orbax", "tokenizers", "jaxlora.config", "jaxlora.scheduler"}
    assert slow.isdisjoint(done.stdout.splitlines()[-1].split())
