"""Files with the whole state of an adapter."""

import numpy as np
import safetensors.numpy

from jaxlora.session.residence import WholeState, _fresh
from jaxlora.session.state_file import read_state, write_state
from tests.jaxlora.session.conftest import LINEARS


def test_a_state_is_written_without_bytes_of_all_of_it(
    tmp_path, make_adapter, monkeypatch
):
    """While safetensors makes them, no other thread of a server can run."""
    monkeypatch.delattr(safetensors.numpy, "save")
    adapter = make_adapter(LINEARS, rank=4, seed=0)
    state = WholeState(parked=_fresh(adapter))
    write_state(tmp_path / "state", adapter, state, 7, "base")
    found = read_state(tmp_path / "state", "base")
    assert found.num_steps == 7
    for kind, own in state.parked.by_kind().items():
        for path, array in own.items():
            np.testing.assert_array_equal(
                found.state.parked.by_kind()[kind][path], array
            )
