"""Settings in Python and in a run file: which are accepted, and the errors."""

import numpy as np
import pydantic
import pytest

from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.config.run_file import load_job, load_run, run_config
from jaxlora.errors import ConfigError
from jaxlora.sharding.mesh_sizes import MeshSizes

DATA = {"path": "a.jsonl"}


def job(**more):
    return {"name": "a", "data": DATA, **more}


def run(*jobs, **more):
    return run_config({"model": "m", "jobs": list(jobs or [job()]), **more})


RUN_FILE = """
model: folder
output_dir: runs/x
defaults:
  rank: 8
  learning_rate: 1e-4
  data: {path: shared.jsonl}
jobs:
  - name: first
  - name: second
    rank: 4
    lora_alpha: 16
    data: {path: own.jsonl, kind: text}
    target_modules: [q_proj, v_proj]
    rank_pattern: {q_proj: 2}
"""


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def test_run_file(write):
    found = load_run(write(RUN_FILE))
    assert (found.model, found.output_dir) == ("folder", "runs/x")
    first, second = found.jobs
    assert (first.name, first.rank, first.data.path) == ("first", 8, "shared.jsonl")
    assert (second.name, second.rank, second.data.path) == ("second", 4, "own.jsonl")
    assert (second.data.kind, second.lora_alpha) == ("text", 16.0)
    assert second.target_modules == ("q_proj", "v_proj")
    assert second.rank_pattern == {"q_proj": 2}
    # YAML 1.1 takes 1e-4 for a text, for want of a dot.
    assert (first.learning_rate, second.learning_rate) == (1e-4, 1e-4)


def test_the_file_may_be_named_by_a_text(write):
    assert load_run(str(write(RUN_FILE))) == load_run(write(RUN_FILE))


def test_settings_may_replace_those_of_the_file(write):
    path = write("model: m\nmesh: fsdp=2\njobs:\n  - {name: a, data: {path: a}}\n")
    assert load_run(path, mesh="stage=2").mesh == "stage=2"
    with pytest.raises(ConfigError, match=r"run\.yaml: mesh: the mesh is empty"):
        load_run(path, mesh="")


def test_defaults_give_way_to_the_jobs_own():
    found = run(job(), job(name="b", seed=7), defaults={"seed": 3, "epochs": 2})
    assert [(j.seed, j.epochs) for j in found.jobs] == [(3, 2.0), (7, 2.0)]
    assert run(defaults=None).jobs == run().jobs


def test_a_job_is_the_same_after_json():
    first = LoraJob(
        name="a",
        data=DataConfig(path="a.jsonl", limit=3, system="Be kind."),
        eval_fraction=0.1,
        eval_seed=7,
        eval_every=5,
        rank_pattern={r"layers\.0\..*": 4},
        alpha_pattern={"q_proj": 1.5},
        target_modules=("q_proj", "v_proj"),
        exclude_modules=r".*\.0\..*",
        learning_rate=1e-4 / 3,
        seed=2**31 - 1,
    )
    assert LoraJob.model_validate_json(first.model_dump_json()) == first
    whole = RunConfig(model="m", jobs=(first,))
    assert RunConfig.model_validate_json(whole.model_dump_json()) == whole


def test_a_job_is_frozen():
    first = LoraJob(name="a", data=DataConfig(path="a.jsonl"))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        first.rank = 4


@pytest.mark.parametrize("name", ["a", "A1", "0", "a.b-c_d", "x" * 100, "v1..2"])
def test_names(name):
    assert run(job(name=name)).jobs[0].name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 101,
        "..",
        "../a",
        "a/b",
        "/a",
        "a\\b",
        "a b",
        ".a",
        "-a",
        "_a",
        "a\n",
        "é",
    ],
)
def test_names_that_are_no_folder_names(name):
    with pytest.raises(ConfigError, match=r"jobs\.0\.name: .*must be a plain folder"):
        run(job(name=name))


def test_a_job_that_is_named_like_the_base_model():
    with pytest.raises(ConfigError, match="'base' is the name of the base model"):
        run(job(name="base"))


