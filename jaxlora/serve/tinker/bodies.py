"""Bodies of requests, which are made into operations.

The JSON of small requests is checked by pydantic. Passes have large bodies, whose
arrays go from protobuf's bytes or from JSON's lists straight to NumPy.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic
import pydantic_core
from fastapi import HTTPException, Request
from google.protobuf.message import DecodeError
from pydantic import Field

from jaxlora.errors import DataError
from jaxlora.serve.operation import Pass
from jaxlora.serve.tinker import messages
from jaxlora.session.datum import ChosenLoss, Datum

PROTOBUF = "application/x-protobuf"
# Clients count their requests in 32 bits, those of samplers in blocks of 10^9.
LARGEST_INT = 2**31 - 1
LARGEST_SEQ_ID = 2**62
_SMALL_BODY = 2**20  # bytes of a body without training data or a prompt
# Bodies and results of more bytes are coded in another thread, so that other requests
# go on.
LARGE_BODY = 2**17
# Checkpoints are files; their names also are parts of URLs.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
_DTYPES = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
    messages.BFLOAT16: np.dtype("<u2"),  # the upper halves of float32
}
_FIELDS = ("target_tokens", "weights", "logprobs", "advantages")


# ---- JSON of small requests ----------------------------------------------------------


class Body(pydantic.BaseModel):
    """The JSON of a request.

    Newer clients may send fields that this server does not know. Those that ask for
    nothing (null, false, 0, or empty) are skipped, and others are refused.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )

    @pydantic.model_validator(mode="after")
    def _check_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value and name != "type":
                raise ValueError(
                    f"this server does not know {name[:60]!r}, which is {value!r:.60}; "
                    "leave it out"
                )
        return self


Id = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
Index = Annotated[int, Field(ge=0, le=LARGEST_INT)]
SeqId = Annotated[int, Field(ge=1, le=LARGEST_INT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=rf"^{NAME}$")]
Ttl = Annotated[int, Field(ge=3600, le=315_360_000)] | None  # one hour to ten years
Metadata = dict[Annotated[str, Field(max_length=256)], Any] | None


class OfSession(Body):
    """A request about a session."""

    session_id: Id


class CreateSession(Body):
    """Begins a session of a client."""

    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OptimizerConfig(Body):
    """The optimizer of a model."""

    type: str = "adamw"

    @pydantic.model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type != "adamw":
            raise ValueError(f"type={self.type!r:.60} must be 'adamw'")
        return self


class LoraConfig(Body):
    """The adapter of a model."""

    rank: Count
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """Makes a model with a fresh adapter."""

    session_id: Id
    model_seq_id: Index
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class LoadWeights(Body):
    """Makes a model from a checkpoint, or replaces the adapter of a model by one."""

    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Index | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    @pydantic.model_validator(mode="after")
    def _check_address(self) -> Self:
        of_model = self.model_id is not None and self.seq_id is not None
        of_session = self.session_id is not None and self.model_seq_id is not None
        if of_model == of_session:
            raise ValueError(
                "give either model_id and seq_id, or session_id and model_seq_id"
            )
        return self


class OfModel(Body):
    """A request about a model."""

    model_id: Id


class OfPath(Body):
    """A request about a checkpoint."""

    tinker_path: str


class Numbered(OfModel):
    """An operation of a model, by its number."""

    seq_id: SeqId


class AdamParams(Body):
    """Settings of one step of AdamW."""

    learning_rate: Finite = 1e-4
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Finite = 0.0


class OptimStep(Numbered):
    """Takes an optimizer step."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Numbered):
    """Writes a checkpoint of the whole state."""

    path: Name
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Numbered):
    """Publishes weights for sampling, by name or for a new sampler."""

    path: Name | None = None
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: dict[str, str] | None = None

    @pydantic.model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path or sampling_session_seq_id")
        return self


class SaveExternal(Numbered):
    """Writes a PEFT folder."""

    path: Name
    ttl_seconds: Ttl = None


class Retrieve(Body):
    """Asks for the result of a promise."""

    request_id: Id
    allow_metadata_only: bool = False


class CreateSampler(Body):
    """Begins to sample from a checkpoint or from the base model."""

    session_id: Id
    sampling_session_seq_id: Index
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Body):
    """How tokens are drawn."""

    max_tokens: Index | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | list[Index] | None = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_INT)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class Sample(Body):
    """Draws completions of a prompt."""

    num_samples: Count = 1
    prompt: dict[str, Any]
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: Id | None = None
    seq_id: Annotated[int, Field(ge=0, le=LARGEST_SEQ_ID)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    prompt_logprobs_last_n: Count | None = None


class SetTtl(Body):
    """Sets when a checkpoint expires."""

    ttl_seconds: Ttl = None


async def read[T: Body](request: Request, kind: type[T]) -> T:
    """Returns the JSON body of a request.

    Raises:
        HTTPException: It is too large, no JSON, or not what the route takes.
    """
    content = await request.body()
    if len(content) > _SMALL_BODY:
        raise HTTPException(
            413, f"the body is larger than {_SMALL_BODY} bytes. Send less metadata."
        )
    return parsed(content, kind)


def parsed[T: Body](content: bytes, kind: type[T]) -> T:
    """Returns the JSON body of a request from its bytes.

    Raises:
        HTTPException: It is no JSON, or not what the route takes.
    """
    try:
        return kind.model_validate_json(content or b"{}")
    except pydantic.ValidationError as error:
        raise HTTPException(422, _sentence(error)) from None


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Returns metadata of a client with texts as values."""
    if metadata is None:
        return None
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.items()
    }


