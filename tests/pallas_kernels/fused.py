"""Fused back ends under test: interpreted on a CPU, or compiled where they can run."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxlora.pallas_kernels import multi_lora_linear
from jaxlora.pallas_kernels.mosaic import hopper as mosaic
from jaxlora.pallas_kernels.triton import target as triton
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels import interpreter, triton_interpreter
from tests.pallas_kernels.problems import both_ways, compiled_both_ways, problem
from tests.pallas_kernels.reference import multi_lora_linear_reference

ON_HOPPER = mosaic.unsupported_device() is None
ON_GPU = triton.unsupported_device() is None


@contextlib.contextmanager
def mosaic_kernels() -> Iterator[None]:
    """Runs Mosaic kernels; the interpreter's race detector must find nothing."""
    if ON_HOPPER:
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels = interpreter.adjust(monkeypatch)
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    assert not any(races.races_found for races in kernels)
    gpu_callbacks.reset_gpu_interpret_mode_state()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused:
    """A back end under test.

    Attributes:
        implementation: Its name.
        dtype: The dtype of x in which it can be tested here.
        kernels: Is a context in which its kernels run.
        compiled: Whether they are compiled for a GPU.
        takes_remat: Whether they run inside `jax.checkpoint`.
    """

    implementation: str
    dtype: DTypeLike
    kernels: Callable[[], Any]
    compiled: bool
    takes_remat: bool = True

    def problem(self, *args, **options):
        """Makes arguments of the op, and the ranks; see `problems.problem`."""
        return problem(*args, **{"dtype": self.dtype} | options)

    def run(self, p, rank, **options):
        """Returns (y, gradients of x, a and b), from one program.

        Tests whose problems have the same shapes share it.
        """
        return linear_both_ways(p, rank, implementation=self.implementation, **options)

    def op(self, **arguments):
        """Runs the op."""
        return multi_lora_linear(**arguments, implementation=self.implementation)

    def check(self, p, rank, **options):
        """Compares with the float32 definition by the rule of tests/oracle.py.

        Returns the results of `run`.
        """
        exact = compiled_both_ways(multi_lora_linear_reference, p)
        low = p | {name: p[name].astype(p["x"].dtype) for name in "xwab"}
        plain = compiled_both_ways(multi_lora_linear, low | {"a": p["a"]})
        results = self.run(p, rank, **options)
        for got, base, want in zip(results, plain, exact, strict=True):
            assert_as_accurate_as(
                actual=got, baseline=jnp.asarray(base).astype(got.dtype), exact=want
            )
        return results


@functools.partial(jax.jit, static_argnames=("implementation", "w_transposed"))
def linear_both_ways(p, rank, **options):
    """Returns (y, gradients of x, a and b) of a back end's linear."""
    return both_ways(lambda **q: multi_lora_linear(**q, rank=rank, **options), p)


def _triton_as(capability: int) -> Fused:
    return Fused(
        implementation="triton",
        dtype=jnp.bfloat16,
        kernels=lambda: triton.forced_capability(capability),
        compiled=True,
    )


MOSAIC = Fused(
    implementation="mosaic",
    dtype=jnp.bfloat16,
    kernels=mosaic_kernels,
    compiled=ON_HOPPER,
    takes_remat=ON_HOPPER,
)
INTERPRETED_TRITON = Fused(
    implementation="triton",
    dtype=jnp.float16,  # the interpreter computes bfloat16 wrongly
    kernels=lambda: triton.interpreted(triton_interpreter.run),
    compiled=False,
)


def triton_back_ends() -> dict[str, Fused]:
    """Returns the Triton back end, by name; on a GPU, also as code of 8.0."""
    if not ON_GPU:
        return {"triton": INTERPRETED_TRITON}
    present = triton.present_target().capability
    return {f"triton sm_{c}": _triton_as(c) for c in sorted({80, present})}


def back_ends() -> dict[str, Fused]:
    """Returns the fused back ends, by name."""
    return {"mosaic": MOSAIC} | triton_back_ends()
