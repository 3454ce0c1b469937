"""The settings of another tool while they become a run file."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxlora.common.yaml_file import dump_yaml
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.aliases import JOB_HINTS, JOB_NAMES, RUN_NAMES
from jaxlora.config.rules import WHOLE_MODULES
from jaxlora.errors import ConfigError
from jaxlora.migrate.reasons import find_reason
from jaxlora.printable import one_line
from jaxlora.problems import RULE, UNKNOWN, Problem

# Settings that have the same name and the same meaning in all tools.
_SAME_NAME = {
    *("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "warmup_ratio"),
    *("init_lora_weights", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("layers_pattern", "layers_to_transform", "projection_prng_key", "d_initial"),
    *("trainable_token_indices", "modules_to_save", "seed"),
}
_WHOLE = "modules_to_save"


# Converts a setting: given its key and its value, which is None if it is not given.
Convert = Callable[["Migration", str, Any], None]


@dataclasses.dataclass(frozen=True)
class To:
    """How a setting converts.

    Attributes:
        target: One of our settings, of the job or else of the run; or a function.
        default: The other tool's default, if ours differs.
        values: Returns our value of a given one; None: they are the same.
    """

    target: str | Convert
    default: Any = None
    values: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A setting of a training that jaxlora does not do.

    Attributes:
        why: Continues the sentence "KEY is VALUE, ".
        neutral: A value that changes nothing, beside those that are false.
    """

    why: str
    neutral: Any = None


# How the settings of another tool convert, by their keys, with older names behind them;
# a text is the reason why one is left out.
Table = Mapping[str, To | Convert | Refused | str]


