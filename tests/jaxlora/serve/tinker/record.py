"""Records what a tinker client sends, for the tests of recorded requests.

    python -m tests.jaxlora.serve.tinker.record PYTHON VERSION

PYTHON has the client and torch. The requests are written into this folder.
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import uvicorn

from jaxlora.hf.load import load_model
from tests import tiny
from tests.jaxlora.serve.running import free_port
from tests.jaxlora.serve.tinker.conftest import make

CLIENT = """
import sys
import numpy as np, tinker
from tinker import types
from tests_data import NAME

def got(given):
    return given.result() if hasattr(given, "result") else given

def datum(size, **fields):
    ones = np.ones(size, np.float32)
    inputs = {"target_tokens": np.arange(5, 5 + size), "weights": ones}
    inputs |= {name: np.full(size, v, np.float32) for name, v in fields.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(4, 4 + size))),
        loss_fn_inputs={k: types.TensorData.from_numpy(v) for k, v in inputs.items()},
    )

service = tinker.ServiceClient(user_metadata={"a": "b"})
model = got(service.create_lora_training_client(NAME, rank=4, seed=1))
got(model.forward([datum(3)], "cross_entropy"))
first = datum(4, logprobs=-1.0, advantages=0.5)
data = [first, datum(2, logprobs=-2.0, advantages=-1.0)]
got(model.forward_backward(data, "ppo", {"clip_low_threshold": 0.7}))
got(model.optim_step(types.AdamParams(learning_rate=1e-3)))
path = got(model.save_state("one", ttl_seconds=3600)).path
got(model.load_state(path))
saved = got(model.save_weights_for_sampler("one")).path
sampler = got(model.save_weights_and_get_sampling_client())
prompt = types.ModelInput.from_ints([5, 6, 7])
params = types.SamplingParams(max_tokens=2, seed=1, stop=[2])
scored = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
got(sampler.sample(prompt, 2, params, **scored))
got(service.create_sampling_client(model_path=saved))
got(service.create_training_client_from_state(path))
"""
# The client asks for results by ids that are never the same, and tells of itself.
_SKIPPED = ("retrieve_future", "telemetry", "create_session", "heartbeat", "config")


class Recorder:
    """An app that notes the requests to another."""

    def __init__(self, app):
        self.app, self.requests = app, []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts = []

        async def heard():
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        if scope["path"].endswith("client/config"):
            # Older clients then send passes as JSON, and newer ones do not know how.
            body = b'{"proto_compress_fwdbwd": true}'
            headers = [(b"content-type", b"application/json")]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        await self.app(scope, heard, send)
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        kept = {
            k: headers[k] for k in ("content-type", "content-encoding") if k in headers
        }
        if scope["method"] == "POST" and not scope["path"].endswith(_SKIPPED):
            request = {"path": scope["path"].removeprefix("/api/v1/"), "headers": kept}
            self.requests.append(
                request | {"body": base64.b64encode(b"".join(parts)).decode()}
            )


def main(python: str, version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home, port = pathlib.Path(folder), free_port()
        server, app = make(home / "serve", load_model(tiny.write_model(home / "model")))
        recorder = Recorder(app)
        config = uvicorn.Config(recorder, port=port, log_level="warning")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run)
        thread.start()
        while not running.started:
            time.sleep(0.1)
        (home / "tests_data.py").write_text(f"NAME = {server.config.served_name!r}")
        environment = {
            "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
            "TINKER_API_KEY": server.keys.add("alice"),
            "PYTHONPATH": folder,
        }
        subprocess.run([python, "-c", CLIENT], env=environment, check=True)
        running.should_exit = True
        thread.join()
    lines = "".join(json.dumps(request) + "\n" for request in recorder.requests)
    pathlib.Path(__file__).with_name(f"recorded_{version}.jsonl").write_text(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
