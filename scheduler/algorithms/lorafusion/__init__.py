"""LoRAFusion's multi-LoRA scheduler, implemented from its paper.

References:
    LoRAFusion, https://arxiv.org/abs/2510.00206, section 5.2 and Algorithm 1.
"""

from jaxlora.scheduler.algorithms.lorafusion.algorithm import pack

__all__ = ["pack"]