@pytest.mark.parametrize(
    ("jobs", "more", "match"),
    [
        ([job(), job()], {}, "two jobs are named 'a'"),
        ([job(), job(name="b"), job(name="A")], {}, "two jobs are named 'a'"),
        ([], {"modle": "x"}, r"unknown key 'modle'\. Did you mean 'model'\?"),
        ([], {"zzz": 1}, r"unknown key 'zzz'\. Known keys: .*model, revision"),
        (
            [job(learning_rat=1)],
            {},
            r"jobs\.0\.learning_rat: unknown key .*Did you mean 'learning_rate'\?",
        ),
        (
            [job(data={"path": "a", "promt": "x"})],
            {},
            r"jobs\.0\.data\.promt: unknown key 'promt'\. Did you mean 'prompt'\?",
        ),
        (
            [],
            {"defaults": {"rnak": 8}},
            r"defaults\.rnak: unknown key 'rnak'\. .*'rank'",
        ),
        ([], {"defaults": [8]}, "defaults: expected a mapping, such as"),
        ([job(rank=0)], {}, r"jobs\.0\.rank: .*greater than 0 \(given: 0\)"),
        ([job(rank=1.5)], {}, r"jobs\.0\.rank: .*whole number.* \(given: 1\.5\)"),
        ([job(rank="many")], {}, r"jobs\.0\.rank: .*\(given: 'many'\)"),
        ([job(lora_alpha=0)], {}, r"jobs\.0\.lora_alpha: .*greater than 0"),
        ([job(dropout=1.0)], {}, r"jobs\.0\.dropout: .*less than 1"),
        ([job(dropout=-0.1)], {}, r"jobs\.0\.dropout: .*greater than or equal to 0"),
        ([job(learning_rate=float("nan"))], {}, r"learning_rate: .*finite"),
        ([job(learning_rate=float("inf"))], {}, r"learning_rate: .*finite"),
        ([job(seed=2**31)], {}, r"jobs\.0\.seed: .*less than 2147483648"),
        ([job(rank_pattern={"q_proj": 0})], {}, r"rank_pattern\.q_proj: .*greater"),
        ([job(target_modules=[])], {}, "target_modules is empty, so nothing would"),
        ([job(target_modules="")], {}, "target_modules is empty, so nothing would"),
        (
            [job(lr_schedule="step")],
            {},
            r"lr_schedule: .*'constant', 'linear', 'cosine'",
        ),
        ([job(too_long="cut")], {}, r"too_long: .*'truncate', 'drop' or 'error'"),
        ([{"name": "a"}], {}, r"jobs\.0\.data: this key is required"),
        ([{"data": DATA}], {}, r"jobs\.0\.name: this key is required"),
        (
            ["a"],
            {},
            r"jobs\.0: expected a mapping, such as {name: \.\.\.} \(given: 'a'\)",
        ),
        (
            [job(eval_every=5)],
            {},
            "eval_every needs held-out records: set eval_data or eval_fraction",
        ),
        ([job(keep_best=True)], {}, "keep_best needs held-out records"),
        (
            [job(early_stopping=2, eval_every=5)],
            {},
            "eval_every needs held-out records",
        ),
        (
            [job(early_stopping=2, eval_fraction=0.1)],
            {},
            "early_stopping counts evaluations: set eval_every",
        ),
        (
            [job(eval_data=DATA, eval_fraction=0.1)],
            {},
            "give eval_data or eval_fraction, not both",
        ),
        ([job(eval_seed=3)], {}, "eval_seed=3 chooses what eval_fraction holds out"),
        (
            [job(eval_seed=3, eval_data=DATA)],
            {},
            "set eval_fraction, or leave eval_seed out",
        ),
        (
            [job(eval_seed=2**31, eval_fraction=0.1)],
            {},
            r"eval_seed: .*less than 2147483648",
        ),
        (
            [],
            {"microbatch_tokens": 1000, "block_tokens": 64},
            "microbatch_tokens=1000 is not a multiple of block_tokens=64",
        ),
        ([], {"dtype": "int8"}, r"dtype: .*'auto', 'bfloat16' or 'float32'"),
        (
            [],
            {"implementation": "cuda"},
            r"expected auto or one of mosaic, triton, xla\. \(given: 'cuda'\)",
        ),
        ([], {"max_concurrent_jobs": 0}, r"max_concurrent_jobs: .*greater than 0"),
        ([], {"mesh": 4}, r"mesh: expected text, in quotes if need be \(given: 4\)"),
        ([], {"mesh": "model=2"}, r"mesh: .*no axis 'model'.*\(given: 'model=2'\)"),
        ([], {"mesh": {"stage": 0}}, r"mesh: .*'stage=0', but '0' is not a positive"),
        ([], {"mesh": {}}, "mesh: the mesh is empty"),
        (
            [],
            {"mesh": "stage=4", "pipeline_microbatches": 3},
            "pipeline_microbatches=3 is less than the 4 stages of mesh stage=4",
        ),
    ],
)
def test_refused(jobs, more, match):
    with pytest.raises(ConfigError, match=match):
        run(*jobs, **more)


