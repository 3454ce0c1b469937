"""Memory traffic is read from Nsight Compute's table, of a program loaded elsewhere."""

import os
import pickle
import stat
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.errors import JaxloraError
from jaxlora.programs.kept import serialize
from jaxlora.programs.program import _beside_xlas_cache
from scripts.bench.fuse import traffic

METRICS = (traffic.READ, traffic.WRITTEN, "gpu__time_duration.sum")
TABLE = "\n".join(
    [
        "==PROF== Connected to process 7",
        ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *METRICS)),
        '"","","byte","byte","ns"',
        '"0","lora_expand, wide","1,234,567","89","2,500"',
        '"1","fusion_3","10","20.0","1500"',
    ]
)


def test_a_table_is_read():
    first, second = traffic.parse(TABLE.splitlines())
    assert (first.name, first.read, first.written) == ("lora_expand, wide", 1234567, 89)
    assert first.seconds == pytest.approx(2.5e-6)
    assert (second.read, second.written) == (10, 20)


def test_a_table_without_kernels_is_refused():
    with pytest.raises(JaxloraError, match="no kernel: ==ERROR== no permission"):
        traffic.parse(["==ERROR== no permission"])


def counted(x, key, ids):
    return [x[ids] * 2 + jax.random.normal(key, (3, 4))]


ARGUMENTS = jnp.ones((5, 4)), jax.random.key(3), jnp.array([4, 0, 2])


def test_another_process_calls_the_program_once_while_kernels_are_counted(
    monkeypatch, tmp_path
):
    with _beside_xlas_cache():  # on a CPU, a program that was loaded is not saved again
        entry = serialize(jax.jit(counted).lower(*ARGUMENTS).compile(), "a program")
    described = [*map(traffic._described, ARGUMENTS)]
    (tmp_path / "program").write_bytes(pickle.dumps((entry, described)))
    seen, load = [], traffic.deserialize

    def deserialized(entry, arguments):
        program = load(entry, arguments)

        def called(*given):
            seen.append(program(*given))
            return seen[-1]

        return called

    monkeypatch.setattr(traffic, "deserialize", deserialized)
    monkeypatch.setattr(traffic, "_start_counting", seen.append)
    monkeypatch.setattr(sys, "argv", ["traffic", str(tmp_path / "program")])
    traffic.main()
    first, begun, second, ended = seen
    assert (begun, ended) == (True, False)
    for result in (first, second):
        np.testing.assert_array_equal(result[0], counted(*ARGUMENTS)[0])


def test_large_arrays_are_not_copied():
    like = jax.ShapeDtypeStruct((300, 300), jnp.bfloat16)
    made = traffic._made(*traffic._described(like))
    assert made.shape == like.shape and made.dtype == like.dtype
    assert not made.any()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"cat > $LOG << END\n{TABLE}\nEND\n", None),
        ("echo ==ERROR== permission > $LOG; exit 1", "failed: ==ERROR== permission"),
        ("exec sleep 20", "did not end within 0.5 s"),
    ],
)
def test_nsight_compute_is_run(monkeypatch, tmp_path, script, message):
    ncu = tmp_path / "ncu"
    # The path of the table follows its option.
    find = 'while [ "$1" != --log-file ]; do shift; done; LOG=$2\n'
    ncu.write_text(f"#!/bin/sh\n{find}{script}")
    ncu.chmod(ncu.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    compiled = jax.jit(counted).lower(*ARGUMENTS).compile()
    if message is None:
        assert len(traffic.count(compiled, ARGUMENTS, 60)) == 2
        return
    with pytest.raises(JaxloraError, match=message):
        traffic.count(compiled, ARGUMENTS, 0.5 if "sleep" in script else 60)


def test_without_nsight_compute_the_error_says_so(monkeypatch):
    monkeypatch.setattr(traffic, "find_ncu", lambda: None)
    compiled = jax.jit(counted).lower(*ARGUMENTS).compile()
    with pytest.raises(JaxloraError, match="install it"):
        traffic.count(compiled, ARGUMENTS, 60)
