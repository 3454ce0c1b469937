"""Deploys replicas of different shapes, and sends samples to them (LobRA)."""

from jaxlora.scheduler.replicas.bound import StepBound, step_bound
from jaxlora.scheduler.replicas.deploy import (
    PlannedDeployment,
    best_uniform,
    one_after_another,
    plan_deployment,
    useful_kinds,
)
from jaxlora.scheduler.replicas.dispatcher import Dispatch, dispatch
from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind
from jaxlora.scheduler.replicas.simulate import Part, SimulatedSteps, simulate_steps

__all__ = [
    "Deployment",
    "Dispatch",
    "Part",
    "PlannedDeployment",
    "ReplicaKind",
    "SimulatedSteps",
    "StepBound",
    "best_uniform",
    "dispatch",
    "one_after_another",
    "plan_deployment",
    "simulate_steps",
    "step_bound",
    "useful_kinds",
]
