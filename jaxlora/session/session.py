"""Trains adapters by calls: a loop, losses and samples of your own."""

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.common.job_name import BASE, check_job_name
from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.errors import ConfigError, DataError, DeviceError
from jaxlora.generate.generator import check_one_device
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import (
    Call,
    Engine,
    OpenAdapter,
    PassCall,
    PassResult,
    StepCall,
    StepResult,
)
from jaxlora.session.operations import (
    new_adapter,
    open_saved,
    pass_call,
    save_folder,
    save_state_file,
)
from jaxlora.session.sampler import Completion, Sampler, TokenPrompt, publish
from jaxlora.train.compilation_cache import keep_compiled_programs

logger = logging.getLogger(__name__)

# A loss of the user's: from the datums and the log-probabilities of each, which are
# `jax.numpy` arrays, to a number, or to a number and metrics by name.
CustomLoss = Callable[[Sequence[Datum], list[jax.Array]], Any]


class Pending[T]:
    """The result of a call, which may not be there yet."""

    def __init__(self, engine: Engine, call: Call):
        """Makes the object; see `Session`."""
        self._engine, self._call = engine, call

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return self._call.result is not None

    def result(self) -> T:
        """Returns the result; works on what was called until it is there.

        Raises:
            DeviceError: A device has failed, or the work was broken off.
        """
        with self._engine.lock:
            while self._call.result is None:
                if not self._engine.advance():
                    raise DeviceError(
                        "the work on this call was broken off by an earlier error, or "
                        "by an interrupt, so it has no result. Load the adapter as it "
                        "was saved last, and call again."
                    )
        found: Any = self._call.result
        return found


def _alone[**P, T](
    method: Callable[Concatenate["Session", P], T],
) -> Callable[Concatenate["Session", P], T]:
    """Makes a method of a session wait until no other thread is in one."""

    @functools.wraps(method)
    def call(session: "Session", *args: P.args, **kwargs: P.kwargs) -> T:
        with session._engine.lock:
            return method(session, *args, **kwargs)

    return call


