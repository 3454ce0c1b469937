"""Reads a run from a YAML file."""

import contextlib
import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pydantic

from jaxlora.common.yaml_file import line_finder, parse_yaml
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.expansion import Expansion, expand_run
from jaxlora.config.overrides import override
from jaxlora.config.strict import unknown
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.printable import one_line
from jaxlora.problems import (
    Path,
    Problem,
    Source,
    problem_of,
    problems_of,
    settings_error,
)

logger = logging.getLogger(__name__)

_OVERRIDDEN = "# overridden: "

# Given the settings of a run by our names, which may be invalid, returns the path of
# each setting that names something missing, and the error.
FindMissing = Callable[[Mapping[str, Any]], list[tuple[Path, JaxloraError]]]


def load_run(path: str | pathlib.Path, **settings: Any) -> RunConfig:
    """Reads a run file, which has the keys of `RunConfig` and `defaults` for all jobs.

    A setting that a job lacks is taken from `defaults`, and then from the defaults of
    `LoraJob`. Paths in the file are relative to the working directory.

    Args:
        path: A YAML file.
        **settings: Settings of the run, which replace those of the file.

    Raises:
        ConfigError: The file is missing or is not YAML, keys are unknown, or values are
            invalid. The message lists all such keys, with their lines and values.
    """
    return RunFile.read(path).config(settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run file, with the options of the command line that replace its settings.

    Attributes:
        path: The file.
        text: Its contents.
        values: Its settings, unchecked, with those of the command line.
        options: Names of options of the command line, by the setting that they replace.
        overrides: Arguments of the command line that have set a part of `values`, by
            its path.
    """

    path: pathlib.Path
    text: str
    values: Mapping[str, Any]
    options: Mapping[str, str]
    overrides: Mapping[Path, str]

    @classmethod
    def read(
        cls, path: str | pathlib.Path, overrides: Sequence[str] = (), **options: str
    ) -> "RunFile":
        """Reads a file.

        Args:
            path: A YAML file.
            overrides: Settings in place of those of the file; see `override`.
            **options: Names of options of the command line, by setting.

        Raises:
            ConfigError: The file is missing or is not YAML, or an override is none.
        """
        keys = "the keys model, output_dir and jobs"
        text, values = read_mapping(path, "run file", keys)
        values, found, notes = override(values, overrides)
        if notes:
            logger.info("%s: overridden: %s", path, "; ".join(notes))
        return cls(
            path=pathlib.Path(path),
            text=text,
            values=values,
            options=options,
            overrides=found,
        )

    def kept_text(self) -> str:
        """Returns the file, with the settings of the command line in comments.

        `begun_defaults` reads them.
        """
        given = self.overrides.values()
        lines = [f"{_OVERRIDDEN}{one_line(text)}\n" for text in given]
        return "".join([*lines, self.text])

    def config(
        self, settings: Mapping[str, Any], *, find_missing: FindMissing | None = None
    ) -> RunConfig:
        """Checks the settings.

        Args:
            settings: Settings of the run, which replace those of the file.
            find_missing: Finds files and folders that are missing, which errors then
                list, too.

        Raises:
            ConfigError: Settings break rules; the message lists them all.
        """
        for path, text in self.overrides.items():
            if path[0] in settings:
                option = self.options.get(str(path[0]), path[0])
                raise ConfigError(f"{text}: {option} is given as well. Keep one.")
        values = {**self.values, **settings}
        source = self._source(settings)
        return run_config(values, source=source, find_missing=find_missing)

    @contextlib.contextmanager
    def rewords(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Raises errors about settings in terms of this file and its options."""
        try:
            yield
        except JaxloraError as error:
            if not error.problems:
                raise
            expansion = expand_run(_with_defaults(self.values))
            placed = _placed(error.problems, self.values, expansion)
            raise settings_error(placed, self._source(settings)) from error

    def _source(self, settings: Mapping[str, Any]) -> Source:
        named: dict[Path, str] = {
            (key,): self.options[key] for key in settings if key in self.options
        }
        named |= self.overrides

        find_line = line_finder(self.text)

        def line(path: Path) -> int | None:
            return None if path[:1] and path[0] in settings else find_line(path)

        return Source(str(self.path), line, named)


def begun_defaults(path: pathlib.Path) -> dict[str, Any]:
    """Returns the `defaults` of the run file with which a run has begun.

    Args:
        path: The copy of it in the run's folder; see `RunFile.kept_text`.

    Raises:
        ConfigError: The copy cannot be read.
    """
    text, values = read_mapping(path, "run file", "the keys model and jobs")
    lines = itertools.takewhile(lambda s: s.startswith(_OVERRIDDEN), text.splitlines())
    values, *_ = override(values, [line.removeprefix(_OVERRIDDEN) for line in lines])
    return values.get("defaults") or {}


def load_job(path: str | pathlib.Path, defaults: Mapping[str, Any]) -> LoraJob:
    """Reads one job from a YAML file, which has the keys of `LoraJob`.

    Args:
        path: A YAML file. Paths in it are relative to the working directory.
        defaults: Settings that the job has if the file does not give them.

    Raises:
        ConfigError: As in `load_run`. Or a default is that of a sweep, with several
            values.
    """
    keys = "the keys of a job, such as name and data"
    text, own = read_mapping(path, "job file", keys)
    ours, _ = LoraJob.known(defaults)
    values = _job_with_defaults(own, defaults, ours)
    try:
        return LoraJob.model_validate(values)
    except pydantic.ValidationError as error:
        taken: dict[Path, str] = {
            (key,): f"{path}: {key}, from the defaults of the run's file (give another "
            "one in the job file)"
            for key in values.keys() - own.keys()
        }
        source = Source(str(path), line_finder(text), taken)
        raise settings_error(problems_of(error), source) from None


def read_mapping(
    path: str | pathlib.Path, kind: str, keys: str
) -> tuple[str, dict[str, Any]]:
    """Reads a YAML file that must hold a mapping; returns its text and the mapping."""
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: this {kind} does not exist.") from None
    # A ValueError is a byte that is not UTF-8, or a NUL in the path.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # without the path
        raise ConfigError(f"{path}: cannot be read as YAML: {why}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a {kind} is a mapping with {keys}, not a {type(values).__name__}."
        )
    return text, values


def run_config(
    values: Mapping[str, Any],
    *,
    source: Source | None = None,
    find_missing: FindMissing | None = None,
) -> RunConfig:
    """Checks the contents of a run file; see `load_run`.

    Args:
        values: The contents.
        source: Describes the file in errors; None: as `run`.
        find_missing: See `RunFile.config`.
    """
    source = source or Source("run")
    defaults = values.get("defaults") or {}
    if not isinstance(defaults, dict):
        wrong = Problem(path=("defaults",), kind="dict_type", text="", given=defaults)
        raise settings_error([wrong], source)
    _, refused = LoraJob.known(defaults)
    problems = unknown(defaults, refused, "defaults")
    expansion = expand_run(_with_defaults(values))
    problems += expansion.problems
    try:
        config = RunConfig.model_validate(expansion.values)
        if not problems:
            config._notes = expansion.notes
            return config
    except pydantic.ValidationError as error:
        problems += _placed(problems_of(error), values, expansion)
    if find_missing is not None:
        known, _ = RunConfig.known(expansion.values)
        ours = {name: expansion.values[key] for key, name in known.items()}
        missing = [problem_of(*one) for one in find_missing(ours)]
        problems += _placed(missing, values, expansion)
    raise settings_error(_first_of_swept(problems), source)


def _first_of_swept(problems: list[Problem]) -> list[Problem]:
    """Leaves out what other configurations repeat about a setting of a sweep."""
    found: dict[object, Problem] = {}
    for number, problem in enumerate(problems):
        is_swept = problem.path[:2] == ("sweep", "parameters")
        found.setdefault((problem.path, problem.kind) if is_swept else number, problem)
    return list(found.values())


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run whose jobs have the defaults that they lack.

    A sweep without jobs is one over the defaults.
    """
    out = {key: value for key, value in values.items() if key != "defaults"}
    defaults = values.get("defaults")
    ours, _ = LoraJob.known(defaults if isinstance(defaults, dict) else {})
    if values.get("sweep") is not None:
        out.setdefault("jobs", [{}])
    if isinstance(jobs := out.get("jobs"), list):
        out["jobs"] = [_job_with_defaults(job, defaults, ours) for job in jobs]
    return out


def _job_with_defaults(job: Any, defaults: Any, ours: dict[str, str]) -> Any:
    """Adds the defaults that a job lacks, whatever it calls them."""
    if not isinstance(job, dict):
        return job
    own = {LoraJob.aliases.get(key, key) for key in job}
    return {k: defaults[k] for k, name in ours.items() if name not in own} | job


def _placed(
    problems: Iterable[Problem], values: Mapping[str, Any], expansion: Expansion
) -> list[Problem]:
    """Returns problems of a run in the places where its file has the settings."""
    place = lambda problem: _place(problem.path, values, expansion)
    return [dataclasses.replace(one, path=place(one)) for one in problems]


def _place(path: Path, values: Mapping[str, Any], expansion: Expansion) -> Path:
    match path:
        case ("jobs", int(number), setting, *rest):
            pass
        case (setting, *rest):
            return RunConfig.key_of(setting, values) or setting, *rest
        case _:
            return path
    if number < len(expansion.origins):
        origin = expansion.origins[number]
        number = origin.template
        for end in (2, 1):
            parts = path[2:][:end]
            where = origin.varied.get(".".join(map(str, parts)), ())
            if where[:1] == ("sweep",):
                return *where, *path[2 + end :]
    jobs = values.get("jobs")
    job = jobs[number] if isinstance(jobs, list) and number < len(jobs) else {}
    if (key := LoraJob.key_of(setting, job)) is not None:
        return "jobs", number, key, *rest
    key = LoraJob.key_of(setting, values.get("defaults"))
    if key is None or not isinstance(job, dict):  # it joined later
        return "jobs", number, setting, *rest
    return "defaults", key, *rest
