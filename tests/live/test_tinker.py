"""The unmodified tinker client, in an environment of its own, works with the server.

Set JAXLORA_TINKER to Python interpreters, divided by `:`, that have the package tinker
and torch. Nothing else needs them, so these tests do not run without.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import tiny
from tests.jaxlora.serve.running import running_server

pytestmark = pytest.mark.live
PYTHONS = [one for one in os.environ.get("JAXLORA_TINKER", "").split(":") if one]
needs_client = pytest.mark.skipif(
    not PYTHONS, reason="set JAXLORA_TINKER to a Python that has tinker and torch"
)
CLIENT = pathlib.Path(__file__).with_name("tinker_client.py")


@needs_client
@pytest.mark.parametrize("python", PYTHONS)
def test_all_public_methods(python, tmp_path):
    model = tiny.write_model(tmp_path / "model")
    with running_server(tmp_path, model, limits={"tokens": 100}) as address:
        environment = {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-local"}
        done = subprocess.run(
            [python, CLIENT, str(model)],
            env=os.environ | environment | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            check=False,
            timeout=900,
        )
    assert done.returncode == 0 and "methods of tinker" in done.stdout
