"""A training step with the Triton kernels compiles for GPUs older than Hopper."""

import pytest

from tests.deviceless import compile_deviceless
from tests.jaxlora.models.triton_program import DEVICES, LAYERS

# Forward: s of the four groups that share an input, y of all seven. Backward: ds and dB
# of all, dx and dA of the groups. Attention: the output, dq, and dk with dv.
KERNELS_OF_A_LAYER = 4 + 7 + 7 + 4 + 4 + 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_step_compiles(device, tmp_path):
    out = tmp_path / "program.txt"
    compile_deviceless("tests.jaxlora.models.triton_program", device, out)
    num_kernels = out.read_text().count('custom_call_target="triton_kernel_call"')
    # Nothing needs dx of the first layer's q, k and v.
    assert num_kernels == LAYERS * KERNELS_OF_A_LAYER - 1