@dataclasses.dataclass(kw_only=True)
class Migration:
    """A run file in the making.

    Attributes:
        tool: Name of the other tool.
        given: Settings of the other tool that have not been handled.
        where: Names the part of the settings that this is; empty: it is all of them.
        is_text: Whether records without a description are plain texts.
        trains_on_prompts: Whether prompts are trained on, too.
        objective: The objective, if the job learns from preferences.
        run: Settings of the run, without its job.
        job: Settings of its one job, or what a part becomes.
        left_out: Why a setting of the other tool was left out, by its key.
        to_do: What to check or fill in, as sentences.
    """

    tool: str
    given: dict[str, Any]
    where: str = ""
    is_text: bool = False
    trains_on_prompts: bool = False
    objective: str | None = None
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    job: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    to_do: list[str] = dataclasses.field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """Takes a setting of the other tool; an empty one counts as not given."""
        value = self.given.pop(key, None)
        return default if value is None or value in ("", [], {}) else value

    def leave_out(self, key: str, reason: str) -> None:
        """Says why a setting is left out."""
        self.left_out[f"{self.where}.{key}" if self.where else key] = reason

    def part(self, where: str, given: Mapping[str, Any]) -> "Migration":
        """Returns a mapping inside the settings, such as a data set, as their part."""
        where = f"{self.where}.{where}" if self.where else where
        return dataclasses.replace(self, given=dict(given), where=where, run={}, job={})

    def leave_rest(self, reason: str, reasons: Mapping[str, str] | None = None) -> None:
        """Leaves out all settings of a part that are left, for a reason or their own.

        Args:
            reason: The reason of those that have no own one.
            reasons: The own ones, by their keys.
        """
        for key in list(self.given):
            value = self.take(key)
            if value is not None and value is not False:  # It turns something on.
                self.leave_out(key, (reasons or {}).get(key, reason))

    def convert(self, table: Table) -> None:
        """Converts settings in the order of a table; texts are for `take_rest`.

        Raises:
            ConfigError: A setting is refused.
        """
        for key, entry in table.items():
            if isinstance(entry, str):
                continue
            if isinstance(entry, Refused):
                if (value := self.take(key)) and value != entry.neutral:
                    raise ConfigError(
                        f"{key} is {value!r}, {entry.why}. Files with {key} cannot be "
                        "converted."
                    )
                continue
            to = entry if isinstance(entry, To) else To(entry)
            value = to.default
            for name in reversed(key.split()):
                value = self.take(name, value)
            if not isinstance(to.target, str):
                to.target(self, key.split()[0], value)
                continue
            if value is not None and to.values is not None:
                value = to.values(value)
            if value is not None:
                self._place(to.target)[to.target] = value

    def take_rest(self, table: Table) -> None:
        """Takes all settings that are left: by their names, or with a reason.

        Args:
            table: Has reasons of the tool. Others have their reason in `reasons` or in
                `jaxlora.config.aliases`.
        """
        for key in [key for key in self.given if _same_meaning(key) == _WHOLE]:
            self._take_whole_modules(key)
        for key in list(self.given):
            value = self.take(key)
            if value is None or value is False:  # It turns nothing on.
                continue
            reason = table.get(key)
            if isinstance(reason, str):
                self.left_out[key] = reason
            elif ours := _same_meaning(key):
                self._put(ours, key, value)
            else:
                self.left_out[key] = find_reason(key) or _hint(key)

    def _put(self, ours: str, key: str, value: Any) -> None:
        if ours in self._place(ours):
            self.left_out[key] = f"{ours} follows from other settings."
        else:
            self._place(ours)[ours] = value

    def _place(self, ours: str) -> dict[str, Any]:
        is_of_job = self.where or ours in LoraJob.model_fields
        return self.job if is_of_job else self.run

    def _take_whole_modules(self, key: str) -> None:
        """Takes the modules that are trained as whole copies; others are left out."""
        given = self.take(key, ())
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, list | tuple):
            self.left_out[key] = f"{given!r:.80} is no list of modules."
            return
        names = [str(name).strip().removeprefix("model.") for name in names]
        if own := {name for name in names if name in WHOLE_MODULES}:
            self._put(_WHOLE, key, sorted(own))
        if others := [name for name in names if name not in WHOLE_MODULES]:
            self.left_out[key] = (
                f"{', '.join(others)}: only {' and '.join(WHOLE_MODULES)} are trained "
                "as whole copies. The score head of a reward model is trained without "
                "this setting."
            )

    @property
    def run_file(self) -> dict[str, Any]:
        """The contents of the run file."""
        return {**self.run, "jobs": [self.job]}

    def drop_invalid(self) -> None:
        """Leaves out settings with values that a run file cannot have.

        Raises:
            ConfigError: Settings contradict each other.
        """
        while True:
            try:
                RunConfig(**self.run_file)
                return
            except ConfigError as error:
                for problem in error.problems:
                    self._drop(problem)

    def _drop(self, problem: Problem) -> None:
        path, reason, value = problem.path, problem.text, problem.given
        place, key = self.run, str(path[0]) if path else ""
        if key == "jobs" and len(path) > 2:
            place, key = self.job, str(path[2])
        # If settings contradict each other, it is not known which one to leave out.
        if key not in place or problem.kind in (RULE, UNKNOWN):
            name = "" if key in reason else f"{key}: "
            raise ConfigError(f"the settings cannot be converted: {name}{reason}")
        del place[key]
        config = LoraJob if place is self.job else RunConfig
        field = config.model_fields[key]
        if field.is_required():
            raise ConfigError(f"{key} is {value!r:.80}, which cannot be used: {reason}")
        self.left_out[key] = (
            f"{value!r:.80} cannot be used here ({reason.rstrip('.')}). The default is "
            f"used: {field.default!r}."
        )

    def text(self, source: str) -> str:
        """Returns the text of the run file, which begins with what was left out.

        Args:
            source: Names the file that was converted.
        """
        lines = [f"Written by `jaxlora migrate` from {source} ({self.tool}).", ""]
        if self.to_do:
            lines += ["To do:", *(f"- {text}" for text in self.to_do), ""]
        if self.left_out:
            lines += ["Left out:", *(f"- {k}: {v}" for k, v in self.left_out.items())]
        # A line break in a key or a value would end the comment.
        header = "".join(f"# {one_line(line)}".rstrip() + "\n" for line in lines)
        return f"{header.rstrip('# ')}\n{dump_yaml(self.run_file)}"


def _hint(key: str) -> str:
    hint = JOB_HINTS.get(key, "").removeprefix("Leave it out: ")
    hint = hint[:1].upper() + hint[1:]
    return hint or "This key is not known to `jaxlora migrate`."


def _same_meaning(key: str) -> str | None:
    """Returns our name of a setting that means the same here; None if there is none."""
    ours = key if key in _SAME_NAME else JOB_NAMES.get(key) or RUN_NAMES.get(key)
    known = LoraJob.model_fields.keys() | RunConfig.model_fields.keys()
    return ours if ours in known else None


def set_parameters(migration: Migration, _: str, parameters: Any) -> None:
    """Converts PEFT's names of experts' weights, whose rank is that of the adapter."""
    if parameters:
        names = [parameters] if isinstance(parameters, str) else parameters
        migration.job["target_parameters"] = sorted(map(str, names))
        migration.job["expert_rank"] = "full"
