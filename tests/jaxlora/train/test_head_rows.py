"""Trained rows of a head that is not tied to the embedding, in a run."""

import functools
import logging

import numpy as np
import pytest

from jaxlora import LoraJob, load_model, merge_adapter
from jaxlora.adapters.files.gguf_export import export_gguf
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.models.structure import linear_shapes
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.plan.memory.footprint import stage_resident
from tests import tiny
from tests.jaxlora.train.mesh_runs import write_untied
from tests.jaxlora.train.runs import ONE_STAGE, assert_generates_alike
from tests.jaxlora.train.test_contracts import ROUNDING, assert_same_training
from tests.oracle import relative_error

# Tokens that occur: 67 to 74 are a to h, and 35 to 42 are A to H.
BOTH = {"embed_tokens": tuple(range(67, 73)), "lm_head": (71, 67, 36, 35)}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "tiny"
    return tiny.write_model(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of one layer with a head of its own."""
    folder = tmp_path_factory.mktemp("base") / "untied"
    config = tiny.CONFIG | {"num_hidden_layers": 1}
    return load_model(write_untied(folder, config), dtype="float32")


# Rows are no part of a linear, so one linear is enough.
ADAPTED = ("down_proj",)


@pytest.fixture
def train(train):
    """All runs share programs."""
    shape = {"max_concurrent_jobs": 3, "microbatch_tokens": 256}
    return functools.partial(train, slot_targets=ADAPTED, **shape)


@pytest.fixture
def three(jobs) -> list[LoraJob]:
    """Two jobs that train rows of the head, and one that does not."""
    first, second, _, plain = (job.replace(target_modules=ADAPTED) for job in jobs[:4])
    return [
        first.replace(trainable_token_indices=BOTH),
        second.replace(trainable_token_indices={"lm_head": [36, 40, 67]}),
        plain.replace(steps=2),
    ]


@pytest.fixture(scope="module")
def done():
    return {}


@pytest.fixture
def together(train, three, done):
    """The run of all three, which is trained once."""
    if not done:
        done["run"] = train(three)
    return done["run"]


def test_jobs_train_rows_of_the_head_as_if_alone(
    train, three, together, jobs, model, tied, tmp_path
):
    first, second, plain = three
    alone = train([first, plain])
    assert_same_training(together, alone, [first.name, plain.name])
    shapes = linear_shapes(model.config)
    found, wanted = (
        import_peft(outcome.result.output_dir / "adapters" / first.name, shapes)
        for outcome in (together, alone)
    )
    assert found.token_indices == BOTH
    head = np.asarray(model.params["lm_head.kernel"]).T
    for name, own in found.outside.items():
        assert relative_error(own.array, wanted.outside[name].array) < ROUNDING
        # The base's head equals its embedding, and each has rows of its own here.
        assert (np.abs(own.array - head[list(own.tokens)]).max(axis=1) > 0).all()
    of_head = found.outside["head_rows"].array[0]
    assert (of_head != head[71]).any()
    assert (of_head != found.outside["token_rows"].array[4]).any()
    folder = together.result.output_dir / "adapters" / second.name
    other = import_peft(folder, shapes)
    assert other.token_indices == {"lm_head": (36, 40, 67)}
    _check_slots(alone.trainer, jobs[2])
    _check_uses(together.result.output_dir / "adapters" / first.name, model, tmp_path)
    with pytest.raises(AdapterError, match="has rows of lm_head, and the head of the"):
        merge_adapter(tied, folder, tmp_path / "other")


def _check_slots(trainer, late):
    """Their size is that of the largest job, and is counted."""
    spec = trainer.layout.stages[0].spec
    assert spec.slots.outside == (("head_rows", 4), ("token_rows", 6))
    shapes = spec.adapter_shapes()
    assert shapes["head_rows.rows"].shape == (3, 1, 4, 32)
    num_values = sum(np.prod(shape.shape) for shape in shapes.values())
    assert stage_resident(spec, ONE_STAGE).adapter_bytes == 4 * 4 * num_values
    more = late.replace(trainable_token_indices={"lm_head": [1, 2, 3, 4, 5]})
    with pytest.raises(ConfigError, match="has 5 trainable_token_indices of lm_head"):
        trainer.add_job(more)


def _check_uses(folder, model, tmp_path):
    """Generation equals that of the merged model; GGUF cannot hold the rows."""
    merged = assert_generates_alike(model, folder, tmp_path / "merged")
    rows = import_peft(folder, linear_shapes(model.config)).outside["head_rows"]
    kernel = np.asarray(merged.params["lm_head.kernel"])
    np.testing.assert_array_equal(kernel[:, list(rows.tokens)].T, rows.array)
    with pytest.raises(AdapterError, match="has trainable_token_indices, and llama"):
        export_gguf(folder, tmp_path / "a.gguf", base=str(model.folder))


def test_an_adapter_with_rows_of_the_head_is_trained_on(train, three, together, model):
    first, second, _ = three
    folder = together.result.output_dir / "adapters" / second.name
    more = second.replace(name="more", init_from=str(folder), steps=2)
    with pytest.raises(ConfigError, match=r'indices=\{"lm_head": \[36, 40, 67\]\}'):
        train([more.replace(trainable_token_indices=[36])])
    # Beside the job with the most rows, as there are programs for as many.
    found = train([first.replace(steps=1), more])
    shapes = linear_shapes(model.config)
    before = import_peft(folder, shapes).outside["head_rows"]
    folder = found.result.output_dir / "adapters" / more.name
    after = import_peft(folder, shapes).outside["head_rows"]
    assert after.tokens == before.tokens and (after.array != before.array).any()


def test_a_list_leaves_an_untied_head_frozen_and_says_so(jobs, model, caplog):
    with caplog.at_level(logging.INFO, logger="jaxlora"):
        choose_modules(jobs[0].replace(trainable_token_indices=[5]), model.config)
    assert "stays frozen. To train rows of both, give {embed_tokens" in caplog.text
