"""A tiny model, jobs that differ in everything, and a way to run them."""

import pathlib
from collections.abc import Callable

import pytest

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.train.report import summary
from jaxlora.train.report.plot import plot_losses
from tests import tiny
from tests.jaxlora.memory_formula import estimated_by_formula
from tests.jaxlora.train.at_window import at_windows
from tests.jaxlora.train.host_executor import without_device
from tests.jaxlora.train.mesh_runs import MeshRuns
from tests.jaxlora.train.outcome import Outcome

# One linear of attention and one of the MLP. All seven take twice as long to trace and
# to compile; test_peft_run.py trains them, and some that share an input.
LINEARS = r".*\.(q|down)_proj"
TARGETS = (
    ("q_proj",),
    LINEARS,
    ("down_proj",),
    r"model\.layers\.0\..*(q|down)_proj",
)


# One shape of two slots. Runs that have it share programs, whose tracing and compiling
# takes far longer than to train a tiny model.
TWO_SLOTS = {
    "max_concurrent_jobs": 2,
    "slot_rank": 8,
    "slot_targets": LINEARS,
    "slot_dropout": True,
    "microbatch_tokens": 512,
    "block_tokens": 16,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> FrozenModel:
    """A model of one layer: tracing and compiling take half as long as for two."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    tiny.write_model(folder, config=tiny.CONFIG | {"num_hidden_layers": 1})
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
def pictures(monkeypatch):
    """A test's runs draw their losses, as those of users."""
    monkeypatch.setattr(summary, "plot_losses", plot_losses)


@pytest.fixture
def train(model, tmp_path) -> Callable[..., Outcome]:
    """Trains jobs together; every call into its own folder."""
    count = iter(range(1000))

    def run(jobs, *, on_window=None, **settings) -> Outcome:
        shape = {"microbatch_tokens": 512, "block_tokens": 16, "slot_dropout": True}
        # So that a single job shares the programs of runs with TWO_SLOTS.
        shape |= {"slot_targets": LINEARS, "max_concurrent_jobs": max(2, len(jobs))}
        settings = shape | settings
        config = RunConfig(
            model=str(model.folder),
            output_dir=str(tmp_path / f"run{next(count)}"),
            jobs=jobs,
            checkpoint_every=None,
            slot_rank=8,
            **settings,
        )
        trainer = Trainer(config, model)
        return Outcome(trainer, trainer.train(callbacks=at_windows(on_window)), model)

    return run


def folder_of(outcome: Outcome) -> pathlib.Path:
    return outcome.result.output_dir


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
        jobs[0].model_copy(update=first | always | steady),
        jobs[1].model_copy(update=some | steady),
        jobs[2].model_copy(update=steady),
        jobs[3].model_copy(update=last | always | steady),
    )


@pytest.fixture(scope="session")
def small_jobs(mesh_jobs) -> tuple[LoraJob, ...]:
    """The same jobs with batches of two samples, which replicas do not share."""
    even = {"batch_size": 2, "steps": 4}
    return tuple(job.model_copy(update=even) for job in mesh_jobs)


@pytest.fixture(scope="session")
def meshes(tmp_path_factory) -> MeshRuns:
    return MeshRuns(tmp_path_factory.mktemp("meshes"))