@pytest.mark.parametrize(
    "mesh", ["stage=2,fsdp=2", " fsdp = 2, stage=2,data=1", {"fsdp": 2, "stage": 2}]
)
def test_a_mesh_is_stored_in_one_form(mesh):
    found = run(mesh=mesh, pipeline_microbatches=2)
    assert found.mesh == "stage=2,fsdp=2"
    assert found.mesh_sizes == MeshSizes(stage=2, fsdp=2)
    assert found.replace(mesh="auto").mesh == "auto"


def test_a_run_uses_one_device_unless_it_has_a_mesh():
    assert run().mesh == "fsdp=1"
    assert run().mesh_sizes.num_devices == 1


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        run(job(rank=0), job(name="../b"), dtype="int8")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("run: ") for line in lines)


def test_no_jobs(write):
    with pytest.raises(ConfigError, match="jobs is empty, so there is nothing"):
        run_config({"model": "m", "jobs": []})
    with pytest.raises(ConfigError, match="jobs: this key is required"):
        load_run(write("model: m"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "a run file is a mapping with the keys .* not a NoneType"),
        ("- a\n- b\n", "a run file is a mapping .* not a list"),
        ("just words", "a run file is a mapping .* not a str"),
        ("model: [", "cannot be read as YAML"),
        ("a: 1\n\tb: 2", "cannot be read as YAML"),
        ("x: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
        (b"\xff\xfe\xfa", "cannot be read as YAML"),
        (RUN_FILE + "    rnak: 3\n", r"run\.yaml, line 16: jobs\.1\.rnak: unknown key"),
    ],
)
def test_run_files_that_are_refused(write, text, match):
    with pytest.raises(ConfigError, match=match):
        load_run(write(text))


