"""What H200s that share each microbatch exchange, in the program that they run."""

import math
from collections import Counter

import pytest

from jaxlora.train.plan.auto_mesh.predict import exchanged_bytes
from tests.deviceless import compile_deviceless
from tests.jaxlora.models.h200_program import TOKENS, decoder_spec
from tests.scheduled_hlo import entry_ops, exchanges_of

LAYERS = 1


@pytest.mark.grid
@pytest.mark.parametrize("tensor", [4, 8])
def test_exchanges_are_those_of_the_formula(tmp_path, tensor):
    """Two gathers and two scatters in each layer and pass, and nothing for adapters."""
    out = tmp_path / "program.txt"
    program = "tests.jaxlora.models.h200_tensor_program"
    compile_deviceless(program, str(LAYERS), str(tensor), "1", out)
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


@pytest.mark.grid
def test_two_microbatches_hide_each_others_exchanges(tmp_path):
    """All but those at the ends of the layers run beside kernels of the other one."""
    out, layers = tmp_path / "program.txt", 2
    program = "tests.jaxlora.models.h200_tensor_program"
    compile_deviceless(program, str(layers), "2", "2", out)
    text = out.read_text()
    assert "S(1)" in text, "the copies are between symmetric buffers"
    exchanges = exchanges_of(entry_ops(text), features=4096)
    kinds = Counter(one.kind for one in exchanges)
    # Those of one microbatch, twice.
    assert kinds == {"all-gather": 2 * (4 * layers + 1), "all-to-all": 18}
    hidden = [one for one in exchanges if one.num_kernels]
    # The embedding and the loss have them, and the first and the last layer beside
    # these, so the bare ones are no more in a deeper model.
    assert len(exchanges) - len(hidden) <= 8
