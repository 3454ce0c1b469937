"""What torch users run, for the kernel benchmarks."""

import functools
from collections.abc import Callable, Iterator

import torch

from scripts.bench_cases import Case


def calls(case: Case) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(method, pass, function to run) of each."""
    device, dtype = "cuda", torch.bfloat16
    g, r, rows = len(case.ranks), max(case.ranks), case.tokens // len(case.ranks)

    make = functools.partial(torch.randn, device=device, dtype=dtype)

    def tensors(k, widths):
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

    def peft(x, w, a, b):
        """As PEFT computes a LoRA linear, one adapter's rows after the other."""
        drop = functools.partial(torch.nn.functional.dropout, p=case.rate)
        delta = [
            torch.nn.functional.linear(
                torch.nn.functional.linear(drop(x[i * rows : (i + 1) * rows]), a[i]),
                b[i],
            )
            for i in range(g)
        ]
        return torch.nn.functional.linear(x, w) + 2.0 * torch.cat(delta)

    offsets = torch.arange(1, g + 1, device=device, dtype=torch.int32) * rows

    def grouped(x, w, a, b):
        """`torch._grouped_mm` twice, as in Megatron-Bridge; without dropout."""
        s = torch._grouped_mm(x, a.transpose(1, 2), offs=offsets)
        delta = torch._grouped_mm(s, b.transpose(1, 2), offs=offsets)
        return torch.nn.functional.linear(x, w) + 2.0 * delta

    groups = [tensors(k, widths) for k, widths in case.groups]
    for name, method in (
        ("torch, as PEFT", peft),
        ("torch.compile, as PEFT", torch.compile(peft)),
        ("torch._grouped_mm, no dropout", grouped),
    ):
        for what in ("forward", "both"):

            def run(method=method, what=what):
                for x, matrices, dy in groups:
                    y = [method(x, *matrix) for matrix in matrices]
                    if what == "both":
                        trained = [z for _, *ab in matrices for z in ab]
                        torch.autograd.grad(y, (x, *trained), dy)

            yield name, what, run
