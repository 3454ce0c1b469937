"""The settings of a sweep: the search, the metric, and when to give up."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

from jaxlora.config.rules import mesh_text
from jaxlora.config.space import Space
from jaxlora.config.strict import (
    MOST_DEVICES,
    AtLeastOne,
    Bool,
    Devices,
    Int,
    NonNegativeInt,
    Number,
    PositiveInt,
    StrictModel,
    Wrong,
)
from jaxlora.sharding.mesh_sizes import MeshSizes

LOSS = "eval_loss"
ROUGE = "rouge1", "rouge2", "rougeL"
METRICS = LOSS, "exact_match", "f1", *ROUGE
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _of_answers(metric: Any, wrong: Wrong) -> None:
    if metric.is_loss and metric.goal == "maximize":
        wrong["goal"] = "a loss is minimized. Leave goal out."
    for name in ("max_new_tokens", "limit"):
        if metric.is_loss and metric.changes(name):
            wrong[name] = f"{name} is of generated answers, and a loss has none."


class Metric(StrictModel):
    """The metric by which the configurations of a sweep are ranked.

    Attributes:
        name: `eval_loss`, the loss on held-out records; or a metric of the answers that
            are generated for them: `exact_match`, `f1`, `rouge1`, `rouge2`, `rougeL`,
            or a function as `module:function`, or in Python the function itself. It
            gets the list of answers and the list of those in the records.
        goal: `minimize` or `maximize`; None: the loss is minimized, others maximized.
        max_new_tokens: Largest number of tokens of an answer.
        limit: Number of held-out records that are answered; None: all.
    """

    rules = (_of_answers,)

    name: str = LOSS
    goal: Literal["minimize", "maximize"] | None = None
    max_new_tokens: PositiveInt = 64
    limit: PositiveInt | None = None

    @property
    def is_loss(self) -> bool:
        """Whether nothing is generated for it."""
        return self.name == LOSS

    @property
    def is_maximized(self) -> bool:
        """Whether a higher value is better."""
        return not self.is_loss and self.goal != "minimize"

    def cost(self, value: float) -> float:
        """Returns a number that is lower if the value is better."""
        return -value if self.is_maximized else value

    @pydantic.field_validator("name", mode="before")
    @classmethod
    def _functions_have_names(cls, name: object) -> object:
        if not callable(name):
            return name
        module = getattr(name, "__module__", None)
        path = str(getattr(name, "__qualname__", "<"))
        if module is None or "<" in path:
            raise ValueError(
                f"{name!r:.80} cannot be found again when the run is resumed. Define "
                "the function at the top level of a module."
            )
        return f"{module}:{path}"

    @pydantic.field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        if name not in METRICS and not _FUNCTION.fullmatch(name):
            raise ValueError(
                f"{name!r} is no metric. Give one of {', '.join(METRICS)}, or a "
                "function as module:function."
            )
        return name


RuleName = Literal["halving", "asha", "median", "overfitting", "catch_up", "divergence"]
_OWN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "eta": ("halving", "asha"),
    "first": ("halving", "asha"),
    "startup": ("median",),
    "top": ("catch_up",),
    "probability": ("catch_up",),
}


def _of_the_type(rule: Any, wrong: Wrong) -> None:
    for name, types in _OWN_SETTINGS.items():
        if rule.changes(name) and rule.type not in types:
            wrong[name] = (
                f"{name} is a setting of {' and '.join(types)}, and type is "
                f"{rule.type}. Leave it out."
            )


class ExitRule(StrictModel):
    """A rule by which configurations end before their last step.

    `jaxlora.sweeps.rules` defines the rules.

    Attributes:
        type: `halving`, `asha`, `median`, `overfitting`, `catch_up` or `divergence`.
        eta: One in `eta` configurations goes on at each rung (`halving`, `asha`).
        first: Share of a configuration's steps at the first rung; each further one is
            `eta` times later (`halving`, `asha`).
        startup: Other configurations that must have come as far (`median`).
        top: Number of best configurations to keep a chance of joining (`catch_up`).
        probability: A configuration with a lower chance ends (`catch_up`).
    """

    rules = (_of_the_type,)

    type: RuleName
    eta: Annotated[Int, Field(ge=2)] = 2
    first: Annotated[float, Field(gt=0.0, lt=1.0), Number] = 0.25
    startup: PositiveInt = 5
    top: PositiveInt = 3
    probability: Annotated[float, Field(gt=0.0, lt=1.0), Number] = 0.05


def _search(sweep: Any, wrong: Wrong) -> None:
    is_search = sweep.method in ("random", "optuna")
    if sweep.parameters and is_search and sweep.count is None:
        wrong["count"] = "a random search needs a number of configurations: set count."
    if sweep.initial is not None and sweep.method != "optuna":
        wrong["initial"] = "initial is of `method: optuna`. Leave it out."
    if sweep.method == "grid" and sweep.count is not None:
        wrong["count"] = (
            "a grid has all combinations, and count is of a random search. Leave count "
            "out, or set `method: random`."
        )
    endless = [name for name, space in sweep.parameters.items() if not space.is_finite]
    if endless and sweep.method == "grid":
        wrong["method"] = (
            f"a grid needs points, and {endless[0]} is a range. Give it num or a list "
            "of values, or set `method: random` and count."
        )
    if endless and sweep.method is None and sweep.count is None:
        wrong["count"] = (
            f"{endless[0]} is a range, which is searched at random: set count, the "
            "number of configurations."
        )


def _groups(sweep: Any, wrong: Wrong) -> None:
    if sweep.groups == "auto" and sweep.ray is not None:
        wrong["groups"] = (
            "auto plans the devices of one host, and sweep.ray names a cluster. Give "
            "the list of groups that `jaxlora plan --gpu h100x16` and the like print."
        )
    elif sweep.groups == "auto" and (sweep.method == "optuna" or sweep.search):
        wrong["groups"] = (
            "auto plans configurations that are known, and optuna suggests them as "
            "others end. Give a number of groups, or a list."
        )
    if sweep.has_groups and sweep.metric.name.startswith("__main__:"):
        wrong["metric"] = (
            f"{sweep.metric.name} is in the script that runs, which the processes of "
            "the groups do not have. Move the function to a module of its own."
        )


class Search(StrictModel):
    """The space and the draws from which further configurations are suggested.

    Attributes:
        template: The job that they are made from.
        parameters: The values that its settings may take, by setting.
        count: Number of configurations in all.
        seed: Random seed.
        points: The place on each axis (`jaxlora.config.space.draw`) of the
            configurations that were drawn, by name.
    """

    template: dict[str, Any]
    parameters: dict[str, Space]
    count: PositiveInt
    seed: NonNegativeInt
    points: dict[str, dict[str, float]]


def _group_mesh(given: object) -> str:
    """Returns the mesh of a group, which is given by it or by a number of devices."""
    words = mesh_text(given)
    if isinstance(given, int) and not isinstance(given, bool):
        words = f"fsdp={given}"
    if not isinstance(words, str):
        raise ValueError(
            "give the number of devices of the group, or its mesh, such as fsdp=2."
        )
    return str(MeshSizes.parse(words))


_Meshes = Annotated[
    tuple[Annotated[str, BeforeValidator(_group_mesh)], ...], AtLeastOne
]


class Sweep(StrictModel):
    """Many configurations of a job: the space, the search, and when to give up.

    Attributes:
        parameters: The values that settings of a job may take, by setting. A list is
            short for `{values: [...]}`, and `data.limit` is a setting within `data`.
            The values of a name that begins with `_` are mappings of settings that
            belong together. Empty: the jobs are the configurations.
        method: `grid`: all combinations. `random`: `count` draws. `optuna`: the first
            ones are draws; each further one is suggested by Optuna's TPE when one has
            ended, after all results so far. None: a grid if all parameters are lists
            and there is no `count`.
        count: Number of configurations of a search, for each job; of a grid, None.
        initial: Number of draws before Optuna suggests; None: `max_concurrent_jobs`,
            and at least 10.
        seed: Random seed of the search.
        metric: What configurations are ranked by.
        early_exit: Rules by which configurations end early; any of them may. Those that
            diverge always do, unless this is empty (`none`). With `method: optuna`, the
            default is `asha`, under which none waits for those to come.
        keep: Number of best configurations that the report marks; None: of one.
        keep_others: Whether the PEFT folders of the others stay when the sweep ends.
        merge_best: Whether the best one is merged into its base when the sweep ends, as
            by `jaxlora merge`; into `merged/NAME` of the output folder.
        search: What Optuna suggests from; it is made when the sweep is expanded.
        groups: Groups of devices that train at the same time, each in a process of its
            own with its own copy of the base: their number, if each has the run's
            `mesh`; or a list with the mesh, or number of devices, of each one.
            `max_concurrent_jobs` is that of each group. `auto`: the planner of sweeps
            chooses the groups, with their slots, ranks and order.
        ray: Address of the Ray cluster whose hosts have the groups, such as `auto`;
            None: this host has them.
    """

    rules = (_search, _groups)
    aliases = {"run_cap": "count"}
    hints = {
        "early_terminate": "Set early_exit, such as `early_exit: halving`; rungs "
        "are shares of each configuration's own steps.",
        "early_stop": "Set early_exit, such as `early_exit: halving`.",
        "program": "Leave it out: the run file names the model and the data.",
        "project": "Leave it out: the tracker's environment variables name it.",
        "name": "Leave it out: output_dir names the run.",
    }

    parameters: dict[str, Space] = {}
    method: Literal["grid", "random", "optuna"] | None = None
    count: PositiveInt | None = None
    initial: PositiveInt | None = None
    seed: NonNegativeInt = 0
    metric: Metric = Metric()
    early_exit: tuple[ExitRule, ...] = (ExitRule(type="halving"),)
    keep: PositiveInt = 1
    keep_others: Bool = True
    merge_best: Bool = False
    search: Search | None = None
    groups: Devices | Literal["auto"] | _Meshes = 1
    ray: str | None = None

    @property
    def has_groups(self) -> bool:
        """Whether groups of devices train in processes of their own."""
        return self.groups != 1 or self.ray is not None

    @property
    def groups_text(self) -> str:
        """The groups as a user writes them."""
        if isinstance(self.groups, int | str):
            return str(self.groups)
        return f"[{'; '.join(self.groups)}]"

    def meshes(self, mesh: str) -> list[MeshSizes]:
        """Returns the mesh of each group.

        Args:
            mesh: That of groups which are given by their number.
        """
        assert self.groups != "auto", "the groups are not planned yet"
        own = [mesh] * self.groups if isinstance(self.groups, int) else self.groups
        return [MeshSizes.parse(words) for words in own]

    @property
    def is_random(self) -> bool:
        """Whether configurations are drawn."""
        is_search = self.method in ("random", "optuna")
        return is_search or (self.method is None and self.count is not None)

    @pydantic.field_validator("groups")
    @classmethod
    def _groups_can_be_divided(cls, groups: Any) -> Any:
        meshes = groups if isinstance(groups, tuple) else ()
        num_devices = sum(MeshSizes.parse(mesh).num_devices for mesh in meshes)
        if num_devices > MOST_DEVICES:
            raise ValueError(
                f"the groups have {num_devices:,} devices, and at most "
                f"{MOST_DEVICES:,} can be divided. Give smaller groups."
            )
        return groups

    @pydantic.field_validator("metric", mode="before")
    @classmethod
    def _metric_may_be_a_name(cls, metric: object) -> object:
        is_name = isinstance(metric, str) or callable(metric)
        return {"name": metric} if is_name else metric

    @pydantic.field_validator("early_exit", mode="before")
    @classmethod
    def _rules_are_a_list(cls, given: object) -> object:
        if given in ("none", None):
            return ()
        rules = given if isinstance(given, list | tuple) else [given]
        return [{"type": r} if isinstance(r, str) else r for r in rules]
