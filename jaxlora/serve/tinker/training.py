"""Routes that train: models, passes, optimizer steps, saves, and their results.

A client numbers the requests of a model from 1 and may send them in any order. In the
hub, creating the model has number 1, so a request has its own number plus 1. Once a
request names a model and a number, it is accepted even if it cannot be done; its
promise then fails, as a gap would hold up all requests after it.
"""

import asyncio
import functools
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, HTTPException, Request, Response

from jaxlora.config.session_config import AdamParams
from jaxlora.errors import ConfigError, DataError, StorageError
from jaxlora.models.structure import linear_names
from jaxlora.serve.hub import Promise, SeqConflict
from jaxlora.serve.keys import Principal, allowed, authenticate
from jaxlora.serve.operation import (
    Create,
    Load,
    Operation,
    Pass,
    Publish,
    Refused,
    Save,
    Step,
    Unload,
)
from jaxlora.serve.registry import Entry, NotFound
from jaxlora.serve.server import Server
from jaxlora.serve.tinker import bodies
from jaxlora.serve.tinker.answers import answer, waiting
from jaxlora.serve.tinker.bodies import PROTOBUF, PassBody, read
from jaxlora.serve.tinker.checkpoints import readable, reserve
from jaxlora.serve.tinker.sampling import Samplers
from jaxlora.session.operations import check_datum

LORA_ALPHA = 32.0  # of all models, as the client has no setting for it
DEFAULT_RANK = 32
# The client gives up a poll after 45 seconds.
POLL_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_MOST_KNOWN = 10_000
_NOTE_SECONDS = 60.0  # how exactly a client is told when a model was last used

MayTrain = Annotated[Principal, Depends(allowed("train"))]
Anyone = Annotated[Principal, Depends(authenticate)]


async def is_done(future: Future[Any], seconds: float) -> bool:
    """Waits until a future is done, which it does not cancel; returns whether it is."""
    if not future.done():
        await asyncio.wait({asyncio.wrap_future(future)}, timeout=seconds)
    return future.done()


