"""LoRAFusion's multi-LoRA scheduler, implemented from its paper.

References:
    LoRAFusion, https://arxiv.org/abs/2510.00206, section 5.2 and Algorithm 1.
"""

from jaxlora.scheduler.lorafusion.algorithm import (
    Packing,
    Report,
    pack,
    pack_with_report,
)
from jaxlora.scheduler.lorafusion.group import Statistics, head_tail, statistics

__all__ = [
    "Packing",
    "Report",
    "Statistics",
    "head_tail",
    "pack",
    "pack_with_report",
    "statistics",
]
