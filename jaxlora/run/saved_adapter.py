"""An adapter in a checkpoint: its shape, and the layout of its tensors."""

import dataclasses
from typing import Annotated

import numpy as np
from pydantic import Field

from jaxlora.adapters.adapter import Adapter, LoraWeights, TokenRowValues
from jaxlora.adapters.optimizers.state import Kind
from jaxlora.adapters.vera import VeraMatrices
from jaxlora.hf.names import linear_path
from jaxlora.models.score import SCORE_PATH
from jaxlora.models.token_rows import ROW_PATHS
from jaxlora.models.whole_tables import WHOLE_PATHS
from jaxlora.modules.trained_tensors import tensor_path, tensor_paths, tensors_with
from jaxlora.run.saved_fields import STRICT, LinearName, Size

_Key = Annotated[int, Field(ge=0, lt=2**32)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedAdapter:
    """The shape of a job's adapter, and which of its weights are exported.

    Attributes:
        modules: (rank, lora_alpha) of each adapted linear, by name.
        use_rslora: Whether the scaling divides by the root of the rank.
        dropout: Dropout rate in training.
        keep_best: Whether the weights of the best evaluation are exported.
        has_score: Whether it has the score head of a reward model.
        vera: Fields of its `VeraMatrices`; None: it is not VeRA.
        token_ids: Tokens whose rows of the embedding it trains.
        head_token_ids: Tokens whose rows of an untied head it trains.
        modules_to_save: Modules of which it trains whole copies.
    """

    __pydantic_config__ = STRICT

    modules: dict[LinearName, tuple[Size, Annotated[float, Field(gt=0)]]]
    use_rslora: bool
    dropout: Annotated[float, Field(ge=0, lt=1)]
    keep_best: bool
    has_score: bool = False
    loftq_bits: int | None = None
    vera: tuple[_Key, Size, Size, Size, bool] | None = None
    token_ids: list[_TokenId] = dataclasses.field(default_factory=list)
    head_token_ids: list[_TokenId] = dataclasses.field(default_factory=list)
    modules_to_save: list[str] = dataclasses.field(default_factory=list)

    @property
    def ids_by_module(self) -> dict[str, list[int]]:
        """Tokens whose rows it trains, by name of the module, which has some."""
        ids = {"embed_tokens": self.token_ids, "lm_head": self.head_token_ids}
        return {module: given for module, given in ids.items() if given}

    def adapter(self, params: dict[str, np.ndarray]) -> Adapter:
        """Makes the adapter of these weights.

        Args:
            params: Trained tensors at the adapter's own rank, by path.
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
        rows = {
            module: TokenRowValues(tuple(ids), params[ROW_PATHS[module]])
            for module, ids in self.ids_by_module.items()
        }
        for module in self.modules_to_save:
            table = params[WHOLE_PATHS[module]]
            rows[module] = TokenRowValues(range(len(table)), table)
        return Adapter(
            modules=modules,
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            score=params[SCORE_PATH] if self.has_score else None,
            vera=None if self.vera is None else VeraMatrices(*self.vera),
            token_rows=rows,
            loftq_bits=self.loftq_bits,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """Layout of the weights and optimizer state of a job in a checkpoint.

    Attributes:
        shapes: Shape of each tensor at the job's own rank, by dotted path, in the order
            in which the arrays hold them.
        checksums: XXH3 of the array of each kind: the weights, and each state tensor
            of the job's optimizer.
        state_shapes: Shapes of the tensors of each kind that differ from `shapes`.
    """

    __pydantic_config__ = STRICT

    shapes: dict[str, Annotated[list[Size], Field(min_length=1, max_length=2)]]
    checksums: dict[Kind, str]
    state_shapes: dict[Kind, dict[str, list[Size]]] = dataclasses.field(
        default_factory=dict
    )

    def shapes_of(self, kind: Kind) -> dict[str, list[int]]:
        """Shape of each tensor of a kind, in the order of its array."""
        return self.state_shapes.get(kind, self.shapes)

    def check(self, name: str, adapter: SavedAdapter) -> None:
        """Checks that the tensors are those of an adapter.

        Args:
            name: Name of the job.
            adapter: The shape of the job's adapter.

        Raises:
            ValueError: A tensor is missing or unknown, or the shapes do not match.
        """
        if unknown := sorted(set(adapter.modules_to_save) - WHOLE_PATHS.keys()):
            raise ValueError(f"job {name}: {unknown[0]} is never copied whole.")
        rows = adapter.ids_by_module.items()
        # The number of dimensions of each, and its rows if they are known.
        wanted = {
            **({SCORE_PATH: (1, None)} if adapter.has_score else {}),
            **{ROW_PATHS[module]: (2, len(ids)) for module, ids in rows},
            **{WHOLE_PATHS[module]: (2, None) for module in adapter.modules_to_save},
        }
        for path, (num_dimensions, num_rows) in wanted.items():
            shape = self.shapes.get(path, [])
            if len(shape) != num_dimensions or num_rows not in (None, shape[0]):
                raise ValueError(f"job {name}: {path} has shape {shape or None}.")
        paths = set(wanted)
        for module, (rank, _) in adapter.modules.items():
            sizes: dict[str, int] = {"R": rank}
            linear = linear_path(module)
            settings = {t.setting for t, p in tensor_paths(linear) if p in self.shapes}
            for tensor in tensors_with(settings.__contains__):
                path = tensor_path(linear, tensor)
                paths.add(path)
                shape = self.shapes.get(path)
                if shape is None or len(shape) != len(tensor.dimensions):
                    raise ValueError(f"job {name}: {path} has shape {shape}.")
                for letter, size in zip(tensor.dimensions, shape, strict=True):
                    if sizes.setdefault(letter, size) != size:
                        raise ValueError(
                            f"job {name}: {path} has shape {shape}, with {letter} = "
                            f"{size} instead of {sizes[letter]}."
                        )
        if unknown := sorted(self.shapes.keys() - paths):
            raise ValueError(f"job {name} has a tensor {unknown[0]!r} of no module.")