def test_missing_run_file(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml: this run file does not exist"):
        load_run(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=r"no\.yaml: this job file does not exist"):
        load_job(tmp_path / "no.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_run(tmp_path)


NUMBERS = [
    *("rank", "lora_alpha", "eval_fraction", "dropout", "batch_size", "epochs"),
    *("steps", "learning_rate", "warmup_steps", "warmup_ratio", "lora_plus_ratio"),
    *("weight_decay", "adam_b1", "adam_b2", "adam_eps", "max_grad_norm", "max_length"),
    *("seed", "eval_every", "early_stopping", "early_stopping_delta", "priority"),
]
RUN_NUMBERS = [
    *("max_concurrent_jobs", "slot_rank", "microbatch_tokens", "block_tokens"),
    *("pipeline_microbatches", "window_steps", "checkpoint_every"),
    *("keep_checkpoints", "log_every"),
]


@pytest.mark.parametrize("value", [True, "8", "on", np.True_, b"8", [8]])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_of_a_job_are_numbers(key, value):
    with pytest.raises(ConfigError, match=rf"jobs\.0\.{key}: "):
        run(job(**{key: value}))


@pytest.mark.parametrize("value", [True, "8", "on"])
@pytest.mark.parametrize("key", RUN_NUMBERS)
def test_numbers_of_a_run_are_numbers(key, value):
    with pytest.raises(ConfigError, match=rf"run: {key}: expected a .*number"):
        run(**{key: value})


def test_numbers_from_python():
    made = LoraJob(name="a", data=DATA, rank=np.int64(8), learning_rate=1, steps=1e3)
    assert (made.rank, made.learning_rate, made.steps) == (8, 1.0, 1000)
    for value in (True, "8"):
        with pytest.raises(ConfigError, match="LoraJob: rank: expected a number"):
            LoraJob(name="a", data=DATA, rank=value)


@pytest.mark.parametrize("value", ["yes", "on", "true", 1, 0, None])
@pytest.mark.parametrize("key", ["use_rslora", "shuffle", "keep_best"])
def test_true_and_false_are_nothing_else(key, value):
    with pytest.raises(ConfigError, match=rf"{key}: expected true or false \(given"):
        run(job(**{key: value}))
    with pytest.raises(ConfigError, match=r"data\.chat: expected true or false"):
        run(job(data={**DATA, "chat": "yes"}))


@pytest.mark.parametrize("value", [10**30, 10**5000, 1e300], ids=["30", "5000", "f"])
def test_numbers_too_large_for_an_array(value):
    with pytest.raises(ConfigError, match=r"jobs\.0\.rank: "):
        run(job(rank=value))


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_texts_that_are_none(text):
    with pytest.raises(ConfigError, match=r"run: model: .* half of a surrogate pair"):
        run_config({"model": text, "jobs": [job()]})
    with pytest.raises(ConfigError, match=r"jobs\.0\.data\.path: holds a NUL"):
        run(job(data={"path": text}))
    with pytest.raises(ConfigError, match=r"jobs\.0\.target_modules: holds a NUL"):
        run(job(target_modules=["q_proj", text]))


@pytest.mark.parametrize("name", ["a\0b.yaml", "x" * 5000])
def test_a_run_file_that_no_disk_can_hold(name):
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_run(name)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("learning_rate: on", r"learning_rate: expected a number.* \(given: 'on'\)"),
        ("rank: yes", r"rank: expected a number.* \(given: 'yes'\)"),
        ("learning_rate: 1:30", r"learning_rate: expected a number.*'1:30'"),
        ("max_length: 1_000", r"max_length: expected a number.*'1_000'"),
        ("rank: '8'", r"rank: expected a number, without quotes"),
        ("shuffle: no", r"shuffle: expected true or false \(given: 'no'\)"),
        ("rank: 8\n    rank: 9", r"run\.yaml, line 6.*'rank' is also in line 5"),
        ("8: 8", r"run\.yaml, line 5.*the key 8 is not a string"),
    ],
)
def test_settings_of_a_run_file(write, line, match):
    text = f"model: m\njobs:\n  - name: a\n    data: {{path: a}}\n    {line}\n"
    with pytest.raises(ConfigError, match=match):
        load_run(write(text))


@pytest.mark.parametrize("key", ["model", "output_dir", "init_from", "data"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/" + "ä" * 128, r"has 256 bytes, .* at most 255. Choose a shorter"),
        ("a/" * 2048, r"has 4096 bytes, and can have at most 4095. Choose a shorter"),
    ],
)
def test_paths_that_cannot_exist(key, path, message):
    value = {"path": path} if key == "data" else path
    of_run = {key: path} if key in ("model", "output_dir") else {}
    with pytest.raises(ConfigError, match=message):
        run_config({"model": "m", "jobs": [{**job(), key: value}], **of_run})


def test_a_run_has_room_below_its_folder():
    """The path counts from the root, and the files of the run have longer ones."""
    with pytest.raises(ConfigError, match="and can have at most 3695"):
        run(output_dir="a/" * 1845 + "runs")
    run(output_dir="a/" * 1000)


@pytest.mark.parametrize(
    "settings, pace",
    [
        ({}, "equal"),
        ({"mesh": "data=2,tensor=2"}, "equal"),
        ({"mesh": "stage=2"}, "together"),
        ({"replicas": [{"microbatch_tokens": 64}]}, "together"),
        ({"packer": "greedy"}, "together"),
        ({"sweep": {"early_exit": [{"type": "halving"}]}}, "together"),
        ({"mesh": "stage=2", "pace": "equal"}, "equal"),
        ({"pace": "together"}, "together"),
    ],
)
def test_pace_of_jobs(settings, pace):
    jobs = [job(name=name, eval_fraction=0.1) for name in "ab"]
    assert run(*jobs, **settings).settled_pace == pace


def test_checkpoints_go_by_the_clock_or_by_rounds():
    message = "checkpoint_seconds=30.0 is for checkpoint_every: auto, and it is 7"
    with pytest.raises(ConfigError, match=message):
        run(checkpoint_every=7, checkpoint_seconds=30)
    assert run(checkpoint_seconds=30).checkpoint_every == "auto"


def test_other_packers_have_no_pace():
    with pytest.raises(ConfigError, match=r"packer lorafusion takes as many.*joint"):
        run(packer="lorafusion", pace="equal")
