"""What H200s that share each microbatch exchange, in the program that they run."""

import math

import pytest

from jaxlora.plan.mesh.predict import exchanged_bytes
from tests.deviceless import compile_deviceless
from tests.jaxlora.models.h200_program import TOKENS, decoder_spec
from tests.scheduled_hlo import entry_ops

LAYERS = 1


@pytest.mark.grid
@pytest.mark.parametrize("tensor", [4, 8])
def test_exchanges_are_those_of_the_formula(tmp_path, tensor):
    """Two gathers and two scatters in each layer and pass, and nothing for adapters."""
    out = tmp_path / "program.txt"
    program = "tests.jaxlora.models.h200_tensor_program"
    compile_deviceless(program, str(LAYERS), str(tensor), out)
    whole = TOKENS, 4096
    own = TOKENS // tensor, 4096
    gathers, scatters, moved = 0, 0, 0.0
    for op in entry_ops(out.read_text()):
        kind = op.kind.removesuffix("-start")
        if kind == "all-gather":
            gathers += 1
            assert op.shapes[-1] == ("bf16", whole)
        elif kind == "reduce-scatter":
            scatters += 1
            assert op.shapes[-1] == ("bf16", own)
        elif kind == "all-reduce":  # of the loss: numbers of target rows
            assert all(math.prod(shape) <= 2 * TOKENS for _, shape in op.shapes)
            continue
        else:
            assert kind not in ("all-to-all", "collective-permute")
            continue
        moved += 2 * math.prod(whole) * (tensor - 1) / tensor
    # The embedding scatters, and the loss gathers. No gradient of the first layer's
    # input is needed.
    assert (gathers, scatters) == (4 * LAYERS + 1, 4 * LAYERS + 1)
    spec = decoder_spec(LAYERS, fsdp=1)
    one = 2 * math.prod(whole) * (tensor - 1) / tensor
    assert moved + one == pytest.approx(TOKENS * sum(exchanged_bytes(spec, tensor)))
