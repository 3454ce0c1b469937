from .forecast import RunForecast, plan_run, plan_run_groups

__all__ = ["RunForecast", "plan_run", "plan_run_groups"]