class Models:
    """Models of clients, and what is asked of them."""

    def __init__(self, server: Server):
        """Makes the object for a server."""
        self._server = server
        self._adding = threading.Lock()  # of two at once, each would miss the other
        self._known: dict[tuple[str, str], Entry] = {}
        self._noted: dict[str, float] = {}  # when a model's use was noted, in seconds

    # ---- creation --------------------------------------------------------------------

    def create(self, who: Principal, body: bodies.CreateModel) -> Promise:
        """Makes a model with a fresh adapter.

        Raises:
            JaxloraError: A setting cannot be used, or the session is another's.
        """
        server = self._server
        self._check_base(body.base_model)
        lora = body.lora_config or bodies.LoraConfig(rank=DEFAULT_RANK)
        most = server.config.session.rank
        if lora.rank > most:
            raise ConfigError(
                f"rank={lora.rank} is larger than {most}, the rank of this server's "
                f"slots. Lower it, or ask the operator to set session.rank={lora.rank}."
            )
        if lora.train_unembed and server.config.train_unembed == "refuse":
            raise ConfigError(
                "train_unembed=True asks to train the output layer, which adapters of "
                "this server leave alone. Set train_unembed=False."
            )
        targets = self._targets(lora)
        id = f"{body.session_id}:train:{body.model_seq_id}"
        seed = zlib.crc32(id.encode()) % 2**31 if lora.seed is None else lora.seed
        about = {
            "rank": lora.rank,
            "train_unembed": False,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }
        self._add(who, id, body.session_id, body.user_metadata, about)
        create = Create(
            rank=lora.rank, lora_alpha=LORA_ALPHA, target_modules=targets, seed=seed
        )
        return self._submitted(who, id, 1, create)

    def load_new(self, who: Principal, body: bodies.LoadWeights) -> Promise:
        """Makes a model from a checkpoint.

        Raises:
            JaxloraError: The checkpoint cannot be used, or the session is another's.
        """
        if body.base_model is not None:
            self._check_base(body.base_model)
        load, entry = self._load(who, body)
        id = f"{body.session_id}:train:{body.model_seq_id}"
        assert body.session_id is not None
        self._add(who, id, body.session_id, body.user_metadata, entry.fields["lora"])
        return self._submitted(who, id, 1, load)

    def _add(
        self,
        who: Principal,
        id: str,
        session: str,
        metadata: Mapping[str, Any] | None,
        lora: Mapping[str, Any],
    ) -> None:
        """Makes the entry of a model, unless a request that comes again has made it."""
        server = self._server
        if server.registry.owned(who.tenant, "session", session).fields.get("finished"):
            raise ConfigError(f"session {session!r} has finished. Begin another.")
        with self._adding:
            try:
                server.registry.owned(who.tenant, "model", id)
            except NotFound:
                server.limits.check_new_model(who.tenant)
                server.registry.add(
                    "model",
                    who.tenant,
                    id,
                    parent=session,
                    base_model=server.config.served_name,
                    lora=dict(lora),
                    metadata=bodies.texts(metadata),
                )

    def _check_base(self, name: str) -> None:
        served = self._server.config.served_name
        if name != served:
            raise ConfigError(
                f"base_model={name!r:.200} is not served here. This server has "
                f"{served!r}."
            )

    def _targets(self, lora: bodies.LoraConfig) -> tuple[str, ...] | None:
        """Returns the linears to adapt; None: all that the server adapts."""
        if lora.train_mlp and lora.train_attn:
            return None
        if not (lora.train_mlp or lora.train_attn):
            raise ConfigError(
                "train_mlp and train_attn are both false, so nothing would be trained. "
                "Set one of them."
            )
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for name in linear_names(self._server.hub.engine.model.config):
            *path, last = name.split(".")
            is_mlp = any("mlp" in part or "expert" in part for part in path)
            names[is_mlp].add(last)
        return tuple(sorted(names[lora.train_mlp]))

    def _load(self, who: Principal, body: bodies.LoadWeights) -> tuple[Load, Entry]:
        if body.weights_access_token is not None:
            raise ConfigError(
                "this server has no access tokens. Publish the checkpoint, so that "
                "other tenants may read it, and leave weights_access_token out."
            )
        entry = readable(self._server, who, body.path)
        if body.optimizer and entry.id.split("/")[1] != "weights":
            raise ConfigError(
                f"{body.path} has no state of the optimizer. Load the weights alone, "
                "or a checkpoint of save_state."
            )
        return Load(
            checkpoint=entry.fields["key"], with_optimizer=body.optimizer
        ), entry

    # ---- requests by number ----------------------------------------------------------

    def owned(self, who: Principal, id: str) -> Entry:
        """Returns the entry of a model, as it was when it was made.

        A model never gets another tenant, so it is looked up once, as this takes longer
        than all else that a small request needs.

        Raises:
            NotFound: The tenant has no such model.
        """
        if (found := self._known.get((who.tenant, id))) is None:
            found = self._server.registry.owned(who.tenant, "model", id)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self._noted.clear()
            self._known[who.tenant, id] = found
        now = time.monotonic()
        if now - self._noted.get(id, now) >= _NOTE_SECONDS:
            self._server.registry.touch(who.tenant, "model", id)
            self._noted[id] = now
        self._noted.setdefault(id, now)
        return found

    def is_known(self, who: Principal, id: str) -> bool:
        """Whether `owned` needs no database, which may take its time or be away."""
        age = time.monotonic() - self._noted.get(id, -math.inf)
        return (who.tenant, id) in self._known and age < _NOTE_SECONDS

    def submit(
        self,
        who: Principal,
        model_id: str,
        seq_id: int,
        make: Callable[[Entry], Operation],
    ) -> Promise:
        """Accepts a request of a model by its number.

        Args:
            who: Who sends it.
            model_id: The model.
            seq_id: The client's number.
            make: Returns the operation, given the model.

        Raises:
            JaxloraError: The model is another's, or a quota is used up.
            HTTPException: The number has another request.
        """
        model = self.owned(who, model_id)
        try:
            operation = make(model)
        except (ConfigError, DataError, NotFound) as error:
            operation = Refused(message=str(error))
        return self._submitted(who, model_id, seq_id + 1, operation)

    def _submitted(
        self, who: Principal, model_id: str, number: int, operation: Operation
    ) -> Promise:
        server, tokens = self._server, 0
        if not server.hub.knows(model_id, 1):
            # It is about to be made, or was unloaded so long ago that the hub has
            # forgotten it.
            model = server.registry.owned(who.tenant, "model", model_id)
            if number > 1 or model.fields.get("unloaded"):
                raise HTTPException(422, _unloaded(model_id))
        if isinstance(operation, Pass):
            tokens = sum(len(datum.tokens) for datum in operation.data)
            server.limits.begin(who.tenant, tokens)
        try:
            promise = server.hub.submit(who.tenant, model_id, number, operation)
        except SeqConflict:
            server.limits.end(who.tenant, tokens)
            model = server.registry.owned(who.tenant, "model", model_id)
            if model.fields.get("unloaded"):
                text = _unloaded(model_id)
            else:
                text = (
                    f"request {number - 1} of model {model_id} was accepted before, "
                    "with another content. Number requests anew for each model."
                )
            raise HTTPException(422, text) from None
        except BaseException:
            server.limits.end(who.tenant, tokens)
            raise
        end = lambda outcome: server.limits.end(who.tenant, tokens)
        if promise.operation is operation:
            promise.outcome.add_done_callback(end)
        else:  # it has come again
            end(None)
        return promise

    def pass_of(self, body: PassBody) -> Pass:
        """Returns the operation of a pass.

        Raises:
            JaxloraError: The loss or a datum cannot be used.
        """
        operation, engine = body.operation(), self._server.hub.engine
        self._server.limits.check_data(operation.data)
        for number, datum in enumerate(operation.data):
            try:
                check_datum(engine, datum)
            except DataError as error:
                raise DataError(f"datum {number}: {error}") from None
        return operation

    def load(self, who: Principal, body: bodies.LoadWeights) -> Load:
        """Returns the operation that replaces the adapter of a model.

        Raises:
            JaxloraError: The checkpoint cannot be used.
        """
        return self._load(who, body)[0]

    def save(self, model: Entry, body: bodies.SaveWeights) -> Save:
        """Returns the operation that writes the whole state.

        Raises:
            JaxloraError: There is such a checkpoint, or the storage is full.
        """
        key = reserve(
            *(self._server, model, "weights", body.path),
            seq_id=body.seq_id,
            ttl=body.ttl_seconds,
            metadata=body.user_metadata,
            overwrite=body.overwrite,
        )
        return Save(checkpoint=key, kind="state")

    def save_external(self, model: Entry, body: bodies.SaveExternal) -> Save:
        """Returns the operation that writes a PEFT folder.

        Raises:
            JaxloraError: As for `save`.
        """
        key = reserve(
            *(self._server, model, "external_weights", body.path),
            seq_id=body.seq_id,
            ttl=body.ttl_seconds,
            metadata=None,
        )
        return Save(checkpoint=key, kind="adapter")

    def publish(
        self, model: Entry, body: bodies.SaveForSampler, samplers: Samplers
    ) -> Publish:
        """Returns the operation that copies the weights for sampling.

        Raises:
            JaxloraError: As for `save`.
        """
        if body.path is None:
            assert model.parent is not None and body.sampling_session_seq_id is not None
            number = body.sampling_session_seq_id
            sampler = samplers.add(model.tenant, model.parent, number)
            return Publish(sampler=sampler, checkpoint=None)
        key = reserve(
            *(self._server, model, "sampler_weights", body.path),
            seq_id=body.seq_id,
            ttl=body.ttl_seconds,
            metadata=body.user_metadata,
        )
        return Publish(sampler=key, checkpoint=key)


