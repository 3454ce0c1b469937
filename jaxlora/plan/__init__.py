"""What a run would do, without training: `jaxlora plan`."""

from jaxlora.plan.forecast import Part, RunForecast, plan_run

__all__ = ["Part", "RunForecast", "plan_run"]
