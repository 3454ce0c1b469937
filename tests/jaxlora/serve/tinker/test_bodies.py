"""Bodies of passes, in protobuf and in JSON."""

import copy
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from fastapi import HTTPException

from jaxlora import Datum
from jaxlora.errors import ConfigError, DataError
from jaxlora.serve.operation import encode
from jaxlora.serve.tinker import messages
from jaxlora.serve.tinker.bodies import pass_of_json, pass_of_protobuf
from tests.jaxlora.serve.tinker.conftest import pass_request
from tests.jaxlora.session.test_losses import datums

DATA = datums(np.random.default_rng(0))
ONES = np.ones(4, np.float32).tobytes()


def json_request(data=DATA, loss="ppo", config=None, seq_id=1) -> dict:
    """The body of a pass of a client before 0.25."""
    every = []
    for datum in data:
        fields = {}
        for name in ("target_tokens", "weights", "logprobs", "advantages"):
            values = getattr(datum, name)
            dtype = "int64" if name == "target_tokens" else "float32"
            fields[name] = {"data": values.tolist(), "dtype": dtype}
            fields[name]["shape"] = [len(values)]
        chunks = [{"type": "encoded_text", "tokens": datum.tokens.tolist()}]
        every.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": fields})
    given = {"data": every, "loss_fn": loss, "loss_fn_config": config}
    return {"forward_backward_input": given, "model_id": "m", "seq_id": seq_id}


def read_json(body: dict):
    name = "forward_backward_input"
    return pass_of_json(json.dumps(body).encode(), name).operation()


def read(request):
    return pass_of_protobuf(request.SerializeToString()).operation()


def test_protobuf_and_json_are_the_same_pass():
    config = {"clip_low_threshold": 0.5}
    first = read(pass_request("m", 1, DATA, "ppo", config))
    second = read_json(json_request(config=config))
    assert encode(first).digest == encode(second).digest
    assert first.loss.settings["clip_low_threshold"] == 0.5
    for got, datum in zip(first.data, DATA, strict=True):
        np.testing.assert_array_equal(got.tokens, datum.tokens)
        np.testing.assert_array_equal(got.advantages, datum.advantages)


def test_sparse_fields():
    request = pass_request("m", 1, DATA[:1])
    tensor = request.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.values = np.float32([2, -1]).tobytes()
    tensor.sparse_csr.crow_indices = np.int64([0, 2]).tobytes()
    tensor.sparse_csr.col_indices = np.int64([1, 4]).tobytes()
    tensor.shape[:] = [1, 7]
    assert read(request).data[0].weights.tolist() == [0, 2, 0, 0, -1, 0, 0]
    body = json_request(DATA[:1], "cross_entropy")
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"] = {
        "data": [2.0, -1.0],
        "dtype": "float32",
        "shape": [1, 7],
        "sparse_crow_indices": [0, 2],
        "sparse_col_indices": [1, 4],
    }
    assert read_json(body).data[0].weights.tolist() == [0, 2, 0, 0, -1, 0, 0]
    for columns in ([1, 7], [-1, 2], [1]):
        tensor.sparse_csr.col_indices = np.int64(columns).tobytes()
        with pytest.raises(DataError, match="no valid CSR tensor"):
            read(request)


def test_halves_of_float32():
    request = pass_request("m", 1, DATA[:1])
    tensor = request.data[0].loss_fn_inputs["weights"]
    exact = np.float32([1, -2, 0.5, 0, 1.5, 3, 4])
    tensor.dense = (exact.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    tensor.dtype = messages.BFLOAT16
    np.testing.assert_array_equal(read(request).data[0].weights, exact)


def broken(change):
    """A pass that a change has spoilt."""
    request = pass_request("m", 1, DATA, "ppo")
    change(request, request.data[1], request.data[1].loss_fn_inputs)
    return request


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("loss='gspo' must be one of", lambda r, d, f: setattr(r, "loss_fn", "gspo")),
        ("must be a finite number", lambda r, d, f: _text(r)),
        ("datum 1: .* float32 or int64", lambda r, d, f: _set(f, "weights", dtype=9)),
        ("no whole numbers", lambda r, d, f: _set(f, "weights", dense=b"123")),
        ("weights has 1 numbers", lambda r, d, f: _set(f, "weights", dense=b"1234")),
        ("finite numbers", lambda r, d, f: _nan(f)),
        (r"shape \[2, 2\]", lambda r, d, f: _shape(f, [2, 2])),
        (r"shape \[4, 1\]", lambda r, d, f: _shape(f, [4, 1])),
        (r"shape \[5\]", lambda r, d, f: _shape(f, [5])),
        ("has no target_tokens", lambda r, d, f: f.pop("target_tokens")),
        ("no logprobs, which the loss ppo reads", lambda r, d, f: f.pop("logprobs")),
        ("'margin', which no loss", lambda r, d, f: _set(f, "margin", dense=b"")),
        ("reads text only", lambda r, d, f: _image(d)),
        ("tokens is empty", lambda r, d, f: d.ClearField("model_input")),
        ("there are no datums", lambda r, d, f: r.ClearField("data")),
        (
            "target_tokens is array",
            lambda r, d, f: _set(f, "target_tokens", dense=ONES),
        ),
    ],
)
def test_what_is_refused(message, change):
    with pytest.raises((DataError, ConfigError), match=message):
        read(broken(change))


def _text(request):
    request.loss_fn_config_v2["clip_low_threshold"].text = "low"


def _set(fields, name, **values):
    for key, value in values.items():
        setattr(fields[name], key, value)
    if "dense" in values:
        fields[name].ClearField("shape")
        fields[name].dtype = messages.FLOAT32


def _nan(fields):
    fields["weights"].dense = np.full(4, np.nan, np.float32).tobytes()


def _shape(fields, shape):
    fields["weights"].shape[:] = shape


def _image(datum):
    datum.model_input.add().image.data = b"PNG"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def spoilt(draw, body):
    """A JSON body in which something is replaced."""
    body = copy.deepcopy(body)
    here, depth = body, draw(st.integers(1, 7))
    for _ in range(depth):
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if not isinstance(here[key], dict | list) or draw(st.booleans()):
            here[key] = draw(JUNK)
            break
        here = here[key]
    return body


@hypothesis.settings(deadline=None, max_examples=80)
@hypothesis.given(body=spoilt(json_request()))
def test_json_is_read_or_refused(body):
    try:
        read_json(body)
    except (HTTPException, DataError, ConfigError) as error:
        assert getattr(error, "status_code", 400) < 500


WHOLE = pass_request("m", 1, DATA, "ppo", {"clip_low_threshold": 0.5})


@hypothesis.settings(deadline=None, max_examples=80)
@hypothesis.given(
    places=st.lists(st.integers(0, 10**6), max_size=4), value=st.integers(0, 255)
)
def test_protobuf_is_read_or_refused(places, value):
    """Bytes of a body are replaced, or it is cut off."""
    body = bytearray(WHOLE.SerializeToString())
    for place in places:
        body[place % len(body)] = value
    if places and not value:
        del body[places[0] % len(body) :]
    try:
        pass_of_protobuf(bytes(body)).operation()
    except (HTTPException, DataError, ConfigError) as error:
        assert getattr(error, "status_code", 400) < 500


def test_a_datum_of_lists():
    """The smallest body."""
    datum = Datum(tokens=[1], target_tokens=[2])
    (got,) = read(pass_request("m", 1, [datum])).data
    assert (got.tokens.tolist(), got.target_tokens.tolist()) == ([1], [2])
