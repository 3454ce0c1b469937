"""The settings of another tool while they become a run file."""

import dataclasses
from collections.abc import Mapping
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
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "warmup_ratio",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "projection_prng_key",
    "d_initial",
    "trainable_token_indices",
    "modules_to_save",
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "seed",
}
_WHOLE = "modules_to_save"
_NOT_KNOWN = "This key is not known to `jaxlora migrate`."


@dataclasses.dataclass(kw_only=True)
class Migration:
    """A run file in the making.

    Attributes:
        tool: Name of the other tool.
        given: Settings of the other tool that have not been handled.
        run: Settings of the run, without its job.
        job: Settings of its one job.
        left_out: Why a setting of the other tool was left out, by its key.
        to_do: What to check or fill in, as sentences.
    """

    tool: str
    given: dict[str, Any]
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    job: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    to_do: list[str] = dataclasses.field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """Takes a setting of the other tool; an empty one counts as not given."""
        value = self.given.pop(key, None)
        return default if _is_empty(value) else value

    def take_rest(self, own_reasons: Mapping[str, str]) -> None:
        """Takes all settings that are left: by their names, or with a reason.

        Args:
            own_reasons: Why settings of the tool are left out, by their keys. Others
                have their reason in `reasons` or in `jaxlora.config.aliases`.
        """
        self._take_whole_modules()
        for key in list(self.given):
            value = self.take(key)
            if value is None or value is False:  # It turns nothing on.
                continue
            if key in own_reasons:
                self.left_out[key] = own_reasons[key]
            elif (ours := _same_meaning(key)) in LoraJob.model_fields:
                self._put(self.job, ours, key, value)
            elif ours in RunConfig.model_fields:
                self._put(self.run, ours, key, value)
            else:
                self.left_out[key] = find_reason(key) or _hint(key) or _NOT_KNOWN

    def _take_whole_modules(self) -> None:
        """Takes the modules that are trained as whole copies; others are left out."""
        for key in (k for k in list(self.given) if _same_meaning(k) == _WHOLE):
            given = self.take(key, ())
            names = given.split(",") if isinstance(given, str) else given
            if not isinstance(names, list | tuple):
                self.left_out[key] = f"{given!r:.80} is no list of modules."
                continue
            names = [str(name).strip().removeprefix("model.") for name in names]
            if own := [name for name in names if name in WHOLE_MODULES]:
                self._put(self.job, _WHOLE, key, sorted(set(own)))
            if others := [name for name in names if name not in WHOLE_MODULES]:
                self.left_out[key] = (
                    f"{', '.join(others)}: only {' and '.join(WHOLE_MODULES)} are "
                    "trained as whole copies. The score head of a reward model is "
                    "trained without this setting."
                )

    def _put(self, place: dict[str, Any], ours: str, key: str, value: Any) -> None:
        if ours in place:
            self.left_out[key] = f"{ours} follows from other settings."
        else:
            place[ours] = value

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
            raise ConfigError(f"the settings cannot be converted: {reason}")
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
        body = dump_yaml(self.run_file)
        return f"{header.rstrip('# ')}\n{body}"


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _hint(key: str) -> str:
    hint = JOB_HINTS.get(key, "").removeprefix("Leave it out: ")
    return hint[:1].upper() + hint[1:]


def _same_meaning(key: str) -> str | None:
    """Returns our name of a setting that means the same here; None if there is none."""
    if key in _SAME_NAME:
        return key
    return JOB_NAMES.get(key) or RUN_NAMES.get(key)
