"""Constant: a float of a module that belongs to the program, as an eps does, and is no input of it.

    class RMSNorm(nn.Module):
        eps = Constant()        self.eps = 1e-20 and self.eps: a float, as without it

Held as text. torch.compile takes a float attribute that differs from the one it compiled before for an input that
varies, and an input that is no tensor cannot enter a nested_compile_region; text is always part of the program.
"""

from __future__ import annotations

from torch import nn


class Constant:
    """A descriptor; two modules that differ in one are two programs, and each has its number in its graph."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.text = f"{name}_text"

    def __get__(self, module: nn.Module, owner: type) -> float:
        return float(getattr(module, self.text))

    def __set__(self, module: nn.Module, value: float) -> None:
        setattr(module, self.text, repr(float(value)))
