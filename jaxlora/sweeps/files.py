"""Writes the report of a run, which may be a sweep, into its folder; prints sweeps."""

import logging
import pathlib
import shutil

from rich.console import Console

from jaxlora.adapters.files.export_record import is_ours
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.common.atomic import make_folder, wrap_os_errors, write_text
from jaxlora.common.console import literal, plain_table, show, stdout
from jaxlora.common.counted import counted
from jaxlora.config import RunConfig
from jaxlora.config.configuration_names import value_text
from jaxlora.run.folder import ADAPTERS, MERGED, SWEEP_FILES, is_own
from jaxlora.sweeps.page import write_page
from jaxlora.sweeps.ranking import SweepReport, varied_settings
from jaxlora.train.report.summary import RunResult, print_jobs, write_report

logger = logging.getLogger(__name__)

TABLE, PAGE = SWEEP_FILES
_MOST_ROWS = 20
_WIDE = 100  # columns of a terminal that has room for the settings


def write_result(result: RunResult[SweepReport], config: RunConfig) -> None:
    """Writes the report of a sweep; merges the best configuration if asked to.

    The PEFT folders of other configurations are removed, if the sweep has ended and
    does not keep them.

    Raises:
        JaxloraError: A file cannot be written, or the best one cannot be merged.
    """
    report, sweep, folder = result.sweep, config.sweep, result.output_dir
    assert report is not None and sweep is not None
    if not (sweep.keep_others or result.interrupted):
        remove_others(report, folder)
    write_sweep(report, folder)
    write_report(result)
    if sweep.merge_best and not result.interrupted:
        merge_best(report, folder, config.model, config.revision)


def print_summary(
    result: RunResult[SweepReport], console: Console | None = None
) -> None:
    """Prints the jobs of a run, or the ranked configurations of its sweep."""
    console = console or stdout()
    if result.sweep is None:
        print_jobs(result, console)
    else:
        print_sweep(result.sweep, result.output_dir, console)
    if result.interrupted:
        show(console, "Interrupted; a checkpoint was written. Continue with --resume.")


def write_sweep(report: SweepReport, folder: pathlib.Path) -> None:
    """Writes sweep.csv and sweep.html.

    Raises:
        StorageError: A file cannot be written.
    """
    write_text(folder / TABLE, report.csv())
    write_page(report, f"Sweep in {folder}", folder / PAGE)


def remove_others(report: SweepReport, run: pathlib.Path) -> None:
    """Removes the PEFT folders of the configurations that are not kept.

    A folder that holds other files, or to which a link leads, stays, with a warning.

    Raises:
        StorageError: A folder cannot be removed.
    """
    for trial in report.trials:
        name, folder = f"{ADAPTERS}/{trial.settings.name}", trial.folder
        if trial.settings.name in report.kept or folder is None or not folder.is_dir():
            continue
        is_its = folder.resolve() == (run / name).resolve() and is_own(run, name)
        if not (is_its and is_ours(folder)):
            logger.warning("%s is a link or holds other files, so it is kept", folder)
            continue
        with wrap_os_errors(folder):
            shutil.rmtree(folder)


def merge_best(
    report: SweepReport, folder: pathlib.Path, base: str, revision: str | None
) -> None:
    """Merges the best configuration into its base, unless that was done before.

    Raises:
        JaxloraError: It cannot be merged, or the files cannot be written.
    """
    best = report.best
    out = folder / MERGED / best.settings.name
    was_evaluated = best.settings.name in report.kept
    if best.folder is None or not was_evaluated or out.exists():
        return
    if best.warning:
        logger.warning(
            "%s is merged into its base: %s", best.settings.name, best.warning
        )
    with wrap_os_errors(out.parent):
        make_folder(out.parent)
    merge_adapter(base, best.folder, out, revision=revision)
    logger.info("%s: merged into its base: %s", best.settings.name, out)


def print_sweep(report: SweepReport, folder: pathlib.Path, console: Console) -> None:
    """Prints the best configurations, and where the report is."""
    table = plain_table()
    # Names of configurations have the settings, if there is no room for them.
    is_narrow = console.width < _WIDE
    left_out = {"warning"}  # below the table
    if is_narrow:
        left_out |= {"tokens", "device seconds", *report.varied}
    head = {i: n for i, n in enumerate(report.header()) if n not in left_out}
    for name in head.values():
        is_text = name in ("configuration", "copy of", *report.varied)
        table.add_column(
            literal(name),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text,
        )
    for place, trial in enumerate(report.trials[:_MOST_ROWS]):
        is_kept = trial.settings.name in report.kept
        row = report.row(place)
        cells = [_shown(row[i]) for i in head]
        table.add_row(*map(literal, cells), style="bold" if is_kept else "")
    show(console, table)
    if (left := len(report.trials) - _MOST_ROWS) > 0:
        show(console, f"and {left} more in {folder / TABLE}")
    for warning, names in report.warnings.items():
        more = (
            "" if len(names) <= _MOST_ROWS else f" and {len(names) - _MOST_ROWS} more"
        )
        named = ", ".join(names[:_MOST_ROWS])
        show(console, f"warning: {named}{more}: {warning}", soft_wrap=True)
    for trial in report.trials:
        if trial.settings.name in report.kept and trial.folder is not None:
            show(console, f"best: {trial.folder}", soft_wrap=True)
    merged = folder / MERGED / report.best.settings.name
    if merged.is_dir():
        show(console, f"merged: {merged}", soft_wrap=True)
    show(console, f"report: {folder / PAGE}", soft_wrap=True)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and value >= 0.1:
        return f"{value:.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else value_text(value)


def print_configurations(run: RunConfig, console: Console) -> None:
    """Prints a row for each configuration, with the settings in which they differ."""
    assert run.sweep is not None
    rules = ", ".join(rule.type for rule in run.sweep.early_exit) or "none"
    show(console, f"{counted(len(run.jobs), 'configuration')}, early exit: {rules}")
    table = plain_table()
    columns = varied_settings(run.jobs)
    table.add_column("configuration", overflow="fold")
    for name in columns:
        table.add_column(literal(name), overflow="fold")
    for job in run.jobs:
        cells = [literal(value_text(column[job.name])) for column in columns.values()]
        table.add_row(literal(job.name), *cells)
    show(console, table)
