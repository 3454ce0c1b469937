"""The state of a job that has done nothing, with the adapter that it starts from."""

import dataclasses
from typing import Any

from jaxlora.adapters.adapter import Adapter, TokenRowValues
from jaxlora.adapters.fresh import (
    blank_adapter,
    blank_rows,
    fresh_adapter,
    fresh_rows,
    fresh_score,
)
from jaxlora.hf.load import FrozenModel, unquantized_reader
from jaxlora.hf.names import linear_path
from jaxlora.models.base_format import kernel_of
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.train.job_state import JobState


def start_job(prepared: PreparedJob, model: FrozenModel) -> JobState:
    """Returns a job that has done nothing, with the adapter that it starts from."""
    if prepared.start is not None:
        return JobState(prepared, prepared.start)
    paths = {name: linear_path(name) for name in prepared.modules}
    params, base_format = model.params, model.base_format
    given = prepared.settings, prepared.modules

    def kernels() -> dict[str, Any]:
        return {
            name: kernel_of(params, f"{path}.kernel", base_format)
            for name, path in paths.items()
        }

    def biases() -> dict[str, Any]:
        found = {name: f"{path}.bias" for name, path in paths.items()}
        return {name: params[bias] for name, bias in found.items() if bias in params}

    def whole(adapter: Adapter, rows: dict[str, TokenRowValues]) -> Adapter:
        score = None
        if prepared.objective.has_score:
            score = fresh_score(prepared.settings, model.config.hidden_size)
        return dataclasses.replace(adapter, score=score, token_rows=rows)

    token_ids, stored = prepared.trained_rows(model.config.vocab_size), None
    if prepared.settings.loftq_bits is not None:
        stored = unquantized_reader(model)

    def draw() -> Adapter:
        rows = fresh_rows(token_ids, params)
        made = fresh_adapter(*given, kernels(), model.dtype, biases(), stored)
        return whole(made, rows)

    rows = blank_rows(token_ids, model.config.hidden_size)
    blank = blank_adapter(*given, kernels(), biases())
    return JobState(prepared, whole(blank, rows), draw)
