"""Answers: the results of operations, as the client reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pydantic_core
from fastapi import Response
from fastapi.responses import JSONResponse

from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Operation,
    Publish,
    Save,
    Unload,
    Waiting,
)
from jaxlora.serve.tinker import messages
from jaxlora.serve.tinker.bodies import PROTOBUF
from jaxlora.session.engine import PassResult, StepResult
from jaxlora.session.samples import SampleCall, SampleResult

_MISSING = -99999.0  # stands for a log-probability that is not among the k largest
_SCHEME = "tinker://"


def path_of(key: str) -> str:
    """Returns the path of a checkpoint, by which the client knows it, from its key."""
    _, model, kind, name = key.split("/")
    return f"{_SCHEME}{model}/{kind}/{name.partition(':')[0]}"


def waiting(request_id: str, state: str = "active") -> JSONResponse:
    """Answers that a result is not there yet; the client asks again at once."""
    content = {"type": "try_again", "request_id": request_id, "queue_state": state}
    return JSONResponse(content, 408)


def failure(message: str, category: str) -> JSONResponse:
    """Answers that an operation has failed for good."""
    return JSONResponse({"error": message, "category": category})


def answer(
    model: str,
    operation: Operation,
    outcome: Done | Failed | Waiting,
    request_id: str,
    *,
    as_protobuf: bool,
) -> Response:
    """Returns the answer with the outcome of an operation.

    Args:
        model: The model.
        operation: The operation, whose datums may be gone.
        outcome: Its outcome.
        request_id: The promise.
        as_protobuf: Whether the client takes protobuf.
    """
    match outcome:
        case Waiting():
            return waiting(request_id, outcome.state)
        case Failed():
            return failure(outcome.message, outcome.category)
        case Done(result=PassResult() as result):
            return _pass_answer(result, as_protobuf=as_protobuf)
        case Done(result=StepResult() as result):
            return _step_answer(result)
    match operation:
        case Load():
            path = path_of(operation.checkpoint)
            content = {"type": "load_weights", "path": path, "model_id": model}
        case Save(kind="state"):
            content = {"type": "save_weights", "path": path_of(operation.checkpoint)}
        case Save():
            path = path_of(operation.checkpoint)
            content = {"type": "save_weights_external", "path": path}
        case Publish(checkpoint=None):
            content = {
                "type": "save_weights_for_sampler",
                "sampling_session_id": operation.sampler,
            }
        case Publish(checkpoint=str() as key):
            content = {"type": "save_weights_for_sampler", "path": path_of(key)}
        case Unload():
            content = {"type": "unload_model", "model_id": model}
        case _:
            assert isinstance(operation, Create), operation
            content = {"type": "create_model", "model_id": model}
    return JSONResponse(content)


def _step_answer(result: StepResult) -> JSONResponse:
    if not result.is_finite:
        return failure(
            "the losses or the gradient of this optimizer step were not finite, so it "
            "was skipped: the weights are as before, and the gradients are gone. Lower "
            "the learning rate, or check the weights and advantages that you send.",
            "user",
        )
    metrics = {"step:max": float(result.step), "grad_norm:max": result.grad_norm}
    return JSONResponse({"metrics": metrics})


def _pass_answer(result: PassResult, *, as_protobuf: bool) -> Response:
    metrics = dict(result.metrics)
    if not as_protobuf:
        outputs = [
            {"logprobs": _json_tensor(logprobs.tolist(), [len(logprobs)])}
            for logprobs in result.logprobs
        ]
        content = {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": metrics,
        }
        return _json(content)
    output = messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", metrics=metrics
    )
    record = output.loss_fn_outputs.add(
        type_tag="ArrayRecord", num_datums=len(result.logprobs)
    )
    lengths = np.array([0, *map(len, result.logprobs)], np.int64)
    joined = np.concatenate(result.logprobs).astype("<f4")
    field = record.fields["logprobs"]
    field.data, field.dtype = joined.tobytes(), messages.FLOAT32
    field.offsets = (np.cumsum(lengths) * joined.itemsize).astype("<i8").tobytes()
    return Response(output.SerializeToString(), media_type=PROTOBUF)


def sample_answer(
    call: SampleCall, result: SampleResult, last: int | None, *, as_protobuf: bool
) -> Response:
    """Returns the answer with the samples of a prompt.

    Args:
        call: The call.
        result: Its result.
        last: How many of the last tokens of the prompt are scored; None: all.
        as_protobuf: Whether the client takes protobuf.
    """
    first = 1 if last is None else max(1, len(call.prompt) - last)
    prompt = topk = None
    if result.prompt_logprobs is not None and call.prompt_logprobs:
        prompt = [None] * first + [*result.prompt_logprobs[first:]]
    if result.topk_prompt_logprobs is not None and call.topk_prompt_logprobs:
        topk = [None] * first + [*result.topk_prompt_logprobs[first:]]
    if as_protobuf:
        return _protobuf_samples(result, prompt, topk, call.topk_prompt_logprobs)
    sequences = [
        {
            "stop_reason": "length" if one.finish_reason == "length" else "stop",
            "tokens": one.tokens,
            "logprobs": one.logprobs,
        }
        for one in result.completions
    ]
    content: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if prompt is not None:
        content["prompt_logprobs"] = prompt
    if topk is not None:
        content["topk_prompt_logprobs"] = topk
    return _json(content)


def _protobuf_samples(
    result: SampleResult,
    prompt: Sequence[float | None] | None,
    topk: Sequence[Sequence[tuple[int, float]] | None] | None,
    k: int,
) -> Response:
    output = messages.SampleResponse()
    for one in result.completions:
        is_cut = one.finish_reason == "length"
        output.sequences.add(
            stop_reason=messages.LENGTH if is_cut else messages.STOP,
            tokens=np.array(one.tokens, "<i4").tobytes(),
            logprobs=np.array(one.logprobs, "<f4").tobytes(),
        )
    if prompt is not None:
        # float32 has NaN for what is None in Python
        output.prompt_logprobs = np.array(prompt, np.float64).astype("<f4").tobytes()
    if topk is not None:
        ids = np.zeros((len(topk), k), "<i4")
        logprobs = np.full((len(topk), k), _MISSING, "<f4")
        for row, best in enumerate(topk):
            for column, (token, logprob) in enumerate((best or ())[:k]):
                ids[row, column], logprobs[row, column] = token, logprob
        table = output.topk_prompt_logprobs
        table.token_ids, table.logprobs = ids.tobytes(), logprobs.tobytes()
        table.k, table.length = k, len(topk)
    return Response(output.SerializeToString(), media_type=PROTOBUF)


def _json_tensor(data: list[float], shape: list[int]) -> dict[str, Any]:
    return {"data": data, "dtype": "float32", "shape": shape}


def _json(content: Mapping[str, Any]) -> Response:
    """Answers in JSON, where numbers that are not finite are NaN and Infinity."""
    body = pydantic_core.to_json(content, inf_nan_mode="constants")
    return Response(body, media_type="application/json")
