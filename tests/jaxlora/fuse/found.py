"""What `explain` finds in a function."""

from jaxlora.fuse.explain import Explanation


def num_linears(explanation: Explanation) -> int:
    """Returns the number of linears with adapters; those that share x are one site."""
    return sum(len(site.shape.out_features) for site in explanation.sites)
