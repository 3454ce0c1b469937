"""`/v1`: chat in OpenAI's form, whose model is the base or an adapter of the tenant."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from jaxlora.adapters.files.tokenizer_copy import template_settings
from jaxlora.common.job_name import BASE
from jaxlora.config.data_config import common_template_kwargs
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.errors import ConfigError
from jaxlora.generate.answer_text import AnswerText
from jaxlora.generate.generator import end_ids
from jaxlora.generate.prompt import FinishReason, Prompt, prompt_ids
from jaxlora.problems import format_errors
from jaxlora.serve.jobs.driver import awaited
from jaxlora.serve.jobs.jobs import Jobs
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.operation import Failed
from jaxlora.serve.registry import NotFound
from jaxlora.serve.server import Server
from jaxlora.serve.tinker.bodies import LARGE_BODY
from jaxlora.serve.tinker.checkpoints import readable
from jaxlora.session.samples import SampleCall, SampleResult

Taster = Annotated[Principal, Depends(allowed("sample"))]

# Settings that change no answer here.
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
# Tokens of an answer whose length is not given.
_MOST_TOKENS = 1024
_SEEDS = 2**31
_POLL_SECONDS = 1.0  # between looks whether the client still waits
_REASONS: Mapping[FinishReason, str] = {
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}


class StreamOptions(pydantic.BaseModel):
    """Settings of a stream.

    Attributes:
        include_usage: Whether the last part counts tokens.
    """

    include_usage: bool = False


class ChatRequest(pydantic.BaseModel):
    """A request for answers in a chat. Others of OpenAI's settings are refused.

    Attributes:
        model: `base` or the name of the served model; the name of a job; or the path of
            saved weights, `tinker://...`.
        messages: The chat, as training data have it.
        max_tokens, max_completion_tokens: Largest number of tokens of an answer.
        temperature, top_p: How tokens are chosen.
        top_k: Samples from so many of the most likely tokens; 0: from all.
        n: Number of answers.
        seed: Random seed; None: any.
        stop: Texts that end an answer and are no part of it.
        logprobs: Whether to return the log-probability of each token.
        stream: Whether to send parts as they come.
        stream_options: Settings of that.
        chat_template_kwargs: Values of the chat template's variables.
    """

    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.field_validator(
        *("temperature", "top_p", "top_k", "n", "logprobs", "stream"), mode="before"
    )
    @classmethod
    def _null_is_the_default(cls, given: Any, info: Any) -> Any:
        default = cls.model_fields[info.field_name or ""].default
        return default if given is None else given

    def check(self, most_samples: int) -> None:
        """Checks what the types do not.

        Raises:
            ConfigError: A setting is not known here, or cannot be used.
        """
        extra = {k: x for k, x in (self.model_extra or {}).items() if x is not None}
        neutral = {
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_logprobs": 0,
            "logit_bias": {},
            "tools": [],
            "response_format": {"type": "text"},
        }
        for key, value in extra.items():
            if key in _WITHOUT_EFFECT or (key in neutral and value == neutral[key]):
                continue
            raise ConfigError(
                f"{key}={value!r:.100} is not supported by this server. Leave it out."
            )
        if self.n > most_samples:
            raise ConfigError(
                f"n={self.n} is larger than {most_samples}, the limit of this server. "
                "Send several requests."
            )
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ConfigError(
                "max_tokens and max_completion_tokens are the same. Keep one."
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        stop = self.stop or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Voice:
    """A published version, or the base, that answers a chat.

    Attributes:
        version: Name of the published version, or `base`.
        key: Key of its folder in the storage; None: it has none.
        template: Chat template that it was trained with; None: the tokenizer's own.
        kwargs: Values of the template's variables in training.
    """

    version: str
    key: str | None = None
    template: str | None = None
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Chats:
    """Answers chats."""

    def __init__(self, server: Server, jobs: Jobs):
        """Makes the object.

        Args:
            server: The server.
            jobs: Its jobs, whose adapters answer by their names.
        """
        self._server, self._jobs = server, jobs

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._server.hub.engine.model.folder)

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        return end_ids(self._server.hub.engine.model, self._tokenizer)

    # ---- models ----------------------------------------------------------------------

    def voice(self, who: Principal, name: str) -> Voice:
        """Returns what a request calls its model.

        Raises:
            JaxloraError: The tenant has nothing by this name.
        """
        if name in (BASE, self._server.config.served_name):
            return Voice(version=BASE)
        if name.startswith("tinker://"):
            key = readable(self._server, who, name).fields["key"]
            if "/weights/" in name:
                raise ConfigError(
                    f"{name} is a checkpoint of training. Use one that was saved for "
                    "sampling."
                )
            return Voice(version=key, key=key)
        try:
            job, key = self._jobs.adapter(who.tenant, name)
        except NotFound:
            raise NotFound(
                f"there is no model {name!r:.120}. GET /v1/models lists yours."
            ) from None
        data = job.settings.data.model_dump(mode="json")
        templates = template_settings(data)
        return Voice(
            version=key,
            key=key,
            template=templates[0] if templates else None,
            kwargs=common_template_kwargs(data),
        )

    def names(self, who: Principal) -> list[tuple[str, float]]:
        """Returns the names of what a tenant can ask, and when each was made."""
        found = [(self._server.config.served_name, 0.0)]
        found += [
            (job.name, job.created_at) for job in self._jobs.with_adapters(who.tenant)
        ]
        for entry in self._server.registry.list(who.tenant, "checkpoint"):
            if "/sampler_weights/" in entry.id:
                found.append((f"tinker://{entry.id}", entry.created_at))
        return found

    # ---- answers ---------------------------------------------------------------------

    async def chat(self, who: Principal, asked: ChatRequest) -> "Chat":
        """Begins the answers to a request.

        Raises:
            JaxloraError: It cannot be answered.
        """
        asked.check(self._server.config.limits.samples)
        voice = await asyncio.to_thread(self.voice, who, asked.model)
        tokenizer, ids = await asyncio.to_thread(self._prompt, voice, asked)
        room = self._server.hub.engine.model.config.max_positions - len(ids)
        most = asked.max_tokens or asked.max_completion_tokens
        if most is not None and most > room:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, max_tokens={most}, and the model "
                f"has {room + len(ids)} positions. Shorten one."
            )
        seed = secrets.randbelow(_SEEDS) if asked.seed is None else asked.seed
        call = SampleCall(
            version=voice.version,
            prompt=tuple(ids),
            num_samples=asked.n,
            max_tokens=min(_MOST_TOKENS, room) if most is None else most,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=seed % _SEEDS,
            stop_texts=asked.stops,
        )
        chat = Chat(asked, call, tokenizer, self._ends)
        chat.outcome = self._server.hub.sample(
            who.tenant, call, voice.key, chat.take if asked.stream else None
        )
        return chat

    def _prompt(self, voice: Voice, asked: ChatRequest) -> tuple[Tokenizer, list[int]]:
        """Returns the tokenizer with the chat template, and the tokens of the chat."""
        kwargs = {**voice.kwargs, **(asked.chat_template_kwargs or {})}
        tokenizer = self._tokenizer.with_setting(voice.template, kwargs)
        most = self._server.hub.engine.model.config.max_positions
        return tokenizer, prompt_ids(Prompt(asked.messages), tokenizer, most)


class Chat:
    """The answers to a request, in the form of OpenAI's.

    Attributes:
        outcome: Gets the samples.
    """

    outcome: Future[SampleResult | Failed]

    def __init__(
        self,
        asked: ChatRequest,
        call: SampleCall,
        tokenizer: Tokenizer,
        ends: Sequence[int],
    ):
        """Makes the object in the loop that sends the answers."""
        self._asked, self._call = asked, call
        self._tokenizer, self._ends = tokenizer, ends
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._text = AnswerText(tokenizer, call.prompt, asked.stops, ends)
        self._loop = asyncio.get_running_loop()
        self._new: asyncio.Queue[tuple[int, list[int], list[float]] | None]
        self._new = asyncio.Queue()

    def take(
        self, number: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Takes new tokens of an answer, in the engine's thread."""
        self._put((number, [*tokens], [*logprobs]))

    def _put(self, new: tuple[int, list[int], list[float]] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._new.put_nowait, new)

    # ---- at once ---------------------------------------------------------------------

    async def answer(self, request: Request) -> dict[str, Any]:
        """Returns all answers, unless the client goes.

        Raises:
            HTTPException: They could not be made.
        """
        found = awaited(self.outcome)
        while not (await asyncio.wait([found], timeout=_POLL_SECONDS))[0]:
            if await request.is_disconnected():
                self.outcome.cancel()
                raise HTTPException(499, "the client has gone.")
        completions = _completions(found.result())
        choices = []
        for number, one in enumerate(completions):
            text = self._text.of(one.tokens)
            choice = {
                "index": number,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": _REASONS[one.finish_reason],
                "logprobs": self._logprobs(one.tokens, one.logprobs),
            }
            choices.append(choice)
        usage = self._usage(sum(len(one.tokens) for one in completions))
        return self._head("chat.completion") | {"choices": choices, "usage": usage}

    # ---- as they come ----------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Yields server-sent events with the answers as they come."""
        self.outcome.add_done_callback(lambda _: self._put(None))
        try:
            for number in range(self._call.num_samples):
                yield self._event(number, {"role": "assistant", "content": ""})
            tokens: list[list[int]] = [[] for _ in range(self._call.num_samples)]
            sent = [""] * self._call.num_samples
            while (new := await self._new.get()) is not None:
                number, ids, logprobs = new
                tokens[number] += ids
                text = self._text.settled(tokens[number])
                added, sent[number] = text[len(sent[number]) :], text
                given = self._logprobs(ids, logprobs)
                if added or given:
                    yield self._event(number, {"content": added}, logprobs=given)
            outcome = self.outcome.result()
            if isinstance(outcome, Failed):
                yield _sent({"error": {"message": outcome.message}})
                return
            for number, one in enumerate(outcome.completions):
                rest = self._text.of(one.tokens)[len(sent[number]) :]
                delta = {"content": rest} if rest else {}
                yield self._event(number, delta, reason=one.finish_reason)
            options = self._asked.stream_options
            if options is not None and options.include_usage:
                usage = self._usage(sum(map(len, tokens)))
                head = self._head("chat.completion.chunk")
                yield _sent(head | {"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.outcome.cancel()  # which ends it if the client has gone

    def _event(
        self,
        number: int,
        delta: dict[str, Any],
        *,
        reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        choice = {
            "index": number,
            "delta": delta,
            "finish_reason": None if reason is None else _REASONS[reason],
            "logprobs": logprobs,
        }
        return _sent(self._head("chat.completion.chunk") | {"choices": [choice]})

    # ---- parts of both ---------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
        }

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = len(self._call.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
        }

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens, without one that ends the answer."""
        if not self._asked.logprobs:
            return None
        content = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            if token not in self._ends:
                text = self._tokenizer.decode([token])
                one = {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
                content.append(one | {"top_logprobs": []})
        return {"content": content, "refusal": None}


def _asked(body: bytes) -> ChatRequest:
    """Reads a request; clients need not say that it is JSON.

    Raises:
        ConfigError: It is none.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise ConfigError(format_errors(error, "the request")) from None


def _sent(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"


def _completions(outcome: SampleResult | Failed) -> Sequence[Any]:
    if isinstance(outcome, Failed):
        status = 400 if outcome.category == "user" else 503
        raise HTTPException(status, outcome.message)
    return outcome.completions


def router(server: Server, jobs: Jobs) -> APIRouter:
    """Returns the routes."""
    chats = Chats(server, jobs)
    made = APIRouter(prefix="/v1")

    @made.get("/models")
    def models(who: Taster) -> dict[str, Any]:
        """Lists what a tenant can ask."""
        found = [
            {"id": name, "object": "model", "created": int(at), "owned_by": who.tenant}
            for name, at in chats.names(who)
        ]
        return {"object": "list", "data": found}

    @made.get("/models/{name:path}")
    def model(name: str, who: Taster) -> dict[str, Any]:
        """Describes what a tenant can ask by a name."""
        chats.voice(who, name)
        return {"id": name, "object": "model", "created": 0, "owned_by": who.tenant}

    @made.post("/chat/completions")
    async def chat(request: Request, who: Taster) -> Response:
        """Answers a chat, at once or as the tokens come."""
        body = await request.body()
        is_large = len(body) > LARGE_BODY
        asked = await asyncio.to_thread(_asked, body) if is_large else _asked(body)
        found = await chats.chat(who, asked)
        if asked.stream:
            return StreamingResponse(found.events(), media_type="text/event-stream")
        return JSONResponse(await found.answer(request))

    return made
