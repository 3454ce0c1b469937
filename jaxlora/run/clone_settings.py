"""The settings of jobs that join a run: a job to add, or a copy of one."""

from collections.abc import Mapping
from typing import Any

import pydantic

from jaxlora.config import LoraJob
from jaxlora.config.clone import CHANGEABLE
from jaxlora.config.configuration_names import Namer
from jaxlora.config.strict import unknown
from jaxlora.errors import ConfigError
from jaxlora.problems import Source, format_errors, settings_error
from jaxlora.run.identity import FIXED_IN_JOB

_DATA = "a copy goes on where the other job is in its data"


def settings_to_add(values: Mapping[str, Any]) -> LoraJob:
    """Returns the settings of a job to add, from JSON values.

    Raises:
        ConfigError: They are no settings of a job.
    """
    try:
        return LoraJob.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(format_errors(error, "the job to add")) from None


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
    problems = unknown(changes, refused)
    for key, setting in ours.items():
        if setting not in CHANGEABLE:
            reason = FIXED_IN_JOB.get(setting, _DATA)
            text = (
                f"cannot change in a copy: {reason}. It may change "
                f"{', '.join(sorted(CHANGEABLE))}."
            )
            problems += unknown(changes, {key: text})
    if problems:
        raise settings_error(problems, Source("the copy"))
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
