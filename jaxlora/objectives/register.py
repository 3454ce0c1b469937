"""Objectives of users: each becomes an entry of the table."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.errors import ConfigError
from jaxlora.objectives.base import Objective, ObjectiveSettings, Terms
from jaxlora.objectives.sample import TokenizedSample, TopLogprobs
from jaxlora.objectives.table import OBJECTIVES

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Keys that metrics.jsonl has for a step, or for an evaluation after `eval_`.
_OF_STEPS = frozenset(
    [
        "event",
        "time",
        "job",
        "slot",
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "num_target_tokens",
        "round",
        "num_steps",
        "progress",
        "metric",
        "metrics",
        "is_best",
    ]
)
_LENGTHS = (5, 7)  # tokens of the samples with which an objective is tried


def register_objective(objective: Objective) -> None:
    """Makes an objective one that jobs can have, beside jobs with others in one run.

    Its jobs share microbatches with all others: each row belongs to one job, and the
    inputs of an objective are 0 in the rows of jobs with another one. Settings are
    inputs of the rows, so jobs with other values run the same program. Call this in
    each process that trains, resumes or plans, before the run is made.

        class CappedSettings(jaxlora.ObjectiveSettings):
            cap: float = pydantic.Field(default=4.0, gt=0.0)  # nats

        def row_inputs(samples, terms):
            (sample,) = samples
            weight = token_weights(sample, terms.weight)
            return {"weight": weight, "cap": weight * 0 + terms.settings.cap}

        def losses(nll, inputs, groups):
            return weighted(jnp.minimum(nll, inputs["cap"]), inputs)

        def metrics(nll, inputs, groups):
            is_capped = jnp.where(nll > inputs["cap"], 1.0, 0.0)
            return {"share_capped": weighted(is_capped, inputs)}

        capped = jaxlora.Objective(
            name="capped",
            settings=CappedSettings,
            input_names=("weight", "cap"),
            num_terms=target_weight,
            row_inputs=row_inputs,
            is_target=has_weight,
            losses=losses,
            metric_names=("share_capped",),
            metrics=metrics,
        )
        jaxlora.register_objective(capped)
        job = jaxlora.LoraJob(..., objective="capped", objective_args={"cap": 3.0})

    `token_weights`, `target_weight`, `has_weight` and `weighted` are functions of
    `jaxlora.objectives.base`, which has more for groups of samples.

    Row i of `losses` and `metrics` may depend on row i alone, or on the rows of its
    group: the others belong to other samples and jobs.

    Args:
        objective: The objective; its name has lower-case letters, digits and `_`. Its
            functions of rows are traced, so they use jnp and no Python conditions on
            arrays. For pairs, `kinds` is `("preference",)` and `group_size` 2.

    Raises:
        ConfigError: The name is taken or no name, or the objective breaks one of these
            rules. Nothing is registered then.
    """
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"register_objective takes a jaxlora.Objective, and got {objective!r:.80}."
        )
    name = objective.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"objective name {name!r} must be lower-case letters, digits and '_', and "
            "begin with a letter. Choose such a name."
        )
    if name in OBJECTIVES:
        raise ConfigError(
            f"objective name {name!r} is taken: there are {', '.join(OBJECTIVES)}. "
            "Choose another name; an objective is registered once in a process."
        )
    _check_needs(objective)
    code = hashlib.sha256(_try(objective).encode()).hexdigest()
    OBJECTIVES[name] = dataclasses.replace(objective, fingerprint=code)


def _refused(objective: Objective, text: str) -> ConfigError:
    return ConfigError(f"objective {objective.name!r}: {text}")


def _check_needs(objective: Objective) -> None:
    """Checks what an objective asks of settings and records."""
    found: Any = objective.settings
    if not (isinstance(found, type) and issubclass(found, ObjectiveSettings)):
        raise _refused(
            objective,
            f"settings is {found!r:.80}, and must be a subclass of "
            "jaxlora.ObjectiveSettings with a field for each setting. Make it one.",
        )
    for name, field in found.model_fields.items():
        if field.is_required():
            raise _refused(
                objective,
                f"its setting {name} has no default, and jobs may leave it out. Give "
                "it one.",
            )
    kinds: Any = objective.kinds
    if not isinstance(kinds, tuple) or any(not isinstance(k, str) for k in kinds):
        raise _refused(
            objective,
            f"kinds is {kinds!r:.80}, and must be a tuple of names, such as "
            "('preference',).",
        )
    if taken := [name for name in objective.metric_names if name in _OF_STEPS]:
        raise _refused(
            objective,
            f"metric_names has {taken[0]!r}, which lines of metrics.jsonl have "
            "already. Choose another name.",
        )
    size, is_pairs = objective.group_size, objective.kinds == ("preference",)
    if size != 1 and not (size == 2 and is_pairs):
        raise _refused(
            objective,
            f"group_size is {size} with kinds={objective.kinds}, and must be 1, or 2 "
            "with kinds=('preference',), whose records are pairs.",
        )


def _samples(objective: Objective) -> list[TokenizedSample]:
    """Returns a group of samples such as the objective reads."""
    out = []
    for length in _LENGTHS[: objective.group_size]:
        ids, is_target = np.arange(length, dtype=np.int32), np.arange(length) > 1
        top = None
        if "distill" in objective.kinds:
            shape = length - 2, 3
            top = TopLogprobs(np.ones(shape, np.int32), np.zeros(shape, np.float32))
        out.append(TokenizedSample(ids, is_target, 1.0, top=top))
    return out


def _try(objective: Objective) -> str:
    """Returns the code of the functions of rows, after trying all functions.

    Raises:
        ConfigError: One breaks a rule.
    """
    samples = _samples(objective)
    num_terms = _called(objective, "num_terms", samples)
    if not isinstance(num_terms, int | float | np.number) or not 0 < num_terms < np.inf:
        raise _refused(
            objective,
            f"num_terms returns {num_terms!r:.80} for samples with targets, and must "
            "return a number above 0.",
        )
    terms = Terms(
        weight=1 / float(num_terms),
        part_weights=(1.0,) * len(_called(objective, "part_sizes", samples)),
        settings=objective.settings(),
    )
    num_rows = sum(len(sample.token_ids) for sample in samples)
    made = _called(objective, "row_inputs", samples, terms)
    shapes = {key: np.shape(values) for key, values in made.items()}
    wanted = objective.input_shapes(num_rows)
    if shapes != wanted:
        raise _refused(
            objective,
            f"row_inputs makes the shapes {shapes} of {num_rows} tokens, and "
            f"input_names and widths say {wanted}. Return an array for each input, "
            "with a value for each token.",
        )
    has = {
        "reference_nll": objective.needs_reference,
        "score": objective.has_score,
        "baseline": objective.baseline is not None,
    }
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    rows, inputs = zeros(num_rows), {key: zeros(shape) for key, shape in wanted.items()}
    inputs |= {key: rows for key, is_there in has.items() if is_there}
    has_groups = objective.group_size > 1 or objective.sums_groups
    groups = jnp.full(num_rows, -1) if has_groups else None
    arguments = rows, inputs, groups
    flags = jax.ShapeDtypeStruct((num_rows,), jnp.bool_)
    losses = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    metrics = dict.fromkeys(objective.metric_names, losses)
    code = _trace(objective, "is_target", (inputs,), flags)
    code += _trace(objective, "losses", arguments, losses)
    code += _trace(objective, "metrics", arguments, metrics)
    if objective.has_score:
        code += _trace(objective, "is_scored", (inputs,), flags)
    loss, gradient = jax.value_and_grad(
        lambda nll: objective.losses(nll, inputs, groups).sum()
    )(rows)
    if loss != 0 or gradient.any():  # NaN is not 0
        raise _refused(
            objective,
            f"rows whose inputs are 0 have the loss {loss} and the gradient "
            f"{gradient[0]}, and must have 0, as they are padding or of other jobs. "
            "Multiply by an input inside jnp.where, as "
            "jaxlora.objectives.base.weighted does.",
        )
    extra = [key for key, is_there in has.items() if is_there]
    _check_neighbours(objective, made, extra, has_groups=has_groups)
    return code


def _called(objective: Objective, what: str, *given: Any) -> Any:
    try:
        return getattr(objective, what)(*given)
    except Exception as error:
        raise _refused(
            objective,
            f"{what} fails for samples of {_LENGTHS[0]} tokens: "
            f"{type(error).__name__}: {error}",
        ) from error


def _check_neighbours(
    objective: Objective,
    made: Mapping[str, np.ndarray],
    extra: Sequence[str],
    *,
    has_groups: bool,
) -> None:
    """Checks that losses and metrics of a group's rows read no rows of others.

    Args:
        objective: The objective.
        made: The inputs of the rows of a group.
        extra: Names of the inputs that are made elsewhere.
        has_groups: Whether rows have numbers of groups.
    """
    rng = np.random.default_rng(0)
    num_rows = len(next(iter(made.values())))
    half = np.arange(2 * num_rows) < num_rows
    draw = lambda: rng.uniform(0.5, 4.0, 2 * num_rows).astype(np.float32)
    given = {k: np.concatenate([x, x]).astype(np.float32) for k, x in made.items()}
    given |= {key: draw() for key in extra}
    others = {
        k: np.where(half.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).astype(np.float32)
        for k, x in given.items()
    }
    nll, groups = draw(), jnp.where(half, 0, 1) if has_groups else None
    other_nll = np.where(half, nll, draw())

    def results(nll: Any, inputs: Any) -> Any:
        loss = lambda nll: objective.losses(nll, inputs, groups)
        gradient = jax.grad(lambda nll: loss(nll)[:num_rows].sum())(nll)
        found = {
            "losses": loss(nll)[:num_rows],
            "the gradient of losses": gradient[:num_rows],
            "the gradient of losses by other rows": gradient[num_rows:],
        }
        metrics = objective.metrics(nll, inputs, groups)
        return found | {f"metric {k}": x[:num_rows] for k, x in metrics.items()}

    alone = results(*jax.tree.map(jnp.asarray, (other_nll, others)))
    beside = results(*jax.tree.map(jnp.asarray, (nll, given)))
    alone["the gradient of losses by other rows"] = jnp.zeros(num_rows)
    for name, wanted in alone.items():
        if not np.array_equal(beside[name], wanted, equal_nan=True):
            raise _refused(
                objective,
                f"{name}: rows depend on rows of other samples, which may belong to "
                "other jobs. Let row i read row i alone, or its group in a term of "
                "several samples; do not take sums or means over rows.",
            )


def _trace(objective: Objective, what: str, arguments: Any, wanted: Any) -> str:
    """Returns the code of a function of rows, after checking what it returns."""
    make = jax.make_jaxpr(getattr(objective, what), return_shape=True)
    try:
        traced, found = make(*arguments)
    except Exception as error:  # that of a user's function may be any
        raise _refused(
            objective,
            f"{what} fails when it is traced: {error}\nUse jnp functions, and no "
            "Python conditions or float() on arrays.",
        ) from error
    of = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{x.shape}", tree)
    if of(found) != of(wanted):
        raise _refused(
            objective,
            f"{what} returns {of(found)}, and must return {of(wanted)}, one value for "
            "each row.",
        )
    consts = [np.asarray(value).tobytes().hex() for value in traced.consts]
    return "\n".join([what, str(traced), *consts])
