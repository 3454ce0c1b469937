"""Memory of a training step by a formula, for tests of what is chosen by it.

The product traces layers of each decoder that it considers, which takes seconds; the
tests of `jaxlora.plan.memory` hold these estimates.
"""

import contextlib
from collections.abc import Iterator

import pytest

from jaxlora.models.spec import DecoderSpec
from jaxlora.plan import stages as mesh_stages
from jaxlora.plan.memory.estimate import StepBytes
from jaxlora.plan.replicas import kinds


def part_bytes(spec: DecoderSpec, tensor: int, *_) -> StepBytes:
    """Returns bytes per token that are near those of a Llama's traces."""
    size = spec.options.dtype.itemsize / tensor
    hidden, mlp = spec.config.hidden_size * size, spec.config.intermediate_size * size
    whole = 6 * hidden + 3 * mlp
    kept = {"none": whole, "elementwise": whole - mlp, "mlp": 6 * hidden}
    kept_by_layer = kept.get(spec.options.remat, hidden)
    return StepBytes(
        kept_by_layer=kept_by_layer,
        kept_at_ends=2 * hidden,
        recomputed=whole - kept_by_layer,
        transient=20 * hidden,
        alone=25 * hidden,
    )


@contextlib.contextmanager
def estimated_by_formula() -> Iterator[None]:
    """Estimates memory by the formula, where meshes and replicas are chosen."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (mesh_stages, kinds):
            patch.setattr(module, "part_bytes", part_bytes)
        yield
