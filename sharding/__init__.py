"""Device meshes, and the placement of parameters on them."""

from jaxlora.sharding.mesh import AXES, make_mesh
from jaxlora.sharding.rules import fsdp_placement, fsdp_spec

__all__ = ["AXES", "fsdp_placement", "fsdp_spec", "make_mesh"]
