"""A decoder as a chain of sections computes what it computes as one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.base_format import BaseFormat
from jaxlora.models.registry import model_config
from jaxlora.models.residuals import pull_back
from jaxlora.models.sections import chosen_layers, sections
from jaxlora.models.spec import DecoderSpec
from jaxlora.programs import key
from jaxlora.programs.kept import KeptPrograms
from jaxlora.programs.program import keep_programs, wait_until_kept
from jaxlora.scheduler import Limits
from jaxlora.train.execute.step import CompiledSteps
from tests import tiny
from tests.jaxlora.models.test_tensor_parallel import make_spec
from tests.llama import LLAMA_8B, LLAMA_70B, with_layers
from tests.llama import decoder as llama


def in_programs(spec: DecoderSpec, size: int | None) -> DecoderSpec:
    """The decoder with programs of so many layers; None: one program."""
    options = dataclasses.replace(spec.options, layers_per_program=size)
    return dataclasses.replace(spec, options=options)


def test_alike_sections_are_one_kept_program(tmp_path, monkeypatch):
    """A second process would load the programs of each kind, and compile none."""
    monkeypatch.setattr(key, "_IMPORTED", 2**63)  # also if a file is new
    key.source_stamp.cache_clear()
    keep_programs(KeptPrograms(folder=tmp_path))
    spec = in_programs(make_spec(4, adapted=("q",)), 1)
    limits = Limits(capacity=48, block_tokens=8)
    try:
        for is_loaded in (False, True):
            steps = CompiledSteps(spec)
            found = steps.passes.prepare(steps.shapes(limits)).each
            assert len(found) == 4  # embedding, layers forward and backward, head
            for one in found:
                one.compiled()
            assert all(one.is_loaded == is_loaded for one in found)
            wait_until_kept()
    finally:
        keep_programs(None)
        key.source_stamp.cache_clear()


def mixed_decoder() -> DecoderSpec:
    """Twelve layers with windows, of which some are adapted and some not quantized."""
    windows = (8, None, 8, 8, None, 8) * 2
    config = model_config(tiny.CONFIG | {"num_hidden_layers": 12})
    config = dataclasses.replace(config, layer_windows=windows)
    spec = llama(config, base_format=BaseFormat.named("int8", kept=KEPT))
    adapted = (p for p in spec.adapted if "q_proj" in p or p.startswith("layers.1"))
    return dataclasses.replace(spec, adapted=tuple(adapted))


KEPT = ("layers.3.mlp.up_proj", "layers.10.mlp.down_proj")


@pytest.mark.parametrize("size", [1, 4, 5])
def test_sections_are_the_decoder(size):
    """Each weight, table and row of settings is in one section, as what it is."""
    spec = in_programs(mixed_decoder(), size)
    stacks = {stack.name: stack.paths for stack in spec.stacks}
    weights, tables, rows, numbers = [], [], [], []
    for section in sections(spec):
        own, at = section.spec, section.position
        shapes, kinds = own.base_shapes(), spec.base_shapes()
        assert all(shapes[p] == kinds[path] for p, path in section.paths.items())
        weights += section.paths.values()
        numbers += [number + at.layer for number in own.layer_numbers]

        def moved(path: str, shift=int(at.layer)) -> str:
            _, number, name = path.split(".", 2)
            return f"layers.{int(number) + shift}.{name}"

        for stack, first in zip(
            sorted(own.stacks, key=lambda stack: stack.name), at.tables, strict=True
        ):
            found = stacks[stack.name][first : first + len(stack.paths)]
            assert found == tuple(map(moved, stack.paths))
            tables += found
        assert [spec.adapted[row] for row in at.linears] == list(
            map(moved, own.adapted)
        )
        rows += list(at.linears)
        for number in own.layer_numbers:
            of = own.config.layer_windows[number], number + at.layer
            assert of[0] == spec.config.layer_windows[of[1]]
    assert sorted(weights) == sorted([*spec.base_shapes(), "embed_tokens.embedding"])
    assert sorted(tables) == sorted(path for paths in stacks.values() for path in paths)
    assert sorted(rows) == list(range(len(spec.adapted)))
    assert numbers == list(range(12))


def test_alike_sections_are_equal():
    """Also those of models of another depth."""
    shallow, deep = (
        sections(in_programs(llama(with_layers(LLAMA_8B, n)), 4)) for n in (18, 32)
    )
    assert len({one.spec for one in deep}) == 3
    assert len({one.spec for one in shallow} | {one.spec for one in deep}) == 4
    positions = [int(one.position.tables[0]) for one in deep[1:-1]]
    assert positions == list(range(0, 32, 4))


def test_chosen_layers():
    """As few as can be alike; one program for few layers, or for many kinds."""
    assert chosen_layers(llama(LLAMA_8B)) == chosen_layers(llama(LLAMA_70B)) == 4
    assert chosen_layers(llama(with_layers(LLAMA_8B, 16))) is None
    windows = ((1024,) * 5 + (None,)) * 8
    gemma = dataclasses.replace(with_layers(LLAMA_8B, 48), layer_windows=windows)
    assert chosen_layers(llama(gemma)) == 6
    # Each fourth layer is of another kind.
    heads = {k: tiny.CONFIG[k] for k in ("num_attention_heads", "vocab_size")}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 32}
    hybrid = model_config({"model_type": "qwen3_5_text", **heads, **sizes})
    assert chosen_layers(llama(hybrid)) == 4
    unlike = dataclasses.replace(with_layers(LLAMA_8B, 20), layer_windows=(*range(20),))
    assert chosen_layers(llama(unlike)) is None


def test_a_residual_is_kept_once():
    """Not arguments, constants, nor another shape of the same array."""
    w, x = jnp.linspace(0.5, 1.5, 6), jnp.arange(1.0, 7.0)

    @jax.custom_vjp
    def scaled(x):
        return x * w

    def forward(x):
        y = x * w
        return y, (y, y.reshape(2, 3), x, w, np.float32(3.0))

    def backward(kept, dy):
        y, reshaped, x, w, three = kept
        return (dy * (y + reshaped.reshape(6) * x + w * three),)

    scaled.defvjp(forward, backward)

    @jax.jit
    def both(x, w, dy):
        out, pullback, kept = pull_back(scaled, (x,), (x, w))
        assert len(kept) <= 2  # y, and the array that the function closes over
        return out, kept, pullback.join(kept, (x, w))(dy)

    dy = jnp.linspace(1.0, 2.0, 6)
    out, _, (dx,) = both(x, w, dy)
    np.testing.assert_array_equal(out, x * w)
    np.testing.assert_allclose(dx, dy * (x * w + x * w * x + 3 * w), rtol=1e-6)
