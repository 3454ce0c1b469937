"""Which back end runs a fused linear."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax

from jaxlora.fuse.backend import choose_backend
from jaxlora.pallas_kernels import BACKENDS, LinearShape


def choose(asked: str):
    shapes = [
        LinearShape(
            dtype=np.dtype("float32"),
            in_features=128,
            out_features=256,
            rank=16,
            block_tokens=block,
        )
        for block in (128, 64)
    ]
    mesh = jax.sharding.get_abstract_mesh()
    return choose_backend(asked, shapes, lax.Precision.DEFAULT, mesh)


@pytest.fixture(autouse=True)
def kettle(monkeypatch):
    """Makes a back end slow here, which runs blocks of 64 tokens only."""
    entry = dataclasses.replace(
        BACKENDS["triton"],
        unsupported=lambda shape: None if shape.block_tokens == 64 else "too large",
        slow_device=lambda: "it is a kettle",
    )
    monkeypatch.setitem(BACKENDS, "triton", entry)


def test_auto_passes_over_a_back_end_that_is_slow_on_the_device():
    assert choose("auto") == ("xla", 128)
    assert choose("triton") == ("triton", 64)


def test_the_reasons_name_every_back_end(monkeypatch):
    for name in ("mosaic", "xla"):
        entry = dataclasses.replace(BACKENDS[name], unsupported=lambda shape: "no")
        monkeypatch.setitem(BACKENDS, name, entry)
    assert choose("auto") == (
        "mosaic cannot run this: no; triton is slow here: it is a kettle; "
        "xla cannot run this: no"
    )
    assert choose("xla") == "xla cannot run this: no"
