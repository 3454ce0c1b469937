"""The encodings of operations and outcomes hold all that is in them."""

import dataclasses

import numpy as np
import pytest

from jaxlora.config.session_config import AdamParams
from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Pass,
    Publish,
    Refused,
    Save,
    Step,
    Unload,
    decode,
    decode_outcome,
    encode,
    encode_outcome,
)
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import PassResult, StepResult

PARAMS = AdamParams(learning_rate=1e-3, betas=(0.1, 0.2), grad_clip_norm=0.5)
OPERATIONS = (
    Create(rank=4, lora_alpha=0.1, target_modules=("q_proj", "v_proj"), seed=2**40),
    Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0),
    Create(rank=1, lora_alpha=32.0, target_modules="q_proj", seed=0),
    Load(checkpoint="t/ü/a", with_optimizer=True),
    Step(params=PARAMS),
    Save(checkpoint="t/m/a", kind="state"),
    Publish(sampler="s", checkpoint=None),
    Unload(),
    Refused(message="no such ü"),
)
ARRAYS = [field.name for field in dataclasses.fields(Datum)]


def random_pass(rng) -> Pass:
    """Datums of any lengths, each with some of the arrays."""
    data = []
    for n in rng.integers(1, 40, rng.integers(1, 9)):
        ids = rng.integers(0, 2**31 - 1, (2, n))
        given = {
            name: rng.normal(size=n).astype(np.float32)
            for name in ("weights", "logprobs", "advantages")
            if rng.random() < 0.5
        }
        data.append(Datum(tokens=ids[0], target_tokens=ids[1], **given))
    chosen = ChosenLoss.of("ppo", {"clip_low_threshold": float(rng.random())})
    return Pass(data=tuple(data), loss=chosen, is_training=bool(rng.random() < 0.5))


def assert_same_data(found: tuple[Datum, ...], wanted: tuple[Datum, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for name in ARRAYS:
            array, own = getattr(one, name), getattr(other, name)
            assert (array is None) == (own is None)
            if own is not None:
                assert array.dtype == own.dtype
                np.testing.assert_array_equal(array, own)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: type(one).__name__)
def test_operations(operation):
    encoded = encode(operation)
    assert decode(encoded) == operation and encoded.data is None
    others = [encode(one).digest for one in OPERATIONS if one is not operation]
    assert encoded.digest not in others


@pytest.mark.parametrize("seed", range(20))
def test_passes(seed):
    given = random_pass(np.random.default_rng(seed))
    encoded = encode(given)
    found = decode(encoded)
    assert isinstance(found, Pass)
    assert (found.loss, found.is_training) == (given.loss, given.is_training)
    assert_same_data(found.data, given.data)
    assert encode(found).digest == encoded.digest
    tokens = sum(len(one.tokens) for one in given.data)
    assert len(encoded.data) <= 20 * tokens + 20 * len(given.data) + 900
    cut = decode(dataclasses.replace(encoded, data=None))
    assert cut.data == () and cut.loss == given.loss


def test_a_pass_without_datums():
    """The engine refuses it, and it is kept until then."""
    given = Pass(data=(), loss=ChosenLoss.of("ppo", None), is_training=True)
    assert decode(encode(given)).data == ()


def test_passes_that_differ_have_other_digests():
    one = Datum(tokens=[1, 2], target_tokens=[2, 3])
    data = [
        [one],
        [one, one],
        [one.with_weights([1.0, 1.0])],
        [one.with_weights([1.0, 0.0])],
        [Datum(tokens=[1], target_tokens=[2]), Datum(tokens=[2], target_tokens=[3])],
        [Datum(tokens=[1, 2], target_tokens=[2, 3], advantages=[1.0, 1.0])],
    ]
    losses = [ChosenLoss.of("dro", {"beta": beta}) for beta in (0.1, 0.2)]
    digests = {
        encode(Pass(data=tuple(own), loss=loss, is_training=is_training)).digest
        for own in data
        for loss in losses
        for is_training in (False, True)
    }
    assert len(digests) == len(data) * 4


@pytest.mark.parametrize("seed", range(5))
def test_results_of_passes(seed):
    rng = np.random.default_rng(seed)
    logprobs = tuple(
        rng.normal(size=n).astype(np.float32) for n in rng.integers(1, 9, 5)
    )
    metrics = {"loss:sum": float(rng.normal()), "tokens:sum": 7.0, "x:max": np.inf}
    given = PassResult(logprobs=logprobs, metrics=metrics)
    found = decode_outcome(encode_outcome(Done(result=given))).result
    assert found.metrics == metrics
    for one, other in zip(found.logprobs, logprobs, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def test_other_outcomes():
    """Also of a step that was skipped, whose norm is no number."""
    for given in (
        Done(),
        Failed(message="no such ü", category="user"),
        Done(result=StepResult(step=3, grad_norm=0.1 + 0.2, is_finite=True)),
    ):
        assert decode_outcome(encode_outcome(given)) == given
    skipped = Done(result=StepResult(step=3, grad_norm=float("nan"), is_finite=False))
    assert np.isnan(decode_outcome(encode_outcome(skipped)).result.grad_norm)
