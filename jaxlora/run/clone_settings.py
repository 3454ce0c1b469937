"""The settings of a copy of a job: those of the job, with what may change."""

from collections.abc import Mapping
from typing import Any

from jaxlora.config import LoraJob
from jaxlora.config.clone import CHANGEABLE
from jaxlora.config.configuration_names import Namer
from jaxlora.errors import ConfigError
from jaxlora.problems import UNKNOWN, Problem, YamlWords, settings_error
from jaxlora.run.identity import FIXED_IN_JOB

_DATA = "a copy goes on where the other job is in its data"


def clone_settings(
    parent: LoraJob, changes: Mapping[str, Any], name: str | None = None
) -> LoraJob:
    """Returns the settings of a copy.

    Args:
        parent: Settings of the job to copy.
        changes: Other values of settings, by name.
        name: Name of the copy; None: that of the job with what changes.

    Raises:
        ConfigError: A setting is unknown, has a wrong value, or cannot change in a
            copy; the message lists them all.
    """
    ours, refused = LoraJob.known(changes)
    problems = [
        Problem(path=(key,), kind=UNKNOWN, text=text, given=changes[key])
        for key, text in refused.items()
    ]
    for key, setting in ours.items():
        if setting not in CHANGEABLE:
            reason = FIXED_IN_JOB.get(setting, _DATA)
            text = (
                f"cannot change in a copy: {reason}. It may change "
                f"{', '.join(sorted(CHANGEABLE))}."
            )
            problems.append(
                Problem(path=(key,), kind=UNKNOWN, text=text, given=changes[key])
            )
    if problems:
        raise settings_error(problems, YamlWords("the copy"))
    values = {setting: changes[key] for key, setting in ours.items()}
    if name is None and not values:
        raise ConfigError(
            f"a copy of {parent.name!r} with the same settings would train the same. "
            "Give a setting that changes, such as learning_rate=3e-4."
        )
    name = Namer().name(parent.name, values, []) if name is None else name
    return parent.replace(
        **values, name=name, clone_of={"job": parent.name}, continue_from=None
    )
