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
    """The id of a model, and routes."""
    model = shared.model()
    paths = shared.client.app.openapi()["paths"]
    routes = [
        (method.upper(), path)
        for path, methods in paths.items()
        if path.startswith("/api/v1")
        for method in methods
    ]
    assert len(routes) > 35
    return model, routes


TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
IDS = st.sampled_from(["MODEL", "SESSION", "tinker://MODEL/weights/one"])


VALUES = IDS | JUNK | st.integers(-1, 3) | st.fixed_dictionaries({"rank": JUNK})
PARTS = st.tuples(*[IDS | st.sampled_from(["weights", "one", "0"]) | TEXT] * 3)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6).map(json.dumps)


@hypothesis.settings(deadline=None, max_examples=250)
@hypothesis.given(
    number=st.integers(0, 10**6),
    parts=PARTS,
    body=BODIES.map(str.encode) | st.binary(max_size=20) | st.just(b""),
    kind=TYPES,
)
def test_no_request_fails_the_server(shared, known, number, parts, body, kind):
    model, routes = known

    def named(text: str) -> str:
        text = text.replace("MODEL", model)
        return text.replace("SESSION", model.partition(":")[0])

    method, path = routes[number % len(routes)]
    for part in parts:
        before, _, rest = path.partition("{")
        if rest:
            path = before + urllib.parse.quote(named(part)) + rest.partition("}")[2]
    content = body
    for text in ("MODEL", "SESSION"):
        content = content.replace(text.encode(), named(text).encode())
    response = shared.client.request(
        *(method, path),
        content=content,
        headers=shared.key | {"Content-Type": kind},
        follow_redirects=False,
    )
    assert response.status_code < 500, (method, path, content, response.text)
