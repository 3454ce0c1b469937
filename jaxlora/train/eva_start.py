"""Runs the base over a job's tokens, to find where EVA starts.

It goes layer by layer, so that on a mesh one layer at a time is copied to one device.
Which tokens are read, and in which batches, depends on the job alone.
"""

import dataclasses
import functools
import typing
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxlora.adapters.eva import Components, first_matrix, num_ranks, update
from jaxlora.adapters.targets import resolve_targets
from jaxlora.data.tokens.samples import TokenizedSample
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.load import FrozenModel
from jaxlora.hf.names import linear_path, linear_shapes
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.routing import Routing
from jaxlora.sharding.global_arrays import everywhere
from jaxlora.train.plan.prepared_job import PreparedJob

BATCH_TOKENS = 4096  # of a batch that the components are updated by, at most
MOST_BATCHES = 16
_ROW_MULTIPLE = 64
# Arrays of the size of a linear's input that `update` has at a time, in float32: the
# input, its centered rows, and these below the components.
_UPDATED = 3


class _Rows(NamedTuple):
    """A batch of samples in rows, as `PackedBatch` has them."""

    token_ids: Any
    positions: Any
    segment_ids: Any
    is_included: Any


def check_tokens(prepared: PreparedJob) -> None:
    """Checks that a job has enough tokens to start by EVA.

    Raises:
        ConfigError: It has too few.
    """
    most = max(module.rank for module in prepared.modules.values())
    largest = max(
        sum(_num_included(prepared, sample) for sample in part)
        for part in _batches(prepared)
    )
    if largest < most:
        raise ConfigError(
            f"job {prepared.name!r} has init_lora_weights=eva, which needs {most} "
            f"tokens to find so many components, and no batch of at most "
            f"{BATCH_TOKENS} tokens has more than {largest} that count. Set "
            "use_label_mask: false in eva_config, or a lower rank or rho."
        )


