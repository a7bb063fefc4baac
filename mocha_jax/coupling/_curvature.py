"""Second derivatives, as a coupling needs them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from jax import Array

from mocha_jax._core.pytree import Pytree


class Curvature(Pytree):
    r"""Second derivatives of the losses of all tasks, $H_t = \sum_i b_{ti} x_{ti} x_{ti}^\top$."""

    @abstractmethod
    def times(self, w: Array) -> Array:
        r"""$H_tw_t$ of every task, ``[m, d]``."""

    @abstractmethod
    def sums(self, slopes: Array) -> Array:
        r"""$\sum_i \rho_{ti} x_{ti}$ of a number for every sample, ``[m, d]``."""

    @abstractmethod
    def left(self, w: Array, slopes: Array) -> Array:
        r"""$\rho_{ti} - b_{ti}x_{ti}^\top w_t$ of every sample."""

    @abstractmethod
    def scaled(self, scale: Array) -> Curvature:
        """Return the second derivatives for samples whose feature j is multiplied by ``scale[j]``."""

    @abstractmethod
    def own(self, scale: Array) -> OwnSystems:
        """Each task's system by itself, of its number of ``[m]``, or one ``[1]`` for all."""


class OwnSystems(Pytree):
    r"""The systems $I + s_tH_t$, factorised."""

    @abstractmethod
    def apply(self, right: Array) -> Array:
        r"""$(I + s_tH_t)^{-1}C_t$ of every task, ``[m, d]``, up to rounding of the systems: for a preconditioner."""

    @abstractmethod
    def solve(self, right: Array, slopes: Array) -> tuple[Array, Array]:
        r"""Solve $(I + s_tH_t)D_t = C_t + s_t\sum_i\rho_{ti}x_{ti}$.

        Args:
          right: C ``[m, d]``.
          slopes: $\rho$, a number for every sample.

        Returns:
          D ``[m, d]``, and what `Curvature.left` says of it.
        """

    @abstractmethod
    def bent(self) -> tuple[Array, Callable[[Array], Array]]:
        r"""$\sum_t (I + s_tH_t)^{-1}H_t$, ``[d, d]``, and what applies each task's to its row and adds up."""
