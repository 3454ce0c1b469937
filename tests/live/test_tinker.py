"""The unmodified tinker client, in an environment of its own, works with the server.

Set JAXLORA_TINKER to Python interpreters, divided by `:`, that have tinker and torch.
One with tinker-cookbook runs its recipes, too. Nothing else needs them, so these tests
do not run without.
"""

import json
import os
import pathlib
import signal
import subprocess

import pytest

from jaxlora.serve.tinker import messages
from tests import tiny
from tests.jaxlora.serve.running import free_port, running_server, start_server
from tests.jaxlora.session.conftest import SETTINGS

pytestmark = pytest.mark.live
PYTHONS = [one for one in os.environ.get("JAXLORA_TINKER", "").split(":") if one]
needs_client = pytest.mark.skipif(
    not PYTHONS, reason="set JAXLORA_TINKER to a Python that has tinker and torch"
)
HERE = pathlib.Path(__file__).parent
COOKBOOK_MODEL = "Qwen/Qwen3-8B-Base"
LONG = tiny.CONFIG | {"max_position_embeddings": 2048}


def run(python: str, *arguments: object, **environment: str) -> str:
    """Runs Python without this package and without the network; returns its output."""
    own = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [python, *map(str, arguments)],
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def client(address: str) -> dict[str, str]:
    return {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-local"}


@needs_client
@pytest.mark.parametrize("python", PYTHONS)
def test_all_public_methods(python, tmp_path):
    """With so few tokens a request, the newest client divides its passes."""
    model = tiny.write_model(tmp_path / "model")
    with running_server(tmp_path, model, limits={"tokens": 100}) as address:
        said = run(python, HERE / "tinker_client.py", model, **client(address))
    assert "methods of tinker" in said


@needs_client
def test_a_client_does_not_notice_that_the_server_is_killed(tmp_path):
    """Its losses are the same to the bit."""
    model, found = tiny.write_model(tmp_path / "model"), []
    for kills in ([], [3, 7]):
        folder, port = tmp_path / f"{len(kills)}", free_port()
        folder.mkdir()
        server = start_server(folder, model, port)
        environment = {"PYTHONPATH": ""} | client(f"http://127.0.0.1:{port}")
        with subprocess.Popen(
            [PYTHONS[0], HERE / "tinker_loop.py", model, "12"],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as training:
            losses = []
            for line in training.stdout:
                losses.append(line)
                if len(losses) in kills:
                    server.kill()
                    server.wait()
                    server = start_server(folder, model, port)
        server.terminate()
        server.wait()
        assert training.returncode == 0 and len(losses) == 12
        found.append(losses)
    assert found[0] == found[1]


@needs_client
def test_an_engine_of_two_is_killed(tmp_path):
    """Its client waits, that of the other goes on, and both have the same losses."""
    model, port = tiny.write_model(tmp_path / "model"), free_port()
    server = start_server(tmp_path, model, port, engines=2)
    environment = os.environ | {"PYTHONPATH": ""} | client(f"http://127.0.0.1:{port}")
    command = [PYTHONS[0], HERE / "tinker_loop.py", model, "30"]
    start = lambda: subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    )
    with start() as one, start() as other:
        lines = [[one.stdout.readline()], [other.stdout.readline()]]
        lock = tmp_path / "serve" / "engines" / "1" / "run.lock"
        os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
        for own, training in zip(lines, (one, other), strict=True):
            own += training.stdout
    server.terminate()
    assert server.wait() == 0
    assert one.returncode == other.returncode == 0
    found = [[line for line in own if line.startswith("step")] for own in lines]
    assert found[0] == found[1] and len(found[0]) == 30


DESCRIBE = """
import json
from tinker.proto import tinker_public_pb2 as p
print(json.dumps({
    name: {str(f.number): [f.type, f.is_repeated] for f in message.fields}
    for name, message in p.DESCRIPTOR.message_types_by_name.items()
}))
"""
# What 0.24 does not have, or has by another name.
ADDED = {"LossConfigValue", "ForwardBackwardRequest 7"}
RENAMED = {"TopkLogprobs": "TopkPromptLogprobs"}


@needs_client
@pytest.mark.parametrize("python", PYTHONS)
def test_messages_are_those_of_the_client(python):
    """The number and the type of each field, which are all that is sent of it."""
    theirs = json.loads(run(python, "-c", DESCRIBE))
    for name, one in messages.CLASSES.items():
        if name not in theirs and name in ADDED:
            continue
        fields = theirs[name if name in theirs else RENAMED[name]]
        for field in one.DESCRIPTOR.fields:
            own, number = [field.type, field.is_repeated], str(field.number)
            is_new = number not in fields and f"{name} {number}" in ADDED
            assert is_new or fields[number] == own, f"{name}.{field.name}"


def has_cookbook(python: str) -> bool:
    found = "import importlib.util as u; print(u.find_spec('tinker_cookbook') is None)"
    said = subprocess.run(
        [python, "-c", found], capture_output=True, text=True, check=True
    )
    return said.stdout.strip() == "False"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """Runs recipes of the cookbook, unchanged, and returns their metrics."""
    if not (pythons := [one for one in PYTHONS if has_cookbook(one)]):
        pytest.skip("set JAXLORA_TINKER to a Python that has tinker-cookbook, too")
    folder = tmp_path_factory.mktemp("cookbook")
    model = tiny.write_model(folder / "model", config=LONG)
    cache = folder / "cache"
    run(pythons[0], HERE / "cookbook_cache.py", cache, model, HF_HOME=str(cache))
    session = SETTINGS | {"rank": 32, "slots": 4, "microbatch_tokens": [512]}
    with running_server(
        folder, model, model_name=COOKBOOK_MODEL, session=session
    ) as address:

        def run_recipe(name: str, **settings: object) -> list[dict[str, float]]:
            log = folder / name
            given = settings | {"log_path": log, "model_name": COOKBOOK_MODEL}
            words = [f"{key}={value}" for key, value in given.items()]
            module = f"tinker_cookbook.recipes.{name}"
            environment = client(address) | {"HF_HOME": str(cache)}
            run(pythons[0], "-m", module, *words, **environment)
            lines = (log / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]

        run_recipe.folder = folder
        yield run_recipe


@needs_client
def test_recipes(recipes):
    """Supervised learning, its resumption, and from there reinforcement learning.

    A random model is never rewarded, so the first recipe teaches it how answers look.
    """
    supervised = {
        "batch_size": 4,
        "learning_rate": 2e-2,
        "max_length": 1024,
        "save_every": 10,
        "train_on_what": "last_assistant_message",
    }
    first = recipes("sl_loop", **supervised, max_steps=15)
    assert first[-1]["train_mean_nll"] < 0.1 * first[0]["train_mean_nll"]
    saved = recipes.folder / "sl_loop" / "checkpoints.jsonl"
    half = saved.read_text().splitlines()[0]
    assert json.loads(half)["batch"] == 10
    saved.write_text(half + "\n")
    resumed = recipes("sl_loop", **supervised)
    again = resumed[len(first) :][:5]
    for one, other in zip(again, first[10:], strict=True):
        assert one["train_mean_nll"] == other["train_mean_nll"]
    last = json.loads(saved.read_text().splitlines()[-1])
    folder = recipes.folder / "rl_loop"
    folder.mkdir()
    start = {"name": "start", "batch": 0, "state_path": last["state_path"]}
    (folder / "checkpoints.jsonl").write_text(json.dumps(start) + "\n")
    rewarded = recipes(
        "rl_loop",
        batch_size=4,
        group_size=4,
        max_tokens=16,
        max_steps=6,
        learning_rate=1e-3,
        loss_fn="importance_sampling",
    )
    assert sum(one["reward/total"] for one in rewarded) > 0
    assert any("grad_norm:max" in one for one in rewarded)


@needs_client
def test_a_recipe_of_preferences(recipes):
    """Before the first step, the adapter is the reference, so the loss is log 2."""
    found = recipes(
        "preference.dpo.train",
        dataset="hhh",
        batch_size=8,
        max_steps=6,
        learning_rate=3e-3,
        max_length=512,
    )
    assert found[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["accuracy"] == 1 and found[-1]["dpo_loss"] < 0.1
