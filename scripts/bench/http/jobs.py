"""Jobs that a server trains, beside the same jobs of `jaxlora train`."""

import asyncio
import io
import time
import zipfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import yaml

from jaxlora.errors import JaxloraError
from jaxlora.run.folder import ADAPTERS
from jaxlora.run.log import METRICS_FILE, read_events
from scripts.bench.http.client import Tenant
from scripts.bench.http.load import Columns, Load
from scripts.bench.run.commands import run_command
from scripts.bench.run.inputs import Inputs, write_data

NUM_JOBS = 3
_WEIGHTS = "adapter_model.safetensors"
_LOOK_SECONDS = 0.1
_URL = "/jobs/v1"
Adapters = dict[str, Mapping[str, np.ndarray]]


class Comparison:
    """The jobs, and the adapters that the server has made of them."""

    def __init__(self, load: Load, work: Path):
        """Writes their data.

        Args:
            load: The server and its tenants.
            work: An empty folder.
        """
        self._load, self._work = load, work
        case, args = load.case, load.args
        inputs = Inputs(
            model=case.model,
            layers=case.layers,
            jobs=NUM_JOBS,
            tokens=args.job_tokens,
            median_tokens=case.mean_tokens,
            longest_tokens=case.longest,
            batch_size=case.samples,
        )
        self._data = write_data(inputs, work / "data")
        self._settings = {
            "rank": case.rank,
            "batch_size": case.samples,
            "max_length": case.longest,
            "learning_rate": 1e-4,
        }
        self._adapters: Adapters = {}
        self._losses: dict[str, list[float]] = {}

    def _job(self, number: int, path: str) -> dict[str, Any]:
        name = self._data[number].stem
        return {"name": name, "data": {"path": path}, "seed": number, **self._settings}

    async def serve(self, load: Load) -> AsyncIterator[Columns]:
        """Trains the jobs over HTTP."""
        tenant, began = await load.tenant("t0"), time.monotonic()
        for path in self._data:
            content = path.read_bytes()
            await tenant.send("PUT", f"{_URL}/uploads/{path.name}", content=content)
        uploaded = time.monotonic()
        for number, path in enumerate(self._data):
            job = self._job(number, path.name)
            await tenant.send("POST", f"{_URL}/jobs", json=job)
        posted = time.monotonic()
        shown = await asyncio.gather(*(_ended(tenant, p.stem) for p in self._data))
        trained = time.monotonic()
        for path in self._data:
            answer = await tenant.send("GET", f"{_URL}/jobs/{path.stem}/adapter")
            with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
                content = archive.read(f"{path.stem}/{_WEIGHTS}")
            self._adapters[path.stem] = safetensors.numpy.load(content)
            lines = await tenant.send("GET", f"{_URL}/jobs/{path.stem}/metrics")
            self._losses[path.stem] = _losses(lines.json()["metrics"])
        tokens = sum(one["num_tokens"] for one in shown)
        yield {
            "row": f"jobs: {NUM_JOBS} over HTTP",
            "tokens_per_second": round(tokens / (trained - posted)),
            "upload_s": round(uploaded - began, 2),
            "post_s": round(posted - uploaded, 2),
            "train_s": round(trained - posted, 2),
            "download_s": round(time.monotonic() - trained, 2),
        }

    def train(self) -> Columns:
        """Trains the jobs by `jaxlora train`, and compares; the GPU must be free."""
        output_dir = self._work / "train"
        jobs = [self._job(i, str(path)) for i, path in enumerate(self._data)]
        content = {
            "model": str(self._work.parent / "checkpoint"),
            "output_dir": str(output_dir),
            "dtype": self._load.case.dtype,
            "microbatch_tokens": max(self._load.case.sizes),
            "block_tokens": self._load.case.block_tokens,
            "jobs": jobs,
        }
        file = self._work / "run.yaml"
        file.write_text(yaml.safe_dump(content))
        device = self._load.args.device
        options = [] if device is None else [f"--device={device}"]
        done = run_command(["jaxlora", "train", str(file), *options], {})
        found: Columns = {"row": f"jobs: {NUM_JOBS} by jaxlora train"}
        found["command_s"] = round(done.seconds, 2)
        events = read_events(output_dir / METRICS_FILE)
        for name, mine in self._adapters.items():
            path = output_dir / ADAPTERS / name / _WEIGHTS
            other = safetensors.numpy.load_file(path)
            losses = _losses([e for e in events if e.get("job") == name])
            pairs = [*zip(self._losses[name], losses, strict=True)]
            found[name] = _closeness(mine, other) | {
                "steps": len(losses),
                "largest_loss_difference": max(abs(a - b) for a, b in pairs),
            }
        return found


async def _ended(tenant: Tenant, name: str) -> dict[str, Any]:
    while True:
        shown = (await tenant.send("GET", f"{_URL}/jobs/{name}")).json()
        if shown["status"] == "finished":
            return shown
        if shown["status"] not in ("waiting", "running"):
            raise JaxloraError(f"job {name} is {shown['status']}: {shown['reason']}")
        await asyncio.sleep(_LOOK_SECONDS)


def _losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "step"]


def _closeness(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> Columns:
    """Returns the relative difference of two adapters, in A and in B, by norms."""
    if one.keys() != other.keys():
        raise JaxloraError("the adapters have other tensors")
    found: Columns = {}
    for kind in ("lora_A", "lora_B"):
        pairs = [
            (x.astype(np.float64), other[name].astype(np.float64))
            for name, x in one.items()
            if kind in name
        ]
        difference = sum(float(((x - y) ** 2).sum()) for x, y in pairs)
        norm = sum(float((y**2).sum()) for _, y in pairs)
        found[kind] = float(f"{(difference / norm) ** 0.5:.3g}")
    return found