def start_bytes(prepared: PreparedJob, config: ModelConfig, itemsize: int) -> int:
    """Estimates the memory of the start by EVA, beside the base and the slots.

    They are the hidden states of all batches; one layer's weights, of which a mesh and
    a quantized base need a copy; its activations for a batch; and, in float32, the rows
    of its largest input with what is computed from them.

    Args:
        prepared: The job.
        config: Architecture of the base.
        itemsize: Bytes of an element of the activations.
    """
    data, linears = prepared.train_data, config.linears().values()
    num_rows = min(max(BATCH_TOKENS, data.longest_sample), data.num_tokens)
    num_batches = min(MOST_BATCHES, -(-data.num_tokens // num_rows))
    weights = sum(one.in_features * one.out_features for one in linears)
    inputs = {one.in_features for one in linears}
    activations = num_rows * sum(one.out_features for one in linears)
    hidden = num_batches * num_rows * config.hidden_size
    found = itemsize * (weights + activations + hidden + num_rows * sum(inputs))
    return found + 4 * _UPDATED * num_rows * max(inputs)


def eva_start(prepared: PreparedJob, model: FrozenModel) -> dict[str, np.ndarray]:
    """Returns the first A of each linear of a job, K R, by module name."""
    most = max(module.rank for module in prepared.modules.values())
    batches = _packed(prepared, _batches(prepared))
    batches = [b for b in batches if b.is_included.sum() >= most]
    found, groups = _components(prepared, model, batches)
    job, shapes = prepared.settings, linear_shapes(model.config)
    budget = sum(m.rank for m in resolve_targets(job, tuple(shapes)).values())
    shares = {
        name: np.asarray(found[name].shares)[: module.rank]
        for name, module in prepared.modules.items()
    }
    ranks = num_ranks(shares, groups, budget)
    whiten = bool(_settings(prepared)["whiten"])
    return {
        name: first_matrix(found[name], ranks[name], module.rank, whiten=whiten)
        for name, module in prepared.modules.items()
    }


def _settings(prepared: PreparedJob) -> dict[str, float | bool]:
    settings = prepared.settings.eva_settings
    assert settings is not None
    return settings


def _num_included(prepared: PreparedJob, sample: TokenizedSample) -> int:
    """Returns how many tokens of a sample the components are found from."""
    uses_mask = _settings(prepared)["use_label_mask"]
    return int(sample.is_target.sum()) if uses_mask else len(sample.token_ids)


def _batches(prepared: PreparedJob) -> list[list[TokenizedSample]]:
    """The first samples of the job, in its order, in batches."""
    parts: list[list[TokenizedSample]] = [[]]
    size, num_steps = 0, prepared.order.batches_per_epoch
    settings = prepared.settings.replace(steps=num_steps)
    one_pass = dataclasses.replace(prepared, settings=settings)
    for step in range(num_steps):
        for number in one_pass.sample_numbers(step).tolist():
            sample = prepared.train_data.samples[number]
            length = len(sample.token_ids)
            if parts[-1] and size + length > BATCH_TOKENS:
                if len(parts) == MOST_BATCHES:
                    return parts
                parts.append([])
                size = 0
            parts[-1].append(sample)
            size += length
    return parts


def _packed(
    prepared: PreparedJob, parts: Sequence[Sequence[TokenizedSample]]
) -> list[_Rows]:
    """Puts batches into rows of one shape."""
    sizes = [sum(len(sample.token_ids) for sample in part) for part in parts]
    num_rows = -(-max(sizes) // _ROW_MULTIPLE) * _ROW_MULTIPLE
    uses_mask = _settings(prepared)["use_label_mask"]

    def packed(part: Sequence[TokenizedSample]) -> _Rows:
        rows = _Rows(
            token_ids=np.zeros(num_rows, np.int32),
            positions=np.zeros(num_rows, np.int32),
            segment_ids=np.full(num_rows, -1, np.int32),
            is_included=np.zeros(num_rows, bool),
        )
        end = 0
        for number, sample in enumerate(part):
            start, end = end, end + len(sample.token_ids)
            rows.token_ids[start:end] = sample.token_ids
            rows.positions[start:end] = np.arange(end - start)
            rows.segment_ids[start:end] = number
            rows.is_included[start:end] = sample.is_target if uses_mask else True
        return rows

    return list(map(packed, parts))


def _components(
    prepared: PreparedJob, model: FrozenModel, batches: Sequence[_Rows]
) -> tuple[dict[str, Components], list[list[str]]]:
    """Finds the components of the input of each linear.

    Args:
        prepared: The job.
        model: The base.
        batches: Its batches.

    Returns:
        The components by module name, and the names of the modules by their input.
    """
    longest = max(int(np.bincount(b.segment_ids + 1)[1:].max()) for b in batches)
    options = DecoderOptions(
        dtype=model.dtype, base_format=model.base_format, max_segment_tokens=longest
    )
    whole = DecoderSpec(config=model.config, options=options)
    projections = {
        linear.projection: path for path, linear in model.config.linears().items()
    }
    adapted = {linear_path(name): name for name in prepared.modules}
    hidden: list[Any] = [None] * len(batches)
    found: dict[str, Components] = {}
    groups: list[list[str]] = []
    for layer in range(model.config.num_layers):
        spec, params = _layer(whole, layer, model.params)
        state: dict[str, _Progress] = {}
        for number, rows in enumerate(batches):
            hidden[number], inputs = _run_layer(spec, params, rows, hidden[number])
            for key, x in inputs.items():
                paths = (projections[int(p)] for p in key.split())
                names = [f"layers.{layer}.{path}" for path in paths]
                if names := [adapted[name] for name in names if name in adapted]:
                    progress = state.setdefault(key, _Progress(prepared, names))
                    progress.add(x, rows)
        for progress in state.values():
            assert progress.found is not None
            found |= dict.fromkeys(progress.names, progress.found)
            groups.append(progress.names)
    return found, groups


class _Progress:
    """The components of one input, until they have converged."""

    def __init__(self, prepared: PreparedJob, names: list[str]):
        self.names = names
        self.found: Components | None = None
        self._num = max(prepared.modules[name].rank for name in names)
        self._tau = float(_settings(prepared)["tau"])
        key = [prepared.settings.seed, zlib.crc32(f"eva {names[0]}".encode())]
        self._random = np.random.Generator(np.random.Philox(key=key))
        self._has_converged = False

    def add(self, x: Float[Array, "T K"], rows: _Rows) -> None:
        if self._has_converged:
            return
        features = x.shape[1]
        before = self.found or Components.none(min(self._num, features), features)
        num_probes = min(2 * self._num, features)
        probe = self._random.normal(size=(features, num_probes)).astype(np.float32)
        self.found = update(before, x, rows.is_included, probe)
        similarity = (before.vectors * self.found.vectors).sum(axis=1)
        self._has_converged = bool((similarity >= self._tau).all())


def _layer(
    whole: DecoderSpec, layer: int, params: Mapping[str, Any]
) -> tuple[DecoderSpec, dict[str, Any]]:
    """Returns the stage of a layer, and its weights on one device.

    Layers of one program have one name: that of the first one with its window.
    """
    last, windows = whole.config.num_layers - 1, whole.config.layer_windows
    stage = whole.stage(layer, layer + 1)
    same = layer
    if 0 < layer < last:
        same = next(i for i in range(1, last) if windows[i] == windows[layer])
    spec = whole.stage(same, same + 1)
    here = {path: _local(params[path]) for path in stage.base_shapes()}
    old, new = f"layers.{layer}.", f"layers.{same}."
    return spec, {
        new + path.removeprefix(old) if path.startswith(old) else path: array
        for path, array in here.items()
    }


def _local(array: Any) -> Any:
    """Returns an array on one device of this process."""
    if isinstance(array.sharding, NamedSharding):
        return jnp.asarray(np.asarray(everywhere(array)))
    return array


@functools.partial(jax.jit, static_argnums=0)
@typing.no_type_check
def _run_layer(spec, params, rows, h):
    """Runs a layer; returns what it makes of h, and the inputs of its linears.

    The key of an input has the numbers of the projections that it goes to.
    """
    decoder = spec.bind(params)
    blocks = jnp.full(len(rows.token_ids) // _ROW_MULTIPLE, -1, jnp.int32)
    routing = Routing(block_adapter=blocks, seen={})
    if h is None:
        h = decoder.embed(rows.token_ids, blocks)
    h, _ = decoder.run_layers(h, rows.positions, rows.segment_ids, routing)
    inputs = []
    for (_, projection), x in routing.seen.items():
        same = next((group for group, other in inputs if other is x), None)
        if same is None:
            inputs.append(([projection], x))
        else:
            same.append(projection)
    return h, {" ".join(map(str, group)): x for group, x in inputs}
