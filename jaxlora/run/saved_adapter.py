"""An adapter in a checkpoint: its modules, and the layout of its tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from jaxlora.adapters.adapter import Adapter, LoraWeights, TokenRowValues
from jaxlora.adapters.optimizers.state import Kind, own_shapes
from jaxlora.adapters.optimizers.table import evaluates_other_weights
from jaxlora.adapters.parked_slot import PARAMS
from jaxlora.adapters.vera import VeraMatrices
from jaxlora.hf.names import linear_path
from jaxlora.models.score import SCORE_PATH
from jaxlora.models.token_rows import ROW_PATHS
from jaxlora.models.whole_tables import WHOLE_PATHS
from jaxlora.modules.trained_tensors import tensor_paths
from jaxlora.run.saved_fields import STRICT, LinearName, Size

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _table_name(name: str) -> str:
    if name not in WHOLE_PATHS:
        raise ValueError(f"{name!r} is no table of tokens.")
    return name


_Table = Annotated[str, AfterValidator(_table_name)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedAdapter:
    """The adapter of a job that has begun and not ended; its tensors lie in a file.

    Attributes:
        modules: (rank, lora_alpha) of each adapted linear, by name.
        use_rslora: Whether the scaling divides by the root of the rank.
        dropout: Dropout rate in training.
        shapes: Shape of each trained tensor at the job's own rank, by dotted path, in
            the order in which the file holds them.
        optimizer: Name of the job's optimizer, from which the kinds and the shapes of
            its state tensors follow.
        has_score: Whether it has the score head of a reward model.
        loftq_bits: See `Adapter`.
        vera: Its matrices; None: it is not VeRA.
        token_ids: Tokens whose rows it trains, by name of the module.
        modules_to_save: Modules of which it trains whole copies.
    """

    __pydantic_config__ = STRICT

    modules: dict[LinearName, tuple[Size, Annotated[float, Field(gt=0)]]]
    use_rslora: bool
    dropout: Annotated[float, Field(ge=0, lt=1)]
    shapes: dict[str, tuple[Size, ...]]
    optimizer: str
    has_score: bool = False
    loftq_bits: int | None = None
    vera: VeraMatrices | None = None
    token_ids: dict[_Table, tuple[_TokenId, ...]] = dataclasses.field(
        default_factory=dict
    )
    modules_to_save: tuple[_Table, ...] = ()

    @staticmethod
    def of(adapter: Adapter, optimizer: str) -> "SavedAdapter":
        """Describes an adapter; its values do not matter."""
        return SavedAdapter(
            modules={n: (w.rank, w.lora_alpha) for n, w in adapter.modules.items()},
            use_rslora=adapter.use_rslora,
            dropout=adapter.dropout,
            shapes={path: x.shape for path, x in adapter.by_path().items()},
            optimizer=optimizer,
            has_score=adapter.score is not None,
            loftq_bits=adapter.loftq_bits,
            vera=adapter.vera,
            token_ids={m: ids for m, ids in adapter.token_ids.items() if ids},
            modules_to_save=adapter.modules_to_save,
        )

    def kinds(
        self, *, exported_only: bool = False
    ) -> dict[Kind, Mapping[str, tuple[int, ...]]]:
        """Returns the shapes of the tensors of each kind, by path.

        Args:
            exported_only: Whether to leave out what an exported adapter does not need.
        """
        kinds: dict[Kind, Mapping[str, tuple[int, ...]]] = {PARAMS: self.shapes}
        if exported_only and not evaluates_other_weights(self.optimizer):
            return kinds
        return {**kinds, **own_shapes(self.optimizer, self.shapes)}

    def adapter(self, params: Mapping[str, np.ndarray]) -> Adapter:
        """Makes the adapter of these weights.

        Args:
            params: Trained tensors at the adapter's own rank, by path.

        Raises:
            ValueError: A tensor is missing or unknown, or the shapes do not match.
        """
        modules = {
            name: LoraWeights(
                tensors={
                    tensor.name: params[path]
                    for tensor, path in tensor_paths(linear_path(name))
                    if path in params
                },
                rank=rank,
                lora_alpha=lora_alpha,
            )
            for name, (rank, lora_alpha) in self.modules.items()
        }
        rows: dict[str, TokenRowValues] = {
            module: TokenRowValues(ids, params[ROW_PATHS[module]])
            for module, ids in self.token_ids.items()
        }
        for module in self.modules_to_save:
            table = params[WHOLE_PATHS[module]]
            rows[module] = TokenRowValues(range(len(table)), table)
        made = Adapter(
            modules=modules,
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            score=params[SCORE_PATH] if self.has_score else None,
            vera=self.vera,
            token_rows=rows,
            loftq_bits=self.loftq_bits,
        )
        if unknown := sorted(params.keys() - made.by_path().keys()):
            raise ValueError(f"the tensor {unknown[0]!r} is of no module")
        return made
