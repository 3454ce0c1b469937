"""A tiny model, jobs that differ in everything, and a way to run them."""

from collections.abc import Callable

import pytest

from jaxlora import LoraJob
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.plan.memory import device_memory
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.train.report import summary
from jaxlora.train.report.plot import plot_losses
from tests import tiny
from tests.jaxlora.memory_formula import estimated_by_formula
from tests.jaxlora.train.host_executor import without_device
from tests.jaxlora.train.mesh_runs import MeshRuns
from tests.jaxlora.train.runs import LINEARS, Outcome, outcome, two_slots

TARGETS = (
    ("q_proj",),
    LINEARS,
    ("down_proj",),
    r"model\.layers\.0\..*(q|down)_proj",
)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> FrozenModel:
    """A model of one layer: tracing and compiling take half as long as for two."""
    folder = tiny.write_layers(tmp_path_factory.mktemp("base") / "tiny", 1)
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory) -> FrozenModel:
    """A model of two layers, for contracts of layers and for stages."""
    folder = tiny.write_model(tmp_path_factory.mktemp("base") / "two")
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="session")
def jobs(tmp_path_factory) -> tuple[LoraJob, ...]:
    """Eight jobs that differ in all that a job can differ in."""
    folder = tmp_path_factory.mktemp("data")

    def job(i: int) -> LoraJob:
        records = tiny.write_records(folder / f"{i}.jsonl", 18 + 3 * i, seed=i)
        return LoraJob(
            name=f"job{i}",
            data={"path": records, "loss_on": "all" if i == 3 else "completion"},
            eval_fraction=0.2,
            rank=(4, 8, 2, 1, 5, 8, 3, 6)[i],
            lora_alpha=4.0 + 3 * i,
            use_rslora=i % 3 == 1,
            dropout=(0.1, 0.0, 0.3, 0.05)[i % 4],
            target_modules=TARGETS[i % 4],
            batch_size=(5, 2, 7, 4)[i % 4],
            steps=3 + i % 3,
            learning_rate=(1e-2, 3e-3, 2e-2, 1e-3)[i % 4],
            lr_schedule=("constant", "linear", "cosine")[i % 3],
            warmup_steps=i % 2,
            weight_decay=0.1 * (i % 2),
            lora_plus_ratio=1.0 + i % 2,
            max_grad_norm=(1.0, None, 0.05)[i % 3],
            max_length=96,
            seed=100 + i,
            eval_every=2,
        )

    return tuple(job(i) for i in range(8))


@pytest.fixture(scope="module", autouse=True)
def _without_pictures():
    """A picture takes longer than the training of a tiny model; see `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "plot_losses", lambda *_: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def memory_of_runs():
    """Memory is not estimated from traces, but in modules that replace this fixture.

    `test_contracts.py` and those that test what is chosen by memory are among them.
    """
    with estimated_by_formula():
        yield


@pytest.fixture(scope="module")
def no_device():
    """The runs of a module train on the host, and compile nothing."""
    with without_device():
        yield


@pytest.fixture
def have(monkeypatch):
    """Sets what the device's memory has for a run."""

    def set_to(num_bytes: int) -> None:
        found = DeviceMemory(num_bytes=num_bytes, source="a pretended device")
        monkeypatch.setattr(device_memory, "device_memory", lambda *_: found)

    return set_to


@pytest.fixture
def pictures(monkeypatch):
    """A test's runs draw their losses, as those of users."""
    monkeypatch.setattr(summary, "plot_losses", plot_losses)


@pytest.fixture
def train(model, tmp_path) -> Callable[..., Outcome]:
    """Trains jobs together; every call into its own folder."""
    count = iter(range(1000))

    def run(jobs, *, on_window=None, **settings) -> Outcome:
        # So that a single job shares the programs of runs with TWO_SLOTS.
        slots = {"max_concurrent_jobs": max(2, len(jobs)), "checkpoint_every": None}
        folder = tmp_path / f"run{next(count)}"
        config = two_slots(model, folder, jobs, **slots | settings)
        return outcome(config, model, on_window=on_window)

    return run


@pytest.fixture(scope="session")
def mesh_jobs(jobs) -> tuple[LoraJob, ...]:
    """Four jobs that differ in everything, for `meshes`.

    The first one adapts only the first layer and the fourth one only the last layer, so
    all their gradients are on one pipeline stage. All but the second are clipped.
    With Adam's usual epsilon of 1e-8, an element whose gradients are rounding gets
    updates as large as the others', and differs on some CPUs by 1e-3.
    """
    steady = {"adam_eps": 1e-4}
    always = {"lr_schedule": "constant", "warmup_steps": 0, "max_grad_norm": 0.05}
    first = {"target_modules": r"model\.layers\.0\..*(q|down)_proj"}
    some = {"target_modules": ("down_proj",)}
    last = {"target_modules": r"model\.layers\.1\..*(v|down)_proj"}
    return (
        jobs[0].replace(**first | always | steady),
        jobs[1].replace(**some | steady),
        jobs[2].replace(**steady),
        jobs[3].replace(**last | always | steady),
    )


@pytest.fixture(scope="session")
def small_jobs(mesh_jobs) -> tuple[LoraJob, ...]:
    """The same jobs with batches of two samples, which replicas do not share."""
    even = {"batch_size": 2, "steps": 4}
    return tuple(job.replace(**even) for job in mesh_jobs)


@pytest.fixture(scope="session")
def meshes(tmp_path_factory) -> MeshRuns:
    return MeshRuns(tmp_path_factory.mktemp("meshes"))
