"""Meshes, and where parameters go on them. Knows no model and no job."""

from jaxlora.sharding.mesh import AXES, make_mesh
from jaxlora.sharding.rules import fsdp_placement, fsdp_spec

__all__ = ["AXES", "fsdp_placement", "fsdp_spec", "make_mesh"]
