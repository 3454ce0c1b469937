"""What is asked of an engine beside its calls: checked datums, adapters and files.

`jaxlora.Session` and the server use it, so both check and write the same.
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.export_record import ExportRecord
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.config import DataConfig, LoraJob
from jaxlora.errors import DataError, JaxloraError
from jaxlora.hf.load import FrozenModel
from jaxlora.models.base_format import kernel_of
from jaxlora.models.structure import linear_names, linear_path, linear_shapes
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import Engine, OpenAdapter, PassCall
from jaxlora.session.state_file import read_state, write_state


def pass_call(
    engine: Engine,
    data: Sequence[Datum],
    loss: ChosenLoss,
    *,
    is_training: bool,
    metrics: Mapping[str, float] | None = None,
) -> PassCall:
    """Returns the call for a pass over datums.

    Args:
        engine: The engine.
        data: The datums.
        loss: The loss.
        is_training: Whether it adds to the adapter's gradients.
        metrics: Metrics that take the place of those that are computed.

    Raises:
        JaxloraError: A datum is too long for a microbatch, has tokens that the model
            lacks, or lacks what the loss reads, or there is none.
    """
    samples = []
    for number, datum in enumerate(data):
        try:
            check_datum(engine, datum)
            samples.append(loss.sample(datum))
        except JaxloraError as error:
            raise type(error)(f"datum {number}: {error}") from None
    if not samples:
        raise DataError("there are no datums. Give one or more.")
    return PassCall(samples=samples, is_training=is_training, given=metrics or {})


def check_datum(engine: Engine, datum: Datum) -> None:
    """Checks that a model can read a datum.

    Raises:
        DataError: It is too long for a microbatch, or has tokens that the model lacks.
    """
    if not isinstance(datum, Datum):
        raise DataError(f"it is {datum!r:.60}. Give a jaxlora.Datum.")
    most, size = engine.most_tokens, engine.model.config.vocab_size
    if len(datum.tokens) > most:
        raise DataError(
            f"it has {len(datum.tokens)} positions, and there is room for {most}. "
            "Shorten it, or set microbatch_tokens when the session is made, up to "
            "the model's max_position_embeddings."
        )
    largest = max(datum.tokens.max(), datum.target_tokens.max())
    if largest >= size:
        raise DataError(f"it has token {largest}, and the model has {size} tokens.")


def new_adapter(
    engine: Engine,
    name: str,
    *,
    rank: int | None = None,
    lora_alpha: float = 32.0,
    use_rslora: bool = False,
    target_modules: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Adapter:
    """Returns an adapter with fresh weights; arguments as for `Session.add_adapter`.

    Raises:
        ConfigError: A setting cannot be used.
    """
    config, model = engine.config, engine.model
    job = LoraJob(
        name=name,
        data=DataConfig(path="-"),  # it comes with calls
        rank=config.rank if rank is None else rank,
        lora_alpha=lora_alpha,
        use_rslora=use_rslora,
        target_modules=(
            config.target_modules if target_modules is None else target_modules
        ),
        seed=seed,
    )
    modules = choose_modules(job, model.config).modules
    kernels = {
        module: kernel_of(
            model.params, f"{linear_path(module)}.kernel", model.base_format
        )
        for module in modules
    }
    return fresh_adapter(job, modules, kernels, model.dtype)


def open_saved(
    engine: Engine,
    name: str,
    path: str | os.PathLike,
    *,
    with_optimizer: bool = True,
    tenant: str = "",
    weight: float | None = None,
) -> OpenAdapter:
    """Opens an adapter from a PEFT folder, or from the file of a whole state.

    Args:
        engine: The engine.
        name: The adapter's name.
        path: The folder or file.
        with_optimizer: Whether moments, gradients and step go on, if the file has
            them.
        tenant: See `Engine.open`, and for `weight`.
        weight: The share of the tenant.

    Raises:
        JaxloraError: It cannot be read or does not fit the model or the slots.
    """
    path, model = pathlib.Path(path), engine.model
    if path.is_dir():
        adapter = import_peft(path, linear_shapes(model.config))
        adapter.check_base(model.config)
        return engine.open(name, adapter, tenant=tenant, weight=weight)
    saved = read_state(path, model.fingerprint)
    state = saved.state if with_optimizer else None
    one = engine.open(name, saved.adapter, state, tenant=tenant, weight=weight)
    if with_optimizer:
        one.num_steps = saved.num_steps
    return one


def save_folder(
    engine: Engine, one: OpenAdapter, folder: pathlib.Path, *, overwrite: bool = False
) -> None:
    """Writes a finished adapter as a folder of PEFT.

    Args:
        engine: The engine.
        one: The adapter, without calls that wait.
        folder: The folder. An earlier one is complete until it is replaced.
        overwrite: Whether to replace a folder with files of other origin.

    Raises:
        JaxloraError: The folder cannot be written.
    """
    begin_folder(engine, one, overwrite=overwrite)(folder)


def begin_folder(
    engine: Engine, one: OpenAdapter, *, overwrite: bool = False
) -> Callable[[pathlib.Path], None]:
    """Queues a copy of an adapter, of which `save_folder` tells the rest.

    Returns:
        A function that writes the folder; any thread may call it, and the adapter may
        be trained on before.
    """
    model, num_steps = engine.model, one.num_steps
    copy = engine.begin_reading(one)

    def write(folder: pathlib.Path) -> None:
        record = ExportRecord(job=one.name, step=num_steps)
        write_folder(model, copy(), folder, overwrite=overwrite, record=record)

    return write


def write_folder(
    model: FrozenModel,
    adapter: Adapter,
    folder: pathlib.Path,
    *,
    overwrite: bool = False,
    record: ExportRecord | None = None,
) -> None:
    """Writes an adapter of a model as a folder of PEFT; see `export_peft`."""
    export_peft(
        adapter,
        folder,
        base_model=model.source,
        revision=model.revision,
        linear_names=linear_names(model.config),
        model_type=model.config.model_type,
        overwrite=overwrite,
        record=record,
    )


def save_state_file(engine: Engine, one: OpenAdapter, path: pathlib.Path) -> None:
    """Writes the whole state of a finished adapter into a file, gradients included.

    Raises:
        StorageError: It cannot be written; an old file is unchanged.
    """
    begin_state_file(engine, one)(path)


def begin_state_file(
    engine: Engine, one: OpenAdapter
) -> Callable[[pathlib.Path], None]:
    """Queues a copy of the state of an adapter, of which `save_state_file` tells more.

    Returns:
        A function that writes the file; any thread may call it, and the adapter may be
        trained on before.
    """
    copy, base, num_steps = (
        engine.begin_copy(one),
        engine.model.fingerprint,
        one.num_steps,
    )
    return lambda path: write_state(path, one.like, copy(), num_steps, base)
