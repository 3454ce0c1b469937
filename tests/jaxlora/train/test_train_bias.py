"""Trained biases in a run, each job as if it were alone."""

import numpy as np
import pytest

from jaxlora import RunConfig, Trainer, load_model
from jaxlora.errors import ConfigError
from jaxlora.hf.names import linear_path
from jaxlora.modules.trained_tensors import TRAINED_BIAS
from tests.golden_base import biased
from tests.jaxlora.train.test_contracts import assert_same_training


@pytest.fixture(scope="module")
def model(two_layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    for path in two_layers.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return load_model(biased(two_layers.folder, folder), dtype="float32")


def test_jobs_train_biases_as_if_alone(train, jobs, model):
    """q, k, v and o have one here, and the linears of the MLP have none."""
    first = jobs[0].replace(train_bias=True, target_modules="all-linear")
    other = jobs[1]
    together = train([first, other], microbatch_tokens=256)
    alone = train([first], microbatch_tokens=256)
    assert_same_training(together, alone, [first.name])
    for name, weights in together.adapters[first.name].items():
        has_bias = "self_attn" in name
        assert (TRAINED_BIAS.name in weights.tensors) == has_bias
        if has_bias:
            start = np.asarray(model.params[f"{linear_path(name)}.bias"])
            assert (weights.tensors[TRAINED_BIAS.name] != start).all()
    for weights in together.adapters[other.name].values():
        assert TRAINED_BIAS.name not in weights.tensors


def test_a_base_without_biases_is_refused(two_layers, jobs, tmp_path):
    config = RunConfig(
        model=str(two_layers.folder),
        output_dir=str(tmp_path),
        jobs=[jobs[0].replace(train_bias=True)],
    )
    with pytest.raises(ConfigError, match="none of the linears that it adapts has a b"):
        Trainer(config)
