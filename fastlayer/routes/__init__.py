"""The routes, in the only priority list: the first without objection is tried first."""

from __future__ import annotations

from fastlayer.contract import RuntimeContract
from fastlayer.routes.base import Bound, Launch, Route
from fastlayer.routes.batch_stream import BatchStreamRoute
from fastlayer.routes.dense import DenseRoute
from fastlayer.routes.fused import FusedRoute
from fastlayer.routes.half_gemm import HalfGemmRoute
from fastlayer.routes.prefix_stream import PrefixStreamRoute
from fastlayer.routes.sdpa import SdpaRoute

ROUTES: tuple[Route, ...] = (
    FusedRoute(),
    PrefixStreamRoute(),
    BatchStreamRoute(),
    HalfGemmRoute(),
    SdpaRoute(),
    DenseRoute(),
)

ROUTE_NAMES: tuple[str, ...] = tuple(route.name for route in ROUTES)


def route_named(name: str) -> Route | None:
    """The route of that name, or None."""
    return next((route for route in ROUTES if route.name == name), None)


def eligible_routes(contract: RuntimeContract) -> list[str]:
    """Names of the routes without objection to this call, in order of priority."""
    return [route.name for route in ROUTES if not route.objections(contract)]


def launches(route: str, contract: RuntimeContract) -> list[Launch]:
    """The launches of ``route`` that are worth measuring on this call, the default first.

    Raises:
        KeyError: no route has that name.
    """
    found = route_named(route)
    if found is None:
        raise KeyError(f"no route is named {route!r}; there are {', '.join(ROUTE_NAMES)}")
    return found.launches(contract)


__all__ = [
    "ROUTES",
    "ROUTE_NAMES",
    "Bound",
    "Launch",
    "Route",
    "eligible_routes",
    "launches",
    "route_named",
]
