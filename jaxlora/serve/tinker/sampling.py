"""Routes that sample: samplers of published weights or of the base, and samples."""

import asyncio
import dataclasses
import hashlib
import secrets
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from jaxlora.common.job_name import BASE
from jaxlora.errors import ConfigError, DataError
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.operation import Failed
from jaxlora.serve.registry import Entry, Taken
from jaxlora.serve.server import Server
from jaxlora.serve.tinker import bodies
from jaxlora.serve.tinker.answers import failure, sample_answer
from jaxlora.serve.tinker.bodies import read, tokens_of_json
from jaxlora.serve.tinker.checkpoints import readable
from jaxlora.session.samples import SampleCall, SampleResult

SampleOutcome = SampleResult | Failed
_SEEDS = 2**31
# Estimates of memory: a number in a tuple; and what a request has beside its numbers.
_NUMBER_BYTES, _REQUEST_BYTES = 36, 4096

MaySample = Annotated[Principal, Depends(allowed("sample"))]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A request for samples that was accepted. It is gone when the server ends.

    Attributes:
        request_id: Its id.
        tenant: The tenant.
        number: Its sampler, and its number there.
        digest: Hash of its body.
        call: The call.
        last: How many of the last tokens of the prompt are scored; None: all.
        outcome: Holds the samples as soon as they are there.
    """

    request_id: str
    tenant: str
    number: tuple[str, int]
    digest: bytes
    call: SampleCall
    last: int | None
    outcome: Future[SampleOutcome]

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes, after it has ended."""
        num = len(self.call.prompt)
        if not self.outcome.cancelled():
            result = self.outcome.result()
            if isinstance(result, SampleResult):
                num += 2 * sum(len(one.tokens) for one in result.completions)
                num += len(result.prompt_logprobs or ())
                # A tuple of two numbers takes as much as four.
                num += 4 * sum(
                    map(len, filter(None, result.topk_prompt_logprobs or ()))
                )
        return num * _NUMBER_BYTES + _REQUEST_BYTES

    def answer(self, *, as_protobuf: bool) -> Response:
        """Returns the answer with the outcome, which is there."""
        if self.outcome.cancelled():
            return failure("the request was cancelled by its client.", "user")
        outcome = self.outcome.result()
        if isinstance(outcome, Failed):
            return failure(outcome.message, outcome.category)
        return sample_answer(self.call, outcome, self.last, as_protobuf=as_protobuf)


class _Kept:
    """Samples of a tenant that have ended and that it may ask for, bounded in bytes."""

    def __init__(self):
        self._num_bytes = 0
        # The oldest first, with their bytes.
        self._sent: OrderedDict[Sample, int] = OrderedDict()
        self._unsent: OrderedDict[Sample, int] = OrderedDict()

    def add(self, sample: Sample) -> None:
        self._unsent[sample] = sample.num_bytes
        self._num_bytes += sample.num_bytes

    def note_sent(self, sample: Sample) -> None:
        if sample in self._unsent:
            self._sent[sample] = self._unsent.pop(sample)

    def remove(self, sample: Sample) -> None:
        self._num_bytes -= self._sent.pop(sample, 0) + self._unsent.pop(sample, 0)

    def excess(self, most: int) -> Sample | None:
        """Returns what goes next, if there are more bytes; the last one stays."""
        if self._num_bytes <= most or len(self._sent) + len(self._unsent) < 2:
            return None
        return next(iter(self._sent or self._unsent))


