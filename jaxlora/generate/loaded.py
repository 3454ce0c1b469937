"""Decoders that are ready to generate: the base with adapters in slots of their own."""

import dataclasses
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.settings_table import SettingsTable
from jaxlora.adapters.slot_state import padded_rows
from jaxlora.generate.programs import Programs, Tables, Weights, programs_of
from jaxlora.hf.load import FrozenModel, OpenedModel
from jaxlora.models.config import is_of_expert, shared_path
from jaxlora.models.forward import Base
from jaxlora.models.options import DecoderOptions
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_path, linear_shapes
from jaxlora.modules.slot_shape import SlotShape, largest_rows
from jaxlora.modules.trained_tensors import tensor_of, tensor_settings

NO_ADAPTER = 0  # the slot of the base model, which stays empty


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedStage:
    """A stage of a decoder, ready to generate as soon as its base is loaded.

    Attributes:
        spec: Its layers, with weights as a whole.
        base: Its frozen weights, which a mesh may divide; or the model that is being
            loaded, whose only stage it is.
        adapters: Its slot tables, by name of the stack, which a mesh may divide; empty
            without slots.
        settings: Settings of its slots; None without slots.
        mesh: Its devices; None: a single one, without a mesh.
    """

    spec: DecoderSpec
    base: Base | Future[FrozenModel]
    adapters: Tables
    settings: SlotSettings | None
    mesh: Mesh | None = None

    def weights(self, *, wait: bool) -> Weights:
        """Returns its arrays; of a base that is not loaded, shapes or what will be."""
        base: Any = self.base
        if isinstance(base, Future):
            base = base.result().params if wait else self.spec.base_shapes()
        return Weights(base, self.adapters, self.settings)

    @property
    def place(self) -> Mesh | Sharding:
        """Its mesh, or where its weights are."""
        if self.mesh is not None:
            return self.mesh
        if isinstance(self.base, Future):  # to JAX's default device
            return jnp.zeros(()).sharding
        return next(iter(self.base.values())).sharding


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedDecoder:
    """A decoder on one device, or on the devices of a mesh.

    Attributes:
        stages: The stages, from the embedding to the head.
    """

    stages: tuple[LoadedStage, ...]

    @property
    def spec(self) -> DecoderSpec:
        """The first stage, which has the configuration of the whole model."""
        return self.stages[0].spec

    def weights(self, *, wait: bool = True) -> tuple[Weights, ...]:
        """Returns the arrays of each stage.

        Args:
            wait: Whether to wait for a base that is being loaded, or else to return
                its shapes.
        """
        return tuple(stage.weights(wait=wait) for stage in self.stages)

    @property
    def programs(self) -> Programs:
        """The functions that run it."""
        return programs_of(tuple((stage.spec, stage.place) for stage in self.stages))


def load_decoder(
    model: FrozenModel | OpenedModel,
    adapters: Iterable[Adapter],
    loading: Future[FrozenModel] | None = None,
) -> LoadedDecoder:
    """Makes a decoder with a slot for the base model and one for each adapter.

    Their matrices are rounded to the model's dtype, as training does for its products.
    VeRA is loaded as the LoRA that it is equal to.

    Args:
        model: The base model, on one device or without weights.
        adapters: The adapters; their slots are numbered from 1.
        loading: The model that is being loaded, if it has no weights.
    """
    shapes = linear_shapes(model.config)
    adapters = tuple(adapter.as_lora(shapes) for adapter in adapters)
    for adapter in adapters:
        adapter.check_base(model.config)
    options = DecoderOptions(
        dtype=model.dtype, base_format=model.base_format, max_segment_tokens=1
    )
    adapted = {shared_path(linear_path(n)) for a in adapters for n in a.modules}
    spec = DecoderSpec(
        config=model.config,
        options=options,
        slots=_slot_shape(adapters),
        adapted=tuple(sorted(adapted)),
    )
    if isinstance(model, FrozenModel):
        base: Any = model.params
    else:
        assert loading is not None
        base = loading
    tables, settings = {}, None
    if adapters:
        tables, settings = _tables(spec, adapters), _settings(spec, adapters)
    stage = LoadedStage(spec=spec, base=base, adapters=tables, settings=settings)
    return LoadedDecoder(stages=(stage,))


def _slot_shape(adapters: tuple[Adapter, ...]) -> SlotShape | None:
    if not adapters:
        return None
    modules = [own for adapter in adapters for own in adapter.modules.items()]
    ranks = {is_expert: [1] for is_expert in (False, True)}
    for name, weights in modules:
        ranks[is_of_expert(name)].append(weights.rank)
    return SlotShape(
        num_slots=len(adapters) + 1,
        # An adapter may have nothing but the embedding or the head.
        rank=max(ranks[False]),
        expert_rank=max(ranks[True]),
        use_dropout=False,
        settings=tuple(
            s for s in tensor_settings() if any(a.is_set(s) for a in adapters)
        ),
        outside=largest_rows(adapter.tokens for adapter in adapters),
    )


def _tables(spec: DecoderSpec, adapters: tuple[Adapter, ...]) -> Tables:
    """Stacks the trained tensors of the slots, of which the first has none."""

    def shape(name: str, table: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = spec.options.dtype if tensor_of(name).is_matrix else table.dtype
        return jax.ShapeDtypeStruct(table.shape, dtype)

    shapes = {name: shape(name, table) for name, table in spec.adapter_shapes().items()}
    slots = [{}, *(adapter.by_path() for adapter in adapters)]
    rows = [padded_rows(spec.stacks, shapes, tensors) for tensors in slots]
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *rows)


def _settings(spec: DecoderSpec, adapters: tuple[Adapter, ...]) -> SlotSettings:
    table = SettingsTable(spec)
    table.set(dict(enumerate(adapters, NO_ADAPTER + 1)))
    return table.settings