def _sentence(error: pydantic.ValidationError) -> str:
    """Returns what is wrong with a body first."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    if not where:
        return f"the body is wrong: {what}."
    if first["type"] == "missing":
        return f"{where} is missing from the body. Send it."
    return f"{where}={first['input']!r:.60} is wrong: {what}."


# ---- passes --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PassBody:
    """The body of a pass, whose datums are not decoded yet.

    Attributes:
        model_id: The model.
        seq_id: Its number among the operations of the model.
        is_training: Whether it adds to the gradients.
        loss_fn: Name of the loss.
        loss_config: Its settings.
        data: The datums, encoded.
        decode: Returns the tokens and fields of one.
    """

    model_id: str
    seq_id: int
    is_training: bool
    loss_fn: str
    loss_config: Mapping[str, Any]
    data: Sequence[Any]
    decode: Callable[[Any], tuple[np.ndarray, dict[str, Any]]]

    def operation(self) -> Pass:
        """Returns the operation.

        Raises:
            JaxloraError: The loss is unknown, or a datum is not what it takes.
        """
        loss = ChosenLoss.of(self.loss_fn, self.loss_config)
        datums = []
        for number, one in enumerate(self.data):
            try:
                tokens, fields = self.decode(one)
                datums.append(_datum(tokens, fields))
                loss.check(datums[-1])
            except DataError as error:
                raise DataError(f"datum {number}: {error}") from None
        if not datums:
            raise DataError("there are no datums. Send one or more.")
        return Pass(data=tuple(datums), loss=loss, is_training=self.is_training)


def pass_of_protobuf(body: bytes) -> PassBody:
    """Reads the body of a pass in protobuf.

    Raises:
        HTTPException: It is none.
    """
    try:
        request = messages.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise HTTPException(400, f"the body is no pass in protobuf: {error}.") from None
    _check_seq_id(request.seq_id)
    config: dict[str, Any] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        config[key] = value.text if value.HasField("text") else value.number
    return PassBody(
        model_id=request.model_id,
        seq_id=request.seq_id,
        is_training=not request.forward_only,
        loss_fn=request.loss_fn,
        loss_config=config,
        data=request.data,
        decode=_decode_protobuf,
    )


def pass_of_json(body: bytes, name: str) -> PassBody:
    """Reads the body of a pass in JSON, as clients before 0.25 send it.

    Args:
        body: The body.
        name: `forward_input` or `forward_backward_input`.

    Raises:
        HTTPException: It is none.
    """
    try:
        request = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"the body is no JSON: {error}.") from None
    given = request.get(name) if isinstance(request, dict) else None
    if not isinstance(given, dict):
        raise HTTPException(422, f"{name} is missing from the body. Send it.")
    model_id, seq_id = request.get("model_id"), request.get("seq_id")
    if not isinstance(model_id, str):
        raise HTTPException(422, f"model_id={model_id!r:.60} must be a text.")
    config = given.get("loss_fn_config") or {}
    data, loss = given.get("data"), given.get("loss_fn")
    if not (isinstance(config, dict) and isinstance(data, list)):
        raise HTTPException(422, f"{name} must have a list data, and an object config.")
    return PassBody(
        model_id=model_id,
        seq_id=_check_seq_id(seq_id),
        is_training=name == "forward_backward_input",
        loss_fn=loss if isinstance(loss, str) else repr(loss),
        loss_config=config,
        data=data,
        decode=_decode_json,
    )


def _check_seq_id(given: Any) -> int:
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not is_number or not 1 <= given <= LARGEST_INT:
        raise HTTPException(422, f"seq_id={given!r:.60} must be a number from 1 on.")
    return given


def _datum(tokens: np.ndarray, fields: dict[str, Any]) -> Datum:
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise DataError(
            f"loss_fn_inputs has {unknown[0]!r:.60}, which no loss here reads. Send "
            f"some of {', '.join(_FIELDS)}."
        )
    if "target_tokens" not in fields:
        raise DataError("loss_fn_inputs has no target_tokens. Send them.")
    return Datum(tokens=tokens, **fields)


def _decode_protobuf(datum: Any) -> tuple[np.ndarray, dict[str, Any]]:
    parts = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _no_text(chunk.WhichOneof("chunk"))
        parts.append(_array("model_input", chunk.encoded_text.tokens, messages.INT32))
    tokens = _joined(parts)
    fields = {
        name: _protobuf_field(name, tensor, len(tokens))
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return tokens, fields


def _protobuf_field(name: str, tensor: Any, size: int) -> np.ndarray:
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        rows = _array(name, csr.crow_indices, messages.INT64)
        columns = _array(name, csr.col_indices, messages.INT64)
        values = _array(name, csr.values, tensor.dtype)
        return _dense(name, values, rows, columns, shape, size)
    return _flat(name, _array(name, tensor.dense, tensor.dtype), shape)


def _array(name: str, content: bytes, dtype: int) -> np.ndarray:
    """Returns an array of protobuf's bytes."""
    if dtype not in _DTYPES:
        raise DataError(f"{name} has the unknown dtype {dtype}. Send float32 or int64.")
    if len(content) % _DTYPES[dtype].itemsize:
        raise DataError(
            f"{name} has {len(content)} bytes, which are no whole numbers of "
            f"{_DTYPES[dtype].itemsize} bytes."
        )
    array = np.frombuffer(content, _DTYPES[dtype])
    if dtype == messages.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _decode_json(datum: Any) -> tuple[np.ndarray, dict[str, Any]]:
    given = datum if isinstance(datum, dict) else {}
    fields = given.get("loss_fn_inputs")
    if not isinstance(fields, dict):
        raise DataError("it has no loss_fn_inputs. Send them.")
    tokens = tokens_of_json(given.get("model_input"))
    found = {
        name: _json_field(name, tensor, len(tokens)) for name, tensor in fields.items()
    }
    return tokens, found


