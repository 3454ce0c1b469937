"""Profiles of compiled programs: kernels, their origins and their memory traffic."""
