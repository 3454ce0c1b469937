"""The slots: a fixed set of tables that jobs join and leave without recompiling."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.optimizer import AdapterState, Tables, zero_state
from jaxlora.adapters.tensors import tensor_paths, trained_tensors, unpadded
from jaxlora.config import LoraJob
from jaxlora.hf.names import linear_path
from jaxlora.models.spec import DecoderSpec, SlotSettings
from jaxlora.models.stacks import to_paths
from jaxlora.targets import ModuleLora

# Puts an adapter's rows into a slot of the state, with empty optimiser state.
WriteSlot = Callable[[AdapterState, np.int32, dict[str, np.ndarray]], AdapterState]


def fresh_adapter(
    job: LoraJob,
    modules: Mapping[str, ModuleLora],
    kernels: Mapping[str, Any],
) -> Adapter:
    """Makes the adapter that a new job starts from, with PEFT's initial values.

    Each module draws from its own stream, keyed by the job's seed and the module's
    name, so that neither other jobs nor other targets change it.

    Args:
        job: The job that the adapter is for.
        modules: The modules that the job adapts.
        kernels: Frozen weight of each linear, K N, by module name.
    """
    weights = {}
    for name, module in modules.items():
        stream = np.random.Philox(key=[job.seed, zlib.crc32(name.encode())])
        rng = np.random.Generator(stream)
        weights[name] = LoraWeights(
            tensors={
                t.name: t.start(rng, kernels[name], module.rank).astype(np.float32)
                for t in trained_tensors()
            },
            rank=module.rank,
            lora_alpha=module.lora_alpha,
        )
    return Adapter(modules=weights, use_rslora=job.use_rslora, dropout=job.dropout)


def adapter_from_rows(rows: Mapping[str, np.ndarray], like: Adapter) -> Adapter:
    """Makes an adapter from one slot's rows of the tables.

    Args:
        rows: Trained tensors of each adapted linear at the slots' rank, by path.
        like: Adapter whose modules and ranks are taken.
    """
    modules = {}
    for name, old in like.modules.items():
        tensors = {
            tensor.name: np.array(rows[path][unpadded(old.tensors[tensor.name].shape)])
            for tensor, path in tensor_paths(linear_path(name))
        }
        modules[name] = dataclasses.replace(old, tensors=tensors)
    return dataclasses.replace(like, modules=modules)


class SlotTable:
    """The adapters on the device, by slot.

    Attributes:
        state: Adapters and optimiser state of all slots.
        settings: Scaling, dropout and rank of the slots in every adapted linear.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        write_slot: WriteSlot,
        sharding: jax.sharding.Sharding | None = None,
    ):
        """Makes empty slots.

        Args:
            spec: The decoder.
            write_slot: Its compiled function that writes a slot.
            sharding: Sharding of the base model; None: JAX's default device. The state
                is committed to it from the start, because JAX compiles a function again
                for each combination of committed and uncommitted arrays.
        """
        self._spec, self._write_slot = spec, write_slot
        assert spec.slots is not None
        num_slots = spec.slots.num_slots
        where = jnp.zeros(()).sharding if sharding is None else sharding
        self.state = zero_state(spec.adapter_shapes(), num_slots, where)
        self._places = {path: i for i, path in enumerate(spec.adapted)}
        shape = len(self._places), num_slots
        self._host_settings = SlotSettings(
            scaling=np.zeros(shape, np.float32),
            dropout=np.zeros(shape, np.float32),
            rank=np.zeros(shape, np.int32),
        )
        self._upload_settings()

    def _upload_settings(self) -> None:
        # The arrays are copied, as a pending upload may read or share their memory.
        copies = jax.tree.map(np.copy, self._host_settings)
        self.settings: SlotSettings = jax.device_put(copies)

    def _forget_settings(self, slot: int) -> None:
        for values in jax.tree.leaves(self._host_settings):
            values[:, slot] = 0

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot, with empty optimiser state."""
        rows = self._empty_rows()
        tables = to_paths(self._spec.stacks, rows, axis=0)  # views
        for path, tensor in adapter.by_path().items():
            tables[path][unpadded(tensor.shape)] = tensor
        self._write(slot, rows)

    def activate(self, slot: int, adapter: Adapter) -> None:
        """Sets a slot's scaling and dropout; its weights stay."""
        self._forget_settings(slot)
        for name, weights in adapter.modules.items():
            place = self._places[linear_path(name)], slot
            self._host_settings.scaling[place] = adapter.scaling(weights)
            self._host_settings.dropout[place] = adapter.dropout
            self._host_settings.rank[place] = weights.rank
        self._upload_settings()

    def clear(self, slot: int) -> None:
        """Empties a slot: weights, optimiser state and settings."""
        self._write(slot, self._empty_rows())
        self._forget_settings(slot)
        self._upload_settings()

    def read(self, slot: int, like: Adapter) -> Adapter:
        """The adapter in a slot, at the ranks of `like`, which it started from."""
        rows = _rows(self.state.params, np.int32(slot))
        tables = to_paths(self._spec.stacks, jax.device_get(rows), axis=0)
        return adapter_from_rows(tables, like)

    def _empty_rows(self) -> dict[str, np.ndarray]:
        shapes = self._spec.adapter_shapes()
        return {path: np.zeros(s.shape[1:], s.dtype) for path, s in shapes.items()}

    def _write(self, slot: int, rows: dict[str, np.ndarray]) -> None:
        self.state = self._write_slot(self.state, np.int32(slot), rows)


@jax.jit
def _rows(tables: Tables, slot) -> dict[str, jax.Array]:
    """Reads one slot's rows in a single call, because many small ones are slow."""
    return {path: table[slot] for path, table in tables.items()}
