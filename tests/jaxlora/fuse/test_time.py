"""Tracing and rewriting a deep decoder takes seconds.

Processor time is measured, since other processes may run at the same time.
"""

import time

import jax
import pytest

import jaxlora
from jaxlora.fuse import place
from tests.jaxlora.fuse.forms import decoder


def shapes(num_layers):
    return jax.eval_shape(lambda: (decoder.make_x(), *decoder.make_weights(num_layers)))


def seconds_to_rewrite(function, num_layers):
    args = shapes(num_layers)
    jax.eval_shape(function, *args)  # so that JAX's own first-time work is left out
    start = time.process_time()
    jax.eval_shape(jaxlora.fuse(function, strict=True, implementation="xla"), *args)
    return time.process_time() - start


@pytest.mark.grid
@pytest.mark.parametrize(
    ("function", "num_layers", "seconds"),
    [(decoder.scanned, 80, 2), (decoder.unrolled, 80, 10)],
)
def test_time_of_a_decoder(function, num_layers, seconds):
    """The pass takes 4 s for an unrolled decoder, in proportion to its layers."""
    assert seconds_to_rewrite(function, num_layers) <= seconds


def test_kernel_calls_of_equal_layers_are_traced_once(monkeypatch):
    original, calls = place.part_call, []

    def counted(site):
        calls.append(site)
        return original(site)

    monkeypatch.setattr(place, "part_call", counted)
    counts = []
    for num_layers in (1, 4):
        fused = jaxlora.fuse(decoder.unrolled, implementation="xla")
        jax.eval_shape(fused, *shapes(num_layers))
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] > 0


if __name__ == "__main__":  # python -m tests.jaxlora.fuse.test_time
    for function in (decoder.scanned, decoder.unrolled):
        seconds = seconds_to_rewrite(function, 80)
        print(f"{function.__name__}, 80 layers: {seconds:.1f} s")
