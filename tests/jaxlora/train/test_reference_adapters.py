"""A further adapter as the reference of DPO and KTO: kept, or in the step."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import (
    DecoderOptions,
    DecoderSpec,
    FrozenModel,
    LoraJob,
    RunConfig,
    Trainer,
)
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.errors import AdapterError, CheckpointError, ConfigError
from jaxlora.hf.load import load_model
from jaxlora.models.slot_settings import shared_settings
from jaxlora.plan.job.chosen_modules import check_objective
from jaxlora.plan.memory.footprint import num_bytes, stage_resident
from jaxlora.plan.run_plan import RunPlan
from jaxlora.train.execute.layout import Layout
from tests.jaxlora.models.test_logits import NO_ADAPTER, pack
from tests.jaxlora.train import test_reference
from tests.jaxlora.train.reference_folders import KINDS, write_reference
from tests.jaxlora.train.runs import (
    LINEARS,
    InterruptAt,
    outcome,
    plan_and_jobs,
    run_of,
)
from tests.jaxlora.train.test_contracts import ROUNDING
from tests.jaxlora.train.test_preferences import write_pairs
from tests.oracle import relative_error

NUM_PAIRS = 9
HOW = "kept", "in_step"
SHAPE_OF_FOLDER = "rank", "target_modules"
# The trainings share programs, as each has DPO, KTO and references of all kinds.
SHAPE = {"microbatch_tokens": 256, "max_concurrent_jobs": 3, "slot_dropout": True}


@pytest.fixture(scope="module")
def references(model, tmp_path_factory) -> dict[str, str]:
    """A folder of each kind of adapter."""
    folder = tmp_path_factory.mktemp("references")
    return {kind: write_reference(folder / kind, model, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "a.jsonl", NUM_PAIRS, seed=0)


def job(name: str, objective: str, path: str, args: dict, **changes) -> LoraJob:
    """A job of LoRA and no more; its references may have more."""
    plain = {"use_dora": False, "trainable_token_indices": ()}
    return test_reference.job(name, objective, path, args, **plain | changes)


def twins(name: str, pairs: str, held_out: str, reference: str) -> list[LoraJob]:
    """Returns a job that keeps its reference, and one with it in the step."""
    return [
        job(
            f"{name}_{how}",
            "dpo",
            pairs,
            {"reference": reference, "reference_logps": how},
            eval_data={"path": held_out},
            eval_every=2,
            dropout=0.0,
            batch_size=NUM_PAIRS,
        )
        for how in HOW
    ]


def from_start(how: str, pairs: str, folder: str) -> LoraJob:
    """A job that compares with the adapter that it starts from."""
    args = {"reference": "start", "reference_logps": how}
    one = job(f"start_{how}", "dpo", pairs, args, init_from=folder, dropout=0.0)
    given = one.model_dump(exclude_unset=True)
    return LoraJob(**{k: v for k, v in given.items() if k not in SHAPE_OF_FOLDER})


def kept(folder: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "references" / f"{name}.safetensors")


@functools.partial(jax.jit, static_argnums=0)
def _logits(spec: DecoderSpec, params, rows) -> jax.Array:
    decoder = spec.bind(params)
    hidden = decoder(*rows, NO_ADAPTER)
    head, transposed = decoder.stored_head(hidden)
    return hidden @ (head.T if transposed else head)


def log_likelihoods(model: FrozenModel, data: dict) -> dict[str, np.ndarray]:
    """Sums over the targets of each sample, by the frozen model alone."""
    return {which: _log_likelihoods(model, one.samples) for which, one in data.items()}


def _log_likelihoods(model: FrozenModel, samples) -> np.ndarray:
    rows = pack([sample.token_ids for sample in samples], total=1024)
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=96),
    )
    found = np.asarray(_logits(spec, model.params, rows), np.float64)
    found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
    sums, start = [], 0
    for sample in samples:
        after = np.arange(start, start + len(sample.token_ids) - 1)
        logps = found[after, sample.token_ids[1:]]
        sums.append(logps[sample.is_target[1:]].sum())
        start += len(sample.token_ids)
    return np.array(sums)


def test_it_is_the_base_that_the_adapter_makes(
    train, model, references, pairs, tmp_path
):
    """Compared with a plain forward pass of weights that the adapter was merged into.

    The loss before the first step is DPO's formula over both: the job starts as the
    base, so that its policy is the base.
    """
    held_out = write_pairs(tmp_path / "held_out.jsonl", 4, seed=1)
    given = pairs, held_out
    jobs = [two for k in KINDS for two in twins(k, *given, references[k])]
    starts = [from_start(how, pairs, references["lora"]) for how in HOW]
    kto = job("kto", "kto", pairs, {"reference_logps": "in_step"}, steps=1)
    found = train([*jobs, *starts, kto], **SHAPE)
    kept_start, in_step_start = (found.losses[one.name] for one in starts)
    assert in_step_start == pytest.approx(kept_start, rel=ROUNDING)
    assert kept_start[0] == pytest.approx(np.log(2), rel=1e-5)
    folder = found.trainer.output_dir
    prepared = found.trainer.jobs[0].prepared
    data = {"train": prepared.train_data, "eval": prepared.eval_data}
    policy = log_likelihoods(model, data)["train"]
    for kind in KINDS:
        own, in_step = f"{kind}_kept", f"{kind}_in_step"
        for of in (found.losses, found.evals):
            assert of[in_step] == pytest.approx(of[own], rel=ROUNDING)
        assert max(found.losses[own]) - min(found.losses[own]) > 1e-3
        merge_adapter(model.folder, references[kind], tmp_path / kind)
        merged = load_model(tmp_path / kind, dtype="float32")
        wanted, values = log_likelihoods(merged, data), kept(folder, own)
        for which, logps in wanted.items():
            assert relative_error(values[which], logps) < 1e-5
        assert relative_error(wanted["train"], policy) > 1e-3
        ratios = (policy - wanted["train"]).reshape(-1, 2)
        x = 0.1 * (ratios[:, 0] - ratios[:, 1])
        loss = np.log1p(np.exp(-x)).mean()
        assert found.losses[in_step][0] == pytest.approx(loss, rel=1e-5)


def test_neighbours_do_not_matter_and_a_resumed_run_has_the_same_bits(
    model, references, pairs, tmp_path
):
    """A job with an adapter in the step, beside others with others and with the base.

    One of them is paused and continues, and KTO's baselines refer, too. A folder whose
    scaling alone has changed since the run began is noticed.
    """
    args = {"reference_logps": "in_step"}
    folder = pathlib.Path(write_reference(tmp_path / "own", model, "lora"))
    own = job("own", "dpo", pairs, args | {"reference": str(folder)}, steps=4)
    others = [
        job("kto", "kto", pairs, args | {"reference": references["dora"]}, steps=4),
        job("to_base", "dpo", pairs, args, steps=4, learning_rate=1e-2),
        job("late", "dpo", pairs, {"reference": references["vera"]}, priority=1),
    ]

    def config(name: str, jobs: list[LoraJob]) -> RunConfig:
        return run_of(
            model,
            tmp_path / name,
            jobs,
            block_tokens=16,
            slot_rank=8,
            **SHAPE,
            slot_targets=LINEARS,
            window_steps=1,
            checkpoint_every=1,
        )

    whole = outcome(config("whole", [own, *others]), model)
    # Two end after their first step, and are there for the programs.
    ending = [others[i].replace(steps=1, priority=0) for i in (0, 2)]
    alone = outcome(config("alone", [own, *ending]), model)
    assert alone.losses["own"] == pytest.approx(whole.losses["own"], rel=1e-5)
    assert max(whole.losses["own"]) - min(whole.losses["own"]) > 1e-3
    jobs = [own, *others]
    assert Trainer(config("cut", jobs), model).train(callbacks=[InterruptAt(2)])
    path = folder / "adapter_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"lora_alpha": 8}))
    with pytest.raises(CheckpointError, match=r"reference_fingerprint is .* compared"):
        Trainer(config("cut", jobs), model)
    path.write_text(before)
    resumed = outcome(config("cut", jobs), model, resume=True)
    assert resumed.result.num_compilations == 0
    assert resumed.bytes == whole.bytes and resumed.losses != {}


def planned(model, one: LoraJob, **settings) -> RunPlan:
    config = RunConfig(model=str(model.folder), output_dir="x", jobs=[one], **settings)
    return plan_and_jobs(config, model)[0]


@pytest.mark.usefixtures("memory_by_formula")
def test_slots_hold_references_and_their_memory_is_counted(model, references, pairs):
    args = {"reference": references["vera"]}
    kept, in_step = (
        planned(model, job("own", "dpo", pairs, args | {"reference_logps": how}))
        for how in HOW
    )
    assert planned(model, job("own", "dpo", pairs, {})).spec.slots.rank == 4
    slots = kept.spec.slots
    assert (
        slots.rank == 6 and slots.settings == ("use_vera",) and not slots.has_references
    )

    def adapter_bytes(plan: RunPlan) -> int:
        return stage_resident(plan.spec, plan.stages.use(0)).adapter_bytes

    (table,) = Layout.of(in_step.stages).empty_slots().tables
    params, settings = table.of_reference
    assert params is not table.state.params
    more = adapter_bytes(in_step) - adapter_bytes(kept)
    assert more == num_bytes(params) + num_bytes(shared_settings(settings))


@pytest.mark.parametrize(
    ("args", "changes", "error", "match"),
    [
        ({"reference": "strat"}, {}, AdapterError, "'strat' .* is neither `base` nor"),
        ({"reference": "job:sft"}, {}, AdapterError, "is no reference, as it moves"),
        ({"reference": ""}, {}, ConfigError, "must be one of base, start or a folder"),
    ],
)
def test_what_is_no_reference_is_refused(args, changes, error, match):
    with pytest.raises(error, match=match):
        check_objective(job("x", "dpo", "pairs.jsonl", args, **changes))


@pytest.mark.usefixtures("memory_by_formula", "compiled_when_called")
def test_references_that_do_not_fit_the_slots_are_refused(
    model, references, pairs, tmp_path
):
    args = {"reference": references["vera"]}
    with pytest.raises(ConfigError, match="'x' with its reference has rank 6, and"):
        planned(model, job("x", "dpo", pairs, args), slot_rank=5)

    config = run_of(
        model,
        tmp_path / "run",
        [job("x", "dpo", pairs, {}, steps=1)],
        slot_rank=8,
        slot_targets=LINEARS,
    )
    trainer = Trainer(config, model)
    more = job("late", "dpo", pairs, {"reference": references["dora"]})
    with pytest.raises(ConfigError, match="'late' with its reference has use_dora"):
        trainer.add_job(more)
    args = {"reference": references["lora"], "reference_logps": "in_step"}
    with pytest.raises(ConfigError, match=r"Set .*reference_logps: kept"):
        trainer.add_job(job("late", "dpo", pairs, args))


@pytest.mark.grid
@pytest.mark.needs_devices(4)
@pytest.mark.parametrize("mesh", ["stage=2", "data=2", "fsdp=2,tensor=2"])
def test_in_the_step_on_meshes(two_layers, references, tmp_path, mesh):
    """Each stage has its own layers of the references."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", NUM_PAIRS, seed=0)
    reference = write_reference(tmp_path / "own", two_layers, "lora")
    args = {"reference_logps": "in_step"}
    jobs = [
        job("dpo", "dpo", pairs, args | {"reference": reference}),
        job("kto", "kto", pairs, args | {"reference": reference}),
        job("to_base", "dpo", pairs, args),
    ]

    def losses(mesh: str) -> dict[str, list[float]]:
        config = run_of(
            two_layers,
            tmp_path / mesh,
            jobs,
            microbatch_tokens=512,
            block_tokens=16,
            dtype="float32",
            mesh=mesh,
        )
        return outcome(config, two_layers).losses

    found, wanted = losses(mesh), losses("fsdp=1")
    for name, one in wanted.items():
        assert found[name] == pytest.approx(one, rel=1e-4)
