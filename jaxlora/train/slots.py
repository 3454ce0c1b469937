"""The slots: a fixed set of tables that jobs join and leave without recompiling."""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxlora.adapter import Adapter, LoraWeights
from jaxlora.config import LoraJob
from jaxlora.hf.names import linear_path
from jaxlora.models.decoder import DecoderSpec
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.targets import ModuleLora
from jaxlora.train.optimizer import AdapterState, zero_state
from jaxlora.train.step import CompiledSteps

Modules = Mapping[str, ModuleLora]


def slot_shape(
    jobs_modules: Sequence[Modules], num_slots: int | None, slot_rank: int | None
) -> SlotShape:
    """The smallest tables that hold the jobs, or the ones that the user asked for.

    Args:
        jobs_modules: The adapted modules of each job.
        num_slots: G; None: one for each job.
        slot_rank: R; None: the largest rank of any job.
    """
    largest = max(m.rank for modules in jobs_modules for m in modules.values())
    return SlotShape(
        num_slots=num_slots or len(jobs_modules), rank=slot_rank or largest
    )


def fresh_adapter(
    job: LoraJob, modules: Modules, shapes: Mapping[str, tuple[int, int]]
) -> Adapter:
    """PEFT's start: A uniform in +-1/sqrt(K) (kaiming, a = sqrt 5), B zero.

    Each module draws from its own stream, keyed by the job's seed and the module's
    name, so that neither other jobs nor other targets change it.

    Args:
        job: Whose adapter.
        modules: The modules that it adapts.
        shapes: (K, N) of each linear, by module name.
    """
    weights = {}
    for name, module in modules.items():
        k, n = shapes[name]
        stream = np.random.Philox(key=[job.seed, zlib.crc32(name.encode())])
        bound = k**-0.5
        a = np.random.Generator(stream).uniform(-bound, bound, (k, module.rank))
        weights[name] = LoraWeights(
            a=a.astype(np.float32),
            b=np.zeros((module.rank, n), np.float32),
            rank=module.rank,
            lora_alpha=module.lora_alpha,
        )
    return Adapter(modules=weights, use_rslora=job.use_rslora, dropout=job.dropout)


class SlotTable:
    """The adapters on the device, by slot.

    Attributes:
        state: Adapters and optimiser state of all slots.
        settings: Scaling, dropout and active of every adapted linear, by path.
    """

    def __init__(self, spec: DecoderSpec, steps: CompiledSteps):
        self._spec, self._steps = spec, steps
        self.state = zero_state(spec.adapter_shapes())
        self._host_settings = {
            path: np.zeros(s.shape, s.dtype) for path, s in spec.slot_shapes().items()
        }
        self._upload_settings()

    def _upload_settings(self) -> None:
        self.settings = {p: jnp.array(v) for p, v in self._host_settings.items()}

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot, with an optimiser that has seen nothing."""
        rows = self._empty_rows()
        for name, weights in adapter.modules.items():
            path = linear_path(name)
            rows[f"{path}.lora_a"][:, : weights.rank] = weights.a
            rows[f"{path}.lora_b"][: weights.rank] = weights.b
        self._write(slot, rows)

    def activate(self, slot: int, modules: Modules, dropout: float) -> None:
        """Sets a slot's scaling and dropout; its weights stay."""
        for values in self._host_settings.values():
            values[slot] = 0
        for name, module in modules.items():
            path = linear_path(name)
            self._host_settings[f"{path}.scaling"][slot] = module.scaling
            self._host_settings[f"{path}.dropout"][slot] = dropout
            self._host_settings[f"{path}.active"][slot] = True
        self._upload_settings()

    def clear(self, slot: int) -> None:
        """Empties a slot: weights, optimiser state and settings."""
        self._write(slot, self._empty_rows())
        for values in self._host_settings.values():
            values[slot] = 0
        self._upload_settings()

    def read(self, slot: int, modules: Modules, job: LoraJob) -> Adapter:
        """The adapter in a slot, at its modules' real ranks."""
        weights = {}
        for name, module in modules.items():
            path = linear_path(name)
            a = np.asarray(self.state.params[f"{path}.lora_a"][slot])
            b = np.asarray(self.state.params[f"{path}.lora_b"][slot])
            weights[name] = LoraWeights(
                a=np.array(a[:, : module.rank]),
                b=np.array(b[: module.rank]),
                rank=module.rank,
                lora_alpha=module.lora_alpha,
            )
        return Adapter(modules=weights, use_rslora=job.use_rslora, dropout=job.dropout)

    def _empty_rows(self) -> dict[str, np.ndarray]:
        shapes = self._spec.adapter_shapes()
        return {path: np.zeros(s.shape[1:], s.dtype) for path, s in shapes.items()}

    def _write(self, slot: int, rows: dict[str, np.ndarray]) -> None:
        nothing = {path: np.zeros_like(row) for path, row in rows.items()}
        new = AdapterState(params=rows, mu=nothing, nu=nothing, gradients=nothing)
        self.state = self._steps.write_slot(self.state, np.int32(slot), new)

    def restore(self, saved: AdapterState) -> None:
        """Takes over the tables of a checkpoint."""
        self.state = dataclasses.replace(saved, gradients=self.state.gradients)
