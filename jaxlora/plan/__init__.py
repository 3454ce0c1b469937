"""`jaxlora plan`: predicts a run without training it."""

from jaxlora.plan.forecast import RunForecast, plan_run

__all__ = ["RunForecast", "plan_run"]