class Session:
    """A frozen model whose adapters are trained by calls.

        session = jaxlora.Session("HuggingFaceTB/SmolLM2-135M-Instruct")
        session.add_adapter("mine")
        for _ in range(10):
            done = session.forward_backward("mine", data)
            session.optim_step("mine", learning_rate=1e-4)
            print(done.result().loss)
        session.save("mine", "adapters/mine")

    Calls return at once, and their results wait until they are asked for. The calls of
    an adapter run in their order; those of several adapters, and with several losses,
    share microbatches until a result is asked for. An adapter's updates do not depend
    on the others: they are the same to the bit where its datums lie in the same places,
    and within rounding elsewhere.

    The gradient of an adapter is the sum over all `forward_backward` calls since its
    last `optim_step`. It is never divided by a number of tokens or datums: choose the
    weights for that.

    Threads take turns if several use a session. After an interrupt (Ctrl-C), the work
    goes on when a result is asked for again, or an error says that it cannot.
    """

    def __init__(self, model: FrozenModel | str | os.PathLike, **settings: Any):
        """Loads the model, unless it is given, and makes empty slots.

        Args:
            model: A model on one device that `load_model` returned, a folder, or a hub
                id.
            **settings: Fields of `SessionConfig`: `slots`, `rank`, `target_modules`,
                `microbatch_tokens` and others.

        Raises:
            JaxloraError: A setting or the model cannot be used.
        """
        config = SessionConfig(**settings)
        keep_compiled_programs()
        if not isinstance(model, FrozenModel):
            model = load_model(os.fspath(model))
        check_one_device(model, "a session")
        self._engine = Engine(model, config)

    # ---- adapters --------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._engine.adapters)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        tokenizer = load_tokenizer(self._engine.model.folder)
        tokenizer.check_fits(self._engine.model.config.vocab_size)
        return tokenizer

    @_alone
    def add_adapter(
        self,
        name: str,
        *,
        rank: int | None = None,
        lora_alpha: float = 32.0,
        use_rslora: bool = False,
        target_modules: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        """Makes an adapter with fresh weights, which give the base's output.

        Args:
            name: Its name, which can also name a folder.
            rank: Its rank, at most that of the session; None: that one.
            lora_alpha: The update is scaled by lora_alpha / rank.
            use_rslora: Whether it is scaled by lora_alpha / sqrt(rank).
            target_modules: The linears that it adapts, among those of the session;
                None: all of those.
            seed: Random seed of its first weights.

        Raises:
            ConfigError: A setting cannot be used, the name is taken, or the slots
                cannot hold such an adapter.
        """
        adapter = new_adapter(
            self._engine,
            self._new_name(name),
            rank=rank,
            lora_alpha=lora_alpha,
            use_rslora=use_rslora,
            target_modules=target_modules,
            seed=seed,
        )
        self._engine.open(name, adapter)

    @_alone
    def load(self, name: str, path: str | os.PathLike) -> None:
        """Makes an adapter that goes on from a folder of PEFT, or from a saved state.

        From a folder, the moments of the optimizer start at zero. From the file of
        `save_state`, what follows has the same bits as without the pause.

        Args:
            name: Its name here.
            path: The folder or file.

        Raises:
            JaxloraError: It cannot be read or does not fit the model or the slots, or
                the name is taken.
        """
        open_saved(self._engine, self._new_name(name), path)

    @_alone
    def save(
        self, name: str, folder: str | os.PathLike, *, overwrite: bool = False
    ) -> None:
        """Writes an adapter as a folder of PEFT, after all calls for it.

        Args:
            name: The adapter.
            folder: The folder. An earlier one is complete until it is replaced.
            overwrite: Whether to replace a folder with files of other origin.

        Raises:
            JaxloraError: There is no such adapter, or the folder cannot be written.
        """
        one = self._finished(name)
        save_folder(self._engine, one, pathlib.Path(folder), overwrite=overwrite)

    @_alone
    def save_state(self, name: str, path: str | os.PathLike) -> None:
        """Writes the whole state of an adapter into a file, after all calls for it.

        Gradients that no `optim_step` has used yet are part of it.

        Args:
            name: The adapter.
            path: The file, such as `mine.safetensors`.

        Raises:
            JaxloraError: There is no such adapter, or the file cannot be written.
        """
        save_state_file(self._engine, self._finished(name), pathlib.Path(path))

    @_alone
    def remove(self, name: str) -> None:
        """Removes an adapter after all calls for it.

        Raises:
            ConfigError: There is no such adapter.
        """
        self._engine.close(self._finished(name))

    # ---- training --------------------------------------------------------------------

    @_alone
    def forward(
        self,
        name: str,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
    ) -> Pending[PassResult]:
        """Computes log-probabilities and losses; arguments as for `forward_backward`.

        The name `base` gives those of the base model, such as for a reference.

        Raises:
            JaxloraError: As for `forward_backward`.
        """
        return self._pass(
            name, data, ChosenLoss.of(loss, loss_config), is_training=False
        )

    @_alone
    def forward_backward(
        self,
        name: str,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
    ) -> Pending[PassResult]:
        """Adds the gradient of a loss to those of an adapter.

        Args:
            name: The adapter.
            data: The datums. Their losses are summed.
            loss: `cross_entropy`, `importance_sampling`, `ppo`, `cispo` or `dro`, as
                defined in `jaxlora.objectives.datum`; or see `forward_backward_custom`.
            loss_config: Settings of the loss, such as `{"clip_low_threshold": 0.9}`.

        Returns:
            The log-probabilities of all positions, and the sum of the losses.

        Raises:
            JaxloraError: There is no such adapter, loss or setting, or a datum is too
                long for a microbatch, has tokens that the model lacks, or lacks what
                the loss reads.
        """
        return self._pass(
            name, data, ChosenLoss.of(loss, loss_config), is_training=True
        )

    @_alone
    def forward_backward_custom(
        self, name: str, data: Sequence[Datum], loss: CustomLoss
    ) -> Pending[PassResult]:
        """Adds the gradient of a loss of your own, which takes two forward passes.

        The loss is differentiated by the log-probabilities, and the negative of that
        are the weights of a cross entropy with the same gradient.

        Args:
            name: The adapter.
            data: The datums. Their weights are only read by the loss.
            loss: From the datums and the log-probabilities of each to a number, or to
                a number and metrics by name. It uses `jax.numpy`, so that JAX can
                differentiate it, and may combine datums as it likes.

        Returns:
            As `forward_backward`, with the loss as `loss:sum` and its metrics.

        Raises:
            JaxloraError: As for `forward_backward`, or the gradient is not finite.
        """
        data = _listed(data)
        found = self.forward(name, data).result().logprobs

        def value_and_metrics(logprobs: list[jax.Array]) -> tuple[Any, Any]:
            made = loss(data, logprobs)
            return made if isinstance(made, tuple) else (made, {})

        differentiate = jax.value_and_grad(value_and_metrics, has_aux=True)
        (value, metrics), gradients = differentiate([jnp.asarray(x) for x in found])
        metrics = {"loss:sum": value} | metrics
        for key, number in metrics.items():
            if np.ndim(number):
                raise DataError(
                    f"the loss gives the metric {key!r} as an array of shape "
                    f"{np.shape(number)}. Give one number, such as its mean."
                )
        weights = [-np.asarray(gradient) for gradient in gradients]
        for number, own in enumerate(weights):
            if not np.isfinite(own).all():
                raise DataError(
                    f"datum {number}: the gradient of the loss by its log-probabilities"
                    " is not finite. Correct the loss; the adapter has no gradient of "
                    "it."
                )
        weighted = [d.with_weights(w) for d, w in zip(data, weights, strict=True)]
        return self._pass(
            name,
            weighted,
            ChosenLoss.of("cross_entropy", None),
            is_training=True,
            metrics={key: float(number) for key, number in metrics.items()},
        )

    @_alone
    def optim_step(
        self,
        name: str,
        learning_rate: float,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
        lora_plus_ratio: float = 1.0,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Pending[StepResult]:
        """Takes an optimizer step of AdamW with the gradients since the last one.

        A step with losses or gradients that are not finite is skipped, as its result
        and the log say, and the gradients are gone.

        Args:
            name: The adapter; no other is touched.
            learning_rate: Learning rate.
            betas: Decays of the first and the second moment.
            eps: Added to the root of the second moment.
            lora_plus_ratio: Learning rate of B over that of A (LoRA+).
            weight_decay: Decoupled weight decay.
            grad_clip_norm: Clips the gradient to this norm; 0: never.

        Raises:
            ConfigError: There is no such adapter, or a setting cannot be used.
        """
        params = AdamParams(
            learning_rate=learning_rate,
            betas=betas,
            eps=eps,
            lora_plus_ratio=lora_plus_ratio,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
        )
        return self._submit(name, StepCall(params=params))

    # ---- sampling --------------------------------------------------------------------

    @_alone
    def publish(self, name: str) -> Sampler:
        """Returns a sampler with a copy of an adapter, after all calls for it.

        Later steps do not change the copy, which lives as long as the sampler. The
        name `base` gives the base model.

        Raises:
            ConfigError: There is no such adapter.
        """
        one = self._engine.base if name == BASE else self._finished(name)
        return publish(self._engine, one, lambda: self.tokenizer)

    @_alone
    def sample(
        self,
        name: str,
        prompts: Sequence[TokenPrompt],
        **options: Any,
    ) -> list[list[Completion]]:
        """Samples completions of prompts with an adapter as it is after all its calls.

        Args:
            name: The adapter, or `base`.
            prompts: Texts, or lists of token ids.
            **options: Further arguments of `Sampler.sample`, such as `num_samples`,
                `max_new_tokens`, `temperature` and `seed`.

        Returns:
            For each prompt, its completions.

        Raises:
            JaxloraError: There is no such adapter, or an argument cannot be used.
        """
        return self.publish(name).sample(prompts, **options)

    # ---- calls -----------------------------------------------------------------------

    def _pass(
        self,
        name: str,
        data: Sequence[Datum],
        loss: ChosenLoss,
        *,
        is_training: bool,
        metrics: Mapping[str, float] | None = None,
    ) -> Pending[PassResult]:
        call = pass_call(
            self._engine,
            _listed(data),
            loss,
            is_training=is_training,
            metrics=metrics,
        )
        return self._submit(name, call)

    def _submit(self, name: str, call: Call) -> Pending:
        is_read = isinstance(call, PassCall) and not call.is_training
        one = self._engine.base if is_read and name == BASE else self._adapter(name)
        self._engine.submit(one, call)
        return Pending(self._engine, call)

    def _adapter(self, name: str) -> OpenAdapter:
        if name not in self._engine.adapters:
            there = ", ".join(self._engine.adapters) or "none"
            raise ConfigError(
                f"there is no adapter {name!r}; there are: {there}. Add it with "
                "add_adapter or load."
            )
        return self._engine.adapters[name]

    def _finished(self, name: str) -> OpenAdapter:
        """Returns an adapter after all calls for it have their results."""
        one = self._adapter(name)
        self._engine.finish(one)
        return one

    def _new_name(self, name: str) -> str:
        try:
            check_job_name(name, kind="adapter")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if name in self._engine.adapters:
            raise ConfigError(
                f"there is an adapter {name!r} already. Choose another name, or remove "
                "it first."
            )
        return name


def _listed(data: Sequence[Datum]) -> tuple[Datum, ...]:
    if isinstance(data, Datum):
        raise DataError("data is one Datum. Give a list of them.")
    return tuple(data)
