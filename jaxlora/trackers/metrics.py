"""The names and values that every experiment tracker shows for a run.

Names are those of the Hugging Face trainers, so that curves of both overlay. A job has
the same names in every tracker, and each job is a run of its own there.
"""

from jaxlora.run.events import EvalEvent, Event, JobInfo, StepEvent, WindowEvent

TRAIN_LOSS, EVAL_LOSS, EVAL_METRIC = "train/loss", "eval/loss", "eval/metric"


def job_metrics(event: Event) -> dict[str, float]:
    """Returns the metrics of a job's step or evaluation; empty for other events."""
    if isinstance(event, StepEvent):
        return {
            TRAIN_LOSS: event.loss,
            "train/grad_norm": event.grad_norm,
            "train/learning_rate": event.learning_rate,
            "train/num_tokens": float(event.progress.num_tokens),
            **{f"train/{name}": value for name, value in event.metrics.items()},
        }
    if isinstance(event, EvalEvent):
        metric = {} if event.metric is None else {EVAL_METRIC: event.metric}
        more = {f"eval/{name}": value for name, value in event.metrics.items()}
        return {EVAL_LOSS: event.eval_loss, **metric, **more}
    return {}


def run_metrics(event: WindowEvent) -> dict[str, float]:
    """Returns the metrics of a whole run, whose step is its round."""
    return {"run/tokens_per_second": event.tokens_per_second, "run/fill": event.fill}


def hyperparameters(info: JobInfo) -> dict[str, str | float | bool]:
    """Returns the settings of a job in plain values; those that are None are absent."""
    found: dict[str, str | float | bool] = {}
    for name, value in info.settings.model_dump(mode="json").items():
        if value is None or name == "name":
            continue
        is_plain = isinstance(value, str | int | float | bool)
        found[name] = value if is_plain else str(value)
    paths = ", ".join(one.path for one in info.settings.data.sets)
    return found | {"data": paths, "num_steps": info.num_steps}
