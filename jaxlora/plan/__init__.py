"""`jaxlora plan`: predicts a run without training it."""

from jaxlora.plan.forecast import Part, RunForecast, plan_run

__all__ = ["Part", "RunForecast", "plan_run"]