def _unloaded(id: str) -> str:
    return f"model {id} was unloaded. Make another."


def _step(body: bodies.OptimStep) -> Step:
    given = body.adam_params
    if body.optimizer_params is not None:
        raise ConfigError(
            f"optimizer_params={body.optimizer_params!r:.100} are of an optimizer that "
            "this server does not have. Send AdamParams."
        )
    given = bodies.AdamParams() if given is None else given
    try:
        params = AdamParams(
            learning_rate=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            grad_clip_norm=max(0.0, given.grad_clip_norm),
        )
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}={first['input']!r:.60} of the optimizer step is wrong: "
            f"{first['msg'].removeprefix('Value error, ')}."
        ) from None
    return Step(params=params)


def router(server: Server, samplers: Samplers) -> APIRouter:
    """Returns the routes that train and that give results."""
    api, models = APIRouter(), Models(server)
    # Routes are looked for in this order, so those of frequent requests are first.
    _add_passes(api, models)
    _add_results(api, server, samplers)
    _add_saves(api, models, samplers)
    _add_models(api, server, models)
    return api


async def accepted(promise: Promise) -> dict[str, str]:
    """Returns the answer to a request that is accepted, as soon as it is on disk."""
    if not await is_done(promise.accepted, POLL_SECONDS):
        raise HTTPException(408, "the server cannot accept requests now. Try again.")
    promise.accepted.result()
    return {"request_id": promise.request_id, "model_id": promise.model}


