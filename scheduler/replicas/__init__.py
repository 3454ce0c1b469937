"""Deploys replicas of different shapes, and sends samples to them (LobRA)."""

from jaxlora.scheduler.replicas.bound import StepBound, step_bound
from jaxlora.scheduler.replicas.deploy import (
    PlannedDeployment,
    best_uniform,
    plan_deployment,
    useful_kinds,
)
from jaxlora.scheduler.replicas.dispatch import Dispatch, dispatch
from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind

__all__ = [
    "Deployment",
    "Dispatch",
    "PlannedDeployment",
    "ReplicaKind",
    "StepBound",
    "best_uniform",
    "dispatch",
    "plan_deployment",
    "step_bound",
    "useful_kinds",
]
