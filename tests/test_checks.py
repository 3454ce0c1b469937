"""Wrong types and shapes in calls of the package are errors while tests run."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Array, Float

from jaxlora.adapters.optimizer import measure
from jaxlora.plan.mesh.candidates import Candidate
from jaxlora.scheduler import Limits
from tests.checks import CALLS_PER_TEST, begin_test, checked


@checked
def product(x: Float[Array, "T K"], w: Float[Array, "K N"]) -> Float[Array, "T N"]:
    return x @ w


def test_sizes_with_a_name_are_equal_in_a_call():
    product(jnp.ones((2, 3)), jnp.ones((3, 4)))
    product(jnp.ones((5, 6)), jnp.ones((6, 7)))  # another call, other sizes
    with pytest.raises(BeartypeCallHintViolation):
        product(jnp.ones((2, 3)), jnp.ones((4, 3)))
    with pytest.raises(BeartypeCallHintViolation):
        jax.jit(product)(jnp.ones((2, 3)), jnp.ones(3))


def test_results_are_checked():
    wrong = checked(lambda x: x)
    assert wrong(1) == 1

    @checked
    def transposed(x: Float[Array, "T K"]) -> Float[Array, "T K"]:
        return x.T

    with pytest.raises(BeartypeCallHintViolation):
        transposed(jnp.ones((2, 3)))


def test_functions_within_a_function_have_sizes_of_their_own():
    @checked
    def outer(x: Float[Array, " T"]) -> Float[Array, " T"]:
        assert product(jnp.ones((2, 3)), jnp.ones((3, 4))).shape == (2, 4)
        return x

    outer(jnp.ones(9))


def test_a_function_within_a_function_is_checked_in_each_call_of_the_outer_one():
    def outer(added: float):
        @checked
        def inner(x: Float[Array, " T"], *, scale: float = 2.0) -> Float[Array, " T"]:
            return x * scale + added if added < 3 else jnp.ones(7)

        return inner

    for added in (1, 2):
        inner = outer(added)
        assert inner(jnp.ones(2)).tolist() == [2 + added] * 2
        assert inner(jnp.ones(4), scale=3.0).tolist() == [3 + added] * 4
        with pytest.raises(BeartypeCallHintViolation):
            inner(jnp.ones((2, 2)))
        with pytest.raises(BeartypeCallHintViolation):
            inner(jnp.ones(2), scale="a")
    with pytest.raises(BeartypeCallHintViolation):
        outer(3)(jnp.ones(2))


def test_the_first_calls_of_each_test_are_checked():
    @checked
    def count(number: int) -> int:
        return number

    for _ in range(2):
        with pytest.raises(BeartypeCallHintViolation):
            count("a")
        for _ in range(CALLS_PER_TEST - 1):
            count(1)
        assert count("a") == "a"  # the calls after them run unchecked
        begin_test()


def test_generators_have_sizes_of_their_own():
    @checked
    def pairs(x: Float[Array, " T"], y: Float[Array, " T"]) -> Iterator[int]:
        yield from range(len(x) + len(y))

    @checked
    def outer(x: Float[Array, " T"]) -> list[int]:
        return list(pairs(jnp.ones(2), jnp.ones(2)))

    assert outer(jnp.ones(9)) == [0, 1, 2, 3]
    assert list(pairs(jnp.ones(0), jnp.ones(0))) == []
    with pytest.raises(BeartypeCallHintViolation):
        list(pairs(jnp.ones(2), jnp.ones(3)))


def test_context_managers_see_errors():
    @contextlib.contextmanager
    @checked
    def explained(what: str) -> Iterator[None]:
        try:
            yield
        except LookupError:
            raise ValueError(what) from None

    with pytest.raises(ValueError, match="why"), explained("why"):
        raise LookupError


def test_dataclasses_are_checked():
    @checked
    @dataclasses.dataclass(frozen=True)
    class Pair:
        x: Float[Array, " T"]
        y: Float[Array, " T"]

    Pair(jnp.ones(2), jnp.ones(2))
    with pytest.raises(BeartypeCallHintViolation):
        Pair(jnp.ones(2), jnp.ones(3))


def test_a_name_that_only_the_type_checker_imports_is_any():
    @checked
    def run(x: "list[NoSuchClass]", y: int) -> None:  # noqa: F821
        pass

    run("anything", 1)
    with pytest.raises(BeartypeCallHintViolation):
        run("anything", "1")


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintViolation):
        measure("no gradients")
    with pytest.raises(BeartypeCallHintViolation):
        Candidate(plan=[], search=1, limit=None, most=2)
    Limits(capacity=16.0, block_tokens=16)  # the scheduler is not