def _add_models(api: APIRouter, server: Server, models: Models) -> None:
    @api.post("/create_model")
    async def create_model(who: MayTrain, request: Request) -> Any:
        body = await read(request, bodies.CreateModel)
        return await accepted(await asyncio.to_thread(models.create, who, body))

    @api.post("/load_weights")
    async def load_weights(who: MayTrain, request: Request) -> Any:
        body = await read(request, bodies.LoadWeights)
        if body.model_id is None or body.seq_id is None:
            return await accepted(await asyncio.to_thread(models.load_new, who, body))
        make = lambda model: models.load(who, body)
        address = body.model_id, body.seq_id
        return await accepted(
            await asyncio.to_thread(models.submit, who, *address, make)
        )

    @api.post("/get_info")
    async def get_info(who: MayTrain, request: Request) -> Any:
        body = await read(request, bodies.OfModel)
        owned = server.registry.owned
        model = await asyncio.to_thread(owned, who.tenant, "model", body.model_id)
        name = model.fields["base_model"]
        data = {
            "arch": server.hub.engine.model.config.model_type,
            "model_name": name,
            "tokenizer_id": name,
        }
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.fields["lora"]["rank"],
            "model_name": name,
        }

    @api.post("/unload_model")
    async def unload_model(who: MayTrain, request: Request) -> Any:
        body = await read(request, bodies.OfModel)

        def accept() -> Promise:
            model = server.registry.owned(who.tenant, "model", body.model_id)
            return unload(server, model)

        return await accepted(await asyncio.to_thread(accept))


def unload(server: Server, model: Entry) -> Promise:
    """Unloads a model after all that was asked of it."""
    promise = server.hub.submit_last(model.tenant, model.id, Unload())
    promise.accepted.result()  # else a crash could leave it loaded for ever
    server.registry.update(model.tenant, "model", model.id, unloaded=True)
    return promise