class Samplers:
    """Samplers of clients, and the samples that they ask for. Any thread may use it."""

    def __init__(self, server: Server, *, clock: Callable[[], float] = time.monotonic):
        """Makes the object for a server.

        Args:
            server: The server.
            clock: Returns seconds, of any origin.
        """
        self._server, self._clock = server, clock
        self._lock = threading.Lock()
        self._samples: dict[str, Sample] = {}
        self._by_number: dict[tuple[str, int], Sample] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._kept: defaultdict[str, _Kept] = defaultdict(_Kept)

    def add(
        self,
        tenant: str,
        session: str,
        number: int,
        *,
        path: str | None = None,
        version: str | None = None,
        key: str | None = None,
    ) -> str:
        """Makes the entry of a sampler, unless it is there; returns its id.

        Args:
            tenant: The tenant.
            session: Its session, which the caller has checked.
            number: Its number among the samplers of the session.
            path: The path of its weights; None: they have none.
            version: The name of its weights in the hub; None: the id.
            key: Key of their files in the storage; None: they have none.

        Raises:
            ConfigError: There is one of this number, with other weights.
        """
        id = f"{session}:sample:{number}"
        version = id if version is None else version
        try:
            self._server.registry.add(
                *("sampler", tenant, id),
                parent=session,
                base_model=self._server.config.served_name,
                path=path,
                version=version,
                key=key,
            )
        except Taken:
            old = self._server.registry.owned(tenant, "sampler", id).fields
            if (old["path"], old["version"]) != (path, version):
                raise ConfigError(
                    f"sampler {number} of session {session} is there already, with "
                    "other weights. Number samplers anew for each session."
                ) from None
        return id

    def create(self, who: Principal, body: bodies.CreateSampler) -> str:
        """Makes a sampler of a checkpoint or of the base; returns its id.

        Raises:
            JaxloraError: There are no such weights, or the session is another's.
        """
        server = self._server
        server.registry.owned(who.tenant, "session", body.session_id)
        served = server.config.served_name
        if body.base_model not in (None, served):
            raise ConfigError(
                f"base_model={body.base_model!r:.200} is not served here. This server "
                f"has {served!r}."
            )
        address = who.tenant, body.session_id, body.sampling_session_seq_id
        if body.model_path is None:
            return self.add(*address, version=BASE)
        entry = readable(server, who, body.model_path)
        if entry.id.split("/")[1] == "weights":
            raise ConfigError(
                f"{body.model_path} is a checkpoint of training. Sample from one of "
                "save_weights_for_sampler."
            )
        key = entry.fields["key"]
        return self.add(*address, path=body.model_path, version=key, key=key)

    # ---- samples ---------------------------------------------------------------------

    def promise(self, tenant: str, request_id: str) -> Sample | None:
        """Returns a request for samples; None: the tenant has none by this id."""
        with self._lock:
            found = self._samples.get(request_id)
        return found if found is not None and found.tenant == tenant else None

    def owned(self, who: Principal, body: bodies.Sample) -> Entry:
        """Returns the sampler that a request for samples names.

        Raises:
            JaxloraError: It names none, or the sampler is another's.
        """
        if body.sampling_session_id is None or body.seq_id is None:
            raise ConfigError(
                "the request has no sampling_session_id and seq_id. Make a sampler by "
                "create_sampling_session first."
            )
        registry = self._server.registry
        sampler = registry.owned(who.tenant, "sampler", body.sampling_session_id)
        registry.note_use(sampler)
        return sampler

    def submit(self, sampler: Entry, content: bytes, body: bodies.Sample) -> Sample:
        """Accepts a request for samples.

        Args:
            sampler: Its sampler.
            content: Its body.
            body: The body, decoded.

        Raises:
            JaxloraError: It cannot be done, or a quota is used up.
            HTTPException: Its number has another request.
        """
        assert body.seq_id is not None
        number, digest = (sampler.id, body.seq_id), hashlib.sha256(content).digest()
        call = self._call(sampler, body)
        with self._lock:
            self._forget()
            if (known := self._by_number.get(number)) is not None:
                return _checked(known, digest)
            sample = Sample(
                request_id=self._server.ids.new(),
                tenant=sampler.tenant,
                number=number,
                digest=digest,
                call=call,
                last=body.prompt_logprobs_last_n,
                outcome=self._server.hub.sample(
                    sampler.tenant, call, sampler.fields["key"]
                ),
            )
            self._samples[sample.request_id] = self._by_number[number] = sample
        sample.outcome.add_done_callback(lambda _: self._end(sample))
        return sample

    def cancel(self, tenant: str, request_id: str) -> None:
        """Ends a request for samples that nobody waits for any more."""
        if (found := self.promise(tenant, request_id)) is not None:
            found.outcome.cancel()

    def note_sent(self, sample: Sample) -> None:
        """Notes that the client gets a sample, which goes before others then."""
        with self._lock:
            self._kept[sample.tenant].note_sent(sample)

    def _end(self, sample: Sample) -> None:
        most = self._server.config.limits.kept_bytes
        with self._lock:
            self._ended.append((self._clock(), sample.request_id))
            kept = self._kept[sample.tenant]
            kept.add(sample)
            while (oldest := kept.excess(most)) is not None:
                self._drop(oldest)

    def _forget(self) -> None:
        """Forgets what has ended long ago."""
        before = self._clock() - self._server.config.retention.promise_seconds
        while self._ended and self._ended[0][0] < before:
            if (found := self._samples.get(self._ended.popleft()[1])) is not None:
                self._drop(found)

    def _drop(self, sample: Sample) -> None:
        del self._samples[sample.request_id], self._by_number[sample.number]
        self._kept[sample.tenant].remove(sample)

    def _call(self, sampler: Entry, body: bodies.Sample) -> SampleCall:
        """Returns the call of a request for samples.

        Raises:
            JaxloraError: It cannot be done.
        """
        server, params = self._server, body.sampling_params
        config, prompt = server.hub.engine.model.config, tokens_of_json(body.prompt)
        most, room = server.config.limits.samples, config.max_positions - len(prompt)
        if body.num_samples > most:
            raise ConfigError(
                f"num_samples={body.num_samples} is larger than {most}, the limit of "
                "this server. Send several requests."
            )
        if not len(prompt) or not 0 <= prompt.min() <= prompt.max() < config.vocab_size:
            raise DataError(
                f"the prompt has {len(prompt)} tokens, and the model knows the tokens "
                f"0 to {config.vocab_size - 1}. Send one such token at least."
            )
        if room < (params.max_tokens or 0):
            raise DataError(
                f"the prompt has {len(prompt)} tokens, max_tokens={params.max_tokens}, "
                f"and the model has {config.max_positions} positions. Shorten one."
            )
        last = body.prompt_logprobs_last_n
        if last is not None and not (body.prompt_logprobs and last < len(prompt)):
            raise ConfigError(
                f"prompt_logprobs_last_n={last} needs prompt_logprobs, and must be "
                f"less than the {len(prompt)} tokens of the prompt."
            )
        tokens, texts = _stops(params.stop)
        seed = secrets.randbelow(_SEEDS) if params.seed is None else params.seed
        return SampleCall(
            version=sampler.fields["version"],
            tenant=sampler.tenant,
            prompt=tuple(prompt.tolist()),
            num_samples=body.num_samples,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=seed % _SEEDS,
            stop_tokens=tokens,
            stop_texts=texts,
            prompt_logprobs=bool(body.prompt_logprobs),
            topk_prompt_logprobs=body.topk_prompt_logprobs,
        )


