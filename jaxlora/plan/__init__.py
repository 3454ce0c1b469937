"""What a run would do, without training: `jaxlora plan`."""

from jaxlora.plan.forecast import RunForecast, plan_run

__all__ = ["RunForecast", "plan_run"]