def _add_passes(api: APIRouter, models: Models) -> None:
    async def accept(
        who: Principal, body: PassBody | bodies.OptimStep, make: Callable[[], Operation]
    ) -> Any:
        """Accepts a small request, in this thread if no database is asked."""
        given = who, body.model_id, body.seq_id, lambda model: make()
        if models.is_known(who, body.model_id):
            return await accepted(models.submit(*given))
        return await accepted(await asyncio.to_thread(models.submit, *given))

    async def submit(
        who: Principal, request: Request, name: str, *, may_be_protobuf: bool
    ) -> Any:
        content = await request.body()
        kind = request.headers.get("content-type", "")

        def parsed() -> PassBody:
            if may_be_protobuf and kind.startswith(PROTOBUF):
                return bodies.pass_of_protobuf(content)
            return bodies.pass_of_json(content, name)

        def accept_large() -> Promise:
            body = parsed()
            make = lambda model: models.pass_of(body)
            return models.submit(who, body.model_id, body.seq_id, make)

        if len(content) > bodies.LARGE_BODY:
            return await accepted(await asyncio.to_thread(accept_large))
        body = parsed()
        return await accept(who, body, lambda: models.pass_of(body))

    @api.post("/forward_backward")
    async def forward_backward(who: MayTrain, request: Request) -> Any:
        name = "forward_backward_input"
        return await submit(who, request, name, may_be_protobuf=True)

    @api.post("/forward")
    async def forward(who: MayTrain, request: Request) -> Any:
        return await submit(who, request, "forward_input", may_be_protobuf=False)

    @api.post("/optim_step")
    async def optim_step(who: MayTrain, request: Request) -> Any:
        body = await read(request, bodies.OptimStep)
        return await accept(who, body, lambda: _step(body))


def _add_saves(api: APIRouter, models: Models, samplers: Samplers) -> None:
    async def submit[T: bodies.Numbered](
        who: Principal,
        request: Request,
        kind: type[T],
        make: Callable[[Entry, T], Operation],
    ) -> Any:
        body = await read(request, kind)

        def accept() -> Promise:
            given = lambda model: make(model, body)
            return models.submit(who, body.model_id, body.seq_id, given)

        return await accepted(await asyncio.to_thread(accept))

    @api.post("/save_weights")
    async def save_weights(who: MayTrain, request: Request) -> Any:
        return await submit(who, request, bodies.SaveWeights, models.save)

    @api.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(who: MayTrain, request: Request) -> Any:
        make = lambda model, body: models.publish(model, body, samplers)
        return await submit(who, request, bodies.SaveForSampler, make)

    @api.post("/save_weights_external")
    async def save_weights_external(who: MayTrain, request: Request) -> Any:
        return await submit(who, request, bodies.SaveExternal, models.save_external)


def _add_results(api: APIRouter, server: Server, samplers: Samplers) -> None:
    @api.post("/retrieve_future")
    async def retrieve_future(who: Anyone, request: Request) -> Response:
        body = await read(request, bodies.Retrieve)
        as_protobuf = PROTOBUF in request.headers.get("accept", "")
        if (sample := samplers.promise(who.tenant, body.request_id)) is not None:
            if not await is_done(sample.outcome, POLL_SECONDS):
                return waiting(body.request_id, server.hub.waiting(who.tenant).state)
            samplers.note_sent(sample)
            if sample.num_bytes <= bodies.LARGE_BODY:
                return sample.answer(as_protobuf=as_protobuf)
            return await asyncio.to_thread(sample.answer, as_protobuf=as_protobuf)
        try:
            find = functools.partial(server.hub.promise, who.tenant, body.request_id)
            promise = find(only_in_memory=True) or await asyncio.to_thread(find)
        except StorageError:
            # The client asks again at once, and the database needs a moment.
            await asyncio.sleep(_RETRY_SECONDS)
            return waiting(body.request_id, "paused_capacity")
        if promise is None:
            raise HTTPException(
                410,
                f"there is no result {body.request_id!r:.60} of yours, or it was kept "
                "for its time, or newer ones took its room. Send the request again.",
            )
        if not await is_done(promise.outcome, POLL_SECONDS):
            return waiting(body.request_id, server.hub.waiting(who.tenant).state)
        return answer(
            *(promise.model, promise.operation, promise.outcome.result()),
            body.request_id,
            as_protobuf=as_protobuf,
        )