def _checked(known: Sample, digest: bytes) -> Sample:
    if known.digest != digest:
        raise HTTPException(
            422,
            "a request with this seq_id was accepted before, with another content. "
            "Number the requests of a sampler anew.",
        )
    return known


def _stops(
    stop: str | list[str] | list[int] | None,
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Returns the tokens and the texts that end a sample.

    An empty list says that none does, and None those of the model.
    """
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        stop = [stop]
    if not all(one for one in stop if isinstance(one, str)):
        raise ConfigError("a text of stop is empty. Leave it out.")
    texts = tuple(one for one in stop if isinstance(one, str))
    tokens = tuple(one for one in stop if isinstance(one, int))
    return (None if texts else tokens), texts


def router(server: Server, samplers: Samplers) -> APIRouter:
    """Returns the routes."""
    api = APIRouter()

    @api.post("/create_sampling_session")
    async def create_sampling_session(who: MaySample, request: Request) -> Any:
        body = await read(request, bodies.CreateSampler)
        id = await asyncio.to_thread(samplers.create, who, body)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    @api.get("/samplers/{id}")
    def get_sampler(who: MaySample, id: str) -> Any:
        fields = server.registry.owned(who.tenant, "sampler", id).fields
        return {
            "sampler_id": id,
            "base_model": fields["base_model"],
            "model_path": fields["path"],
        }

    @api.post("/asample")
    async def asample(who: MaySample, request: Request) -> Any:
        content = await request.body()

        def accept() -> Sample:
            body = bodies.parsed(content, bodies.Sample)
            return samplers.submit(samplers.owned(who, body), content, body)

        sample = await asyncio.to_thread(accept)
        ids = [f"{sample.request_id}:{i}" for i in range(sample.call.num_samples)]
        return {"request_id": sample.request_id, "sample_sequence_ids": ids}

    @api.post("/cancel_future")
    async def cancel_future(who: MaySample, request: Request) -> Any:
        body = await read(request, bodies.Retrieve)
        samplers.cancel(who.tenant, body.request_id)
        return {}

    return api
