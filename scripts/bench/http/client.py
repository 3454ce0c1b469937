"""Tenants of a server over HTTP, which send what the `tinker` client 0.38 sends."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import zstandard

from jaxlora.errors import JaxloraError
from jaxlora.serve.tinker import messages
from jaxlora.serve.tinker.bodies import PROTOBUF

LEARNING_RATE = 1e-5
_RETRY_SECONDS = 0.1
_AGAIN = (408, 429, 503)  # statuses after which the client asks again
Fields = Mapping[str, np.ndarray]  # the arrays of a datum, by the names of the API


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a tenant has waited for, with times of `time.monotonic`.

    Attributes:
        tenant: The tenant.
        kind: What it was.
        began: When it was to be sent.
        sent: When its first request was sent.
        accepted: When that was acknowledged.
        ended: When its result was there.
        num_tokens: Tokens of its datums or samples.
        step_seconds: From the sending of the optimizer step to its result.
    """

    tenant: str
    kind: str
    began: float
    sent: float
    accepted: float
    ended: float
    num_tokens: int
    step_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """From the beginning to the end."""
        return self.ended - self.began


class Tenant:
    """A tenant with a session and a model.

    Attributes:
        name: Its name.
        model: Id of the model.
        steps: Optimizer steps whose results it has.
        wrong_steps: Those of them that had another number than they were to have.
        retries: Requests that were sent again, as the server did not answer.
    """

    model: str

    def __init__(self, http: httpx.AsyncClient, name: str, key: str, base: str):
        """Sends nothing yet.

        Args:
            http: Connections to the server.
            name: Its name.
            key: Its key.
            base: The name of the base model.
        """
        self.name, self._http, self._base = name, http, base
        self._headers = {"X-API-Key": key}
        self._numbers, self._samplers = itertools.count(1), itertools.count()
        self.steps = self.wrong_steps = self.retries = self._sent_steps = 0

    # ---- requests --------------------------------------------------------------------

    async def send(
        self, method: str, path: str, headers: Mapping[str, str] = {}, **given: Any
    ) -> httpx.Response:
        """Sends a request, again if the server is away or says so.

        Raises:
            JaxloraError: It is refused.
        """
        headers = {**self._headers, **headers}
        while True:
            try:
                response = await self._http.request(
                    method, path, headers=headers, **given
                )
            except httpx.TransportError:
                self.retries += 1
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if response.status_code in _AGAIN:
                is_poll = response.status_code == 408
                self.retries += not is_poll
                await asyncio.sleep(0.0 if is_poll else _RETRY_SECONDS)
                continue
            if response.status_code >= 400:
                raise JaxloraError(
                    f"{method} {path} of {self.name}: {response.status_code} "
                    f"{response.text[:500]}"
                )
            return response

    async def post(self, route: str, **body: Any) -> Any:
        """Posts JSON to a route of the Tinker API; returns the answer."""
        return (await self.send("POST", f"/api/v1/{route}", json=body)).json()

    async def result(self, promise: Mapping[str, Any], *, of_pass: bool = False) -> Any:
        """Waits for a result: JSON, or a message of protobuf.

        Raises:
            JaxloraError: The operation has failed.
        """
        response = await self.send(
            *("POST", "/api/v1/retrieve_future"),
            {"Accept": PROTOBUF} if of_pass else {},
            json={"request_id": promise["request_id"], "allow_metadata_only": True},
        )
        if response.headers["content-type"] == PROTOBUF:
            return response.content
        if "error" in (found := response.json()):
            raise JaxloraError(f"{self.name}: {found['error']}")
        return found

    # ---- models ----------------------------------------------------------------------

    async def create(self, rank: int, seed: int, number: int = 0) -> None:
        """Begins a session with a model."""
        made = await self.post("create_session", sdk_version="0.38.0")
        self.session = made["session_id"]
        await self.create_model(rank, seed, number)

    async def create_model(self, rank: int, seed: int, number: int) -> None:
        """Makes another model of the session, which is the tenant's from now on."""
        promise = await self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=self._base,
            lora_config={"rank": rank, "seed": seed, "train_unembed": False},
            type="create_model",
        )
        self.model = (await self.result(promise))["model_id"]
        self._numbers = itertools.count(1)
        self.steps = self._sent_steps = 0

    async def forward_backward(
        self, data: Sequence[Fields], loss: str = "cross_entropy"
    ) -> dict[str, Any]:
        """Sends a pass; returns its promise."""
        body = pass_body(self.model, next(self._numbers), data, loss)
        headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
        response = await self.send(
            "POST", "/api/v1/forward_backward", headers, content=body
        )
        return response.json()

    async def optim_step(self) -> dict[str, Any]:
        """Sends an optimizer step; returns its promise."""
        adam = {"learning_rate": LEARNING_RATE, "beta1": 0.9, "beta2": 0.95}
        return await self.operation("optim_step", adam_params=adam)

    async def operation(self, route: str, **body: Any) -> dict[str, Any]:
        """Sends a numbered operation; returns its promise."""
        number = next(self._numbers)
        return await self.post(route, model_id=self.model, seq_id=number, **body)

    async def train(
        self,
        data: Sequence[Fields],
        loss: str = "cross_entropy",
        *,
        passes: int = 1,
        began: float | None = None,
    ) -> Event:
        """Trains on a batch: passes, an optimizer step, and the results of all.

        Args:
            data: The datums of each pass.
            loss: The loss.
            passes: How many times they are sent before the step.
            began: When the batch was to be sent; None: now.
        """
        sent = time.monotonic()
        promises, accepted = [], 0.0
        for _ in range(passes):
            promises.append(await self.forward_backward(data, loss))
            accepted = accepted or time.monotonic()
        self._sent_steps += 1
        number, stepped = self._sent_steps, time.monotonic()
        last = await self.optim_step()

        async def step() -> float:
            found = await self.result(last)
            self.steps += 1
            self.wrong_steps += found["metrics"]["step:max"] != number
            return time.monotonic() - stepped

        results = (self.result(one, of_pass=True) for one in promises)
        seconds, *_ = await asyncio.gather(step(), *results)
        return Event(
            tenant=self.name,
            kind="train",
            began=sent if began is None else began,
            sent=sent,
            accepted=accepted,
            ended=time.monotonic(),
            num_tokens=passes * sum(len(one["tokens"]) for one in data),
            step_seconds=seconds,
        )

    # ---- samples ---------------------------------------------------------------------

    async def publish(self, path: str | None = None) -> str:
        """Publishes the weights; returns the id of a sampler of them."""
        if path is None:
            number = next(self._samplers)
            promise = await self.operation(
                "save_weights_for_sampler", sampling_session_seq_id=number
            )
            return (await self.result(promise))["sampling_session_id"]
        promise = await self.operation("save_weights_for_sampler", path=path)
        return await self.sampler((await self.result(promise))["path"])

    async def sampler(self, path: str | None) -> str:
        """Makes a sampler of a checkpoint, or of the base; returns its id."""
        made = await self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=next(self._samplers),
            base_model=self._base,
            model_path=path,
        )
        return made["sampling_session_id"]

    async def sample(
        self,
        sampler: str,
        number: int,
        prompt: Sequence[int],
        max_tokens: int,
        num_samples: int = 1,
    ) -> tuple[Event, Any]:
        """Draws samples that nothing ends early; returns the message with them."""
        sent = time.monotonic()
        promise = await self.post(
            "asample",
            num_samples=num_samples,
            prompt={"chunks": [{"tokens": [*prompt], "type": "encoded_text"}]},
            sampling_params={"max_tokens": max_tokens, "seed": number, "stop": []},
            sampling_session_id=sampler,
            seq_id=number,
            type="sample",
        )
        accepted = time.monotonic()
        found = await self.result(promise, of_pass=True)
        event = Event(
            tenant=self.name,
            kind="sample",
            began=sent,
            sent=sent,
            accepted=accepted,
            ended=time.monotonic(),
            num_tokens=num_samples * max_tokens,
        )
        return event, messages.SampleResponse.FromString(found)

    async def chat(self, text: str, max_tokens: int) -> Event:
        """Asks the base model in the form of OpenAI's chats."""
        sent = time.monotonic()
        found = await self.send(
            *("POST", "/v1/chat/completions"),
            json={
                "model": "base",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
            },
        )
        ended = time.monotonic()
        return Event(
            tenant=self.name,
            kind="chat",
            began=sent,
            sent=sent,
            accepted=ended,
            ended=ended,
            num_tokens=found.json()["usage"]["completion_tokens"],
        )


def pass_body(model: str, seq_id: int, data: Sequence[Fields], loss: str) -> bytes:
    """Returns the body of a pass: protobuf, compressed with zstd.

    Args:
        model: Id of the model.
        seq_id: Number of the request.
        data: For each datum `tokens`, `target_tokens` and what the loss reads.
        loss: The loss.
    """
    request = messages.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, loss_fn=loss
    )
    for fields in data:
        one = request.data.add()
        tokens = fields["tokens"].astype("<i4")
        one.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, values in fields.items():
            if name == "tokens":
                continue
            is_float = name != "target_tokens"
            tensor = one.loss_fn_inputs[name]
            tensor.dense = values.astype("<f4" if is_float else "<i8").tobytes()
            tensor.shape.append(len(values))
            tensor.dtype = messages.FLOAT32 if is_float else messages.INT64
    return zstandard.ZstdCompressor().compress(request.SerializeToString())
