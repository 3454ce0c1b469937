"""Runs with fused kernels and cuDNN's attention, for tests on a GPU that has both."""

import pathlib

import jax.numpy as jnp
import pytest

from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.modules.cudnn_attention import cudnn_unsupported
from jaxlora.pallas_kernels.mosaic.hopper import unsupported_device
from tests import tiny

CONFIG = tiny.CONFIG | {"hidden_size": 256, "intermediate_size": 320}
SETTINGS = {"implementation": "mosaic", "attention": "cudnn", "block_tokens": 64}

_LACKS = unsupported_device() or cudnn_unsupported(dtype=jnp.bfloat16, head_dim=64)
only_where_it_runs = pytest.mark.skipif(_LACKS is not None, reason=str(_LACKS))


def wide_model(folder: pathlib.Path) -> FrozenModel:
    """As tiny as the kernels can take."""
    return load_model(tiny.write_model(folder, config=CONFIG), dtype="bfloat16")