def tokens_of_json(given: Any) -> np.ndarray:
    """Returns the tokens of a prompt or of a datum's input.

    Raises:
        DataError: It is none, or has other parts than text.
    """
    chunks = given.get("chunks") if isinstance(given, dict) else None
    if not isinstance(chunks, list):
        raise DataError("the input has no list of chunks. Send one.")
    parts = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise _no_text(kind)
        parts.append(_numbers("tokens", chunk.get("tokens"), "iu"))
    return _joined(parts)


def _json_field(name: str, tensor: Any, size: int) -> np.ndarray:
    if not isinstance(tensor, dict):
        raise DataError(
            f"{name} is {tensor!r:.60}. Send an object with data and dtype."
        )
    values = _numbers(name, tensor.get("data"), "iuf")
    shape = tensor.get("shape") or ()
    if not (isinstance(shape, list | tuple) and all(type(n) is int for n in shape)):
        raise DataError(
            f"the shape of {name} is {shape!r:.60}. Send a list of numbers."
        )
    rows, columns = (tensor.get(f"sparse_{part}_indices") for part in ("crow", "col"))
    if rows is None and columns is None:
        return _flat(name, values, tuple(shape))
    rows, columns = (_numbers(name, given, "iu") for given in (rows, columns))
    return _dense(name, values, rows, columns, tuple(shape), size)


def _numbers(name: str, given: Any, kinds: str) -> np.ndarray:
    """Returns a list of JSON as an array."""
    try:
        array = np.asarray(given if isinstance(given, list) else None)
    except ValueError:  # lists of unlike lengths
        array = np.asarray(None)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise DataError(f"{name} is {given!r:.60}. Send a list of numbers.")
    return array


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, int), *parts])


def _no_text(kind: Any) -> DataError:
    return DataError(
        f"the input has a chunk {kind!r:.60}, and this server reads text only. Send "
        "chunks of tokens."
    )


def _flat(name: str, values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns a dense field, which has one number for each position."""
    if len(shape) > 1 and not (len(shape) == 2 and shape[0] == 1):
        raise _two_dimensions(name, shape)
    if shape and math.prod(shape) != len(values):
        raise DataError(
            f"{name} has the shape {list(shape)!r:.60} and {len(values)} numbers. Send "
            "as many as the shape has."
        )
    return values


def _two_dimensions(name: str, shape: Iterable[int]) -> DataError:
    return DataError(
        f"{name} has the shape {list(shape)!r:.60}. This server takes one number for "
        "each position; send several datums for several targets of a position."
    )


def _dense(
    name: str,
    values: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    shape: Sequence[int],
    size: int,
) -> np.ndarray:
    """Returns a sparse field in CSR, of one row, with zeros in between.

    Args:
        name: Its name.
        values: The values that are listed.
        rows: Where the values of each row begin, and the end of the last one.
        columns: The columns of the values.
        shape: Its dense shape.
        size: Number of positions.
    """
    if len(shape) != 2 or shape[0] != 1:
        raise _two_dimensions(name, shape)
    is_row = [*map(int, rows[:3])] == [0, len(values)] and len(columns) == len(values)
    is_inside = not len(columns) or 0 <= columns.min() <= columns.max() < shape[1]
    if shape[1] != size or not is_row or not is_inside:
        raise DataError(
            f"{name} is no valid CSR tensor of 1 x {size} numbers. Send a column for "
            "each value, and rows of [0, number of values]."
        )
    dense = np.zeros(size, values.dtype)
    dense[columns] = values
    return dense
