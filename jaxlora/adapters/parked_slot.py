"""The state of a slot as a value on the host, which any slot can continue."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Kind, evaluated, own_shapes
from jaxlora.adapters.optimizers.table import ADAMW, OPTIMIZERS
from jaxlora.models.config import shared_path
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.models.structure import linear_path
from jaxlora.modules.trained_tensors import tensor_paths, unpadded

# The parts of a slot's state that outlast a global batch: the weights, and each state
# tensor of the optimizer, such as `mu`.
PARAMS: Kind = "params"


def without_values(adapter: Adapter) -> Adapter:
    """Returns an adapter with arrays that take no memory."""
    rows = {
        path: np.broadcast_to(np.zeros((), array.dtype), array.shape)
        for path, array in adapter.by_path().items()
    }
    return adapter_from_rows(rows, adapter)


def adapter_from_rows(rows: Mapping[str, np.ndarray], like: Adapter) -> Adapter:
    """Makes an adapter from one slot's rows of the tables, as views of them.

    Args:
        rows: Trained tensors of each adapted linear at the slots' rank, by path. They
            are not changed later.
        like: Adapter whose modules and ranks are taken.
    """
    modules = {}
    for name, old in like.modules.items():
        tensors = {
            tensor.name: rows[path][unpadded(old.tensors[tensor.name].shape)]
            for tensor, path in tensor_paths(linear_path(name))
            if tensor.name in old.tensors
        }
        modules[name] = dataclasses.replace(old, tensors=tensors)
    outside = {}
    for name, old in like.outside.items():
        array = rows[SLOT_MODULES[name].path][unpadded(old.array.shape)]
        outside[name] = dataclasses.replace(old, array=array)
    return dataclasses.replace(like, modules=modules, outside=outside)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParkedSlot:
    """The state of a slot between two global batches, as a value on the host.

    Together with the job's progress, it is all that the job needs to continue with the
    same bits, in any slot of any run whose rank is large enough. It does not depend on
    how the device stacks or splits its tables.

    Attributes:
        params: Trained tensors at the adapter's own rank, float32, by dotted path
            (`layers.0.mlp.up_proj.lora_a`).
        optimizer_state: State tensors of the job's optimizer, by kind, each by path.
        optimizer: Name of the optimizer.

    Raises:
        ValueError: The optimizer has no such state for these weights.
    """

    params: dict[str, np.ndarray]
    optimizer_state: dict[Kind, dict[str, np.ndarray]]
    optimizer: str = ADAMW.name

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            return  # it can still be exported
        shapes = {path: array.shape for path, array in self.params.items()}
        wanted = own_shapes(self.optimizer, shapes)
        found = {
            kind: {path: array.shape for path, array in tensors.items()}
            for kind, tensors in self.optimizer_state.items()
            if tensors or kind in wanted
        }
        if found != wanted:
            kinds = ", ".join([PARAMS, *wanted])
            raise ValueError(
                f"{kinds} must have the paths and shapes that {self.optimizer} gives "
                "them."
            )

    @staticmethod
    def of(
        tensors: Mapping[Kind, dict[str, np.ndarray]], optimizer: str = ADAMW.name
    ) -> "ParkedSlot":
        """Makes a state from the tensors of each kind, by path."""
        state = {kind: tensors[kind] for kind in tensors if kind != PARAMS}
        return ParkedSlot(
            params=tensors[PARAMS], optimizer_state=state, optimizer=optimizer
        )

    def by_kind(self) -> dict[Kind, dict[str, np.ndarray]]:
        """Returns the tensors of each kind, by path."""
        return {PARAMS: self.params} | self.optimizer_state

    def limited_to(self, paths: Collection[str]) -> "ParkedSlot":
        """Returns the part of the state in some linears, such as those of a stage.

        Args:
            paths: Dotted paths of the linears (`layers.0.mlp.up_proj`); the experts of
                a layer share one, see `shared_path`.
        """

        def mine(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {p: a for p, a in tensors.items() if _module_of(p) in paths}

        kinds = {kind: mine(tensors) for kind, tensors in self.by_kind().items()}
        return ParkedSlot.of(kinds, self.optimizer)

    @staticmethod
    def join(parts: Sequence["ParkedSlot"]) -> "ParkedSlot":
        """Joins the parts of a state in different linears."""
        joined: dict[Kind, dict[str, np.ndarray]] = {}
        for part in parts:
            for kind, tensors in part.by_kind().items():
                joined.setdefault(kind, {}).update(tensors)
        return ParkedSlot.of(joined, parts[0].optimizer)

    def check_like(self, adapter: Adapter) -> None:
        """Checks that the shapes of the state match those of an adapter.

        Raises:
            ValueError: It has other modules or ranks.
        """
        shapes = {path: array.shape for path, array in adapter.by_path().items()}
        if {path: array.shape for path, array in self.params.items()} != shapes:
            raise ValueError("the parked state has other shapes than the adapter.")

    def adapter(self, like: Adapter) -> Adapter:
        """Returns the adapter as it is evaluated and exported.

        Args:
            like: Adapter whose modules and ranks are taken.
        """
        state = self.optimizer_state
        weights = {
            path: evaluated(
                self.optimizer,
                path,
                weight,
                {kind: state[kind][path] for kind in state if path in state[kind]},
            )
            for path, weight in self.params.items()
        }
        return adapter_from_rows(weights, like)


def _module_of(path: str) -> str:
    return shared_path(path.rpartition(".")[0])


# Returns the state of a slot as it was when the snapshot was taken; a ValueError says
# that the slot was empty. Any thread may call it, and training may go on.
ReadSlot = Callable[[int], ParkedSlot]
