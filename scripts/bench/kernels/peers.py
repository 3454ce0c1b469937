"""The methods of torch users, for the kernel benchmarks."""

import functools
from collections.abc import Callable, Iterator

from jaxlora.bench.shapes import KernelCase


def calls(case: KernelCase) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yields the name of each method, the pass, and a function that runs it.

    It needs torch and a GPU.
    """
    import torch
    from torch.nn.functional import dropout, linear

    g, rows = len(case.ranks), case.tokens // len(case.ranks)

    def peft(x, w, a, b):
        """Computes a LoRA linear as PEFT does, one adapter's rows after the other."""
        drop = functools.partial(dropout, p=case.rate)
        delta = [
            linear(linear(drop(x[i * rows : (i + 1) * rows]), a[i]), b[i])
            for i in range(g)
        ]
        return linear(x, w) + 2.0 * torch.cat(delta)

    groups = [_tensors(case, k, widths) for k, widths in case.groups]
    for name, method in (
        ("torch, as PEFT", peft),
        ("torch.compile, as PEFT", torch.compile(peft)),
    ):
        for what in ("forward", "both"):
            yield name, what, functools.partial(_run, method, groups, what == "both")


def _tensors(case: KernelCase, k: int, widths: tuple[int, ...]):
    """Makes x, the matrices (w, a, b) of each linear, and the gradients of y."""
    import torch

    g, r = len(case.ranks), max(case.ranks)
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x = make(case.tokens, k).requires_grad_()
    matrices = [
        (
            make(n, k) * k**-0.5,
            (make(g, r, k) * k**-0.5).requires_grad_(),
            make(g, n, r).requires_grad_(),
        )
        for n in widths
    ]
    return x, matrices, [make(case.tokens, n) for n in widths]


def _run(method: Callable, groups: list, with_gradient: bool) -> None:
    import torch

    for x, matrices, dy in groups:
        y = [method(x, *matrix) for matrix in matrices]
        if with_gradient:
            trained = [z for _, *ab in matrices for z in ab]
            torch.autograd.grad(y, (x, *trained), dy)
