"""Device meshes, pipeline stages, and the placement of parameters on devices.

Its modules are imported one by one, because `mesh_sizes` and `stages` need no JAX.
"""
