"""No request makes the server fail, whatever its body and path are."""

import json
import urllib.parse

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.serve.tinker import bodies, sessions
from tests.jaxlora.serve.tinker.conftest import PROTOBUF
from tests.jaxlora.serve.tinker.test_bodies import JUNK

KINDS = [
    one
    for module in (bodies, sessions)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, bodies.Body)
]
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields})
TYPES = st.sampled_from(["application/json", PROTOBUF, "", "text/plain"])


@pytest.fixture(scope="module")
def known(shared):
    """Ids of what is there, and routes."""
    model = shared.model()
    paths = shared.client.app.openapi()["paths"]
    routes = [
        (method.upper(), path)
        for path, methods in paths.items()
        if path.startswith("/api/v1")
        for method in methods
    ]
    assert len(routes) > 35
    return [model, model.partition(":")[0], f"tinker://{model}/weights/one"], routes


@hypothesis.settings(deadline=None, max_examples=250)
@hypothesis.given(data=st.data())
def test_no_request_fails_the_server(shared, known, data):
    ids, routes = known
    method, path = data.draw(st.sampled_from(routes))
    texts = st.sampled_from([*ids, "weights", "one", "0"]) | st.text(
        st.characters(codec="utf-8"), max_size=5
    )
    while "{" in path:
        before, _, rest = path.partition("{")
        part = urllib.parse.quote(data.draw(texts))
        path = before + part + rest.partition("}")[2]
    value = JUNK | texts | st.integers(-1, 3) | st.fixed_dictionaries({"rank": JUNK})
    body = data.draw(st.dictionaries(st.sampled_from(FIELDS), value, max_size=6))
    content = data.draw(
        st.just(json.dumps(body).encode()) | st.binary(max_size=20) | st.just(b"")
    )
    response = shared.client.request(
        *(method, path),
        content=content,
        headers=shared.key | {"Content-Type": data.draw(TYPES)},
        follow_redirects=False,
    )
    assert response.status_code < 500, (method, path, content, response.text)
