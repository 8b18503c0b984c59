"""The decision: a pure function of the contract and the admissions, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fastlayer.admissions import Admission, Admissions
from fastlayer.contract import RuntimeContract
from fastlayer.errors import RouteError, UnsafeFallbackError
from fastlayer.routes import ROUTES, Launch, Route

Policy = Literal["strict", "eligible"]

POLICIES: tuple[str, ...] = get_args(Policy)

#: The route that needs no evidence.
REFERENCE_ROUTE = "dense"


@dataclass(frozen=True)
class Decision:
    """Which route runs a call, on what grounds, and why the others do not.

    Attributes:
        route: name of the route.
        launch: its launch configuration.
        grounds: "admitted", "eligible", "requested" or "reference".
        admission: the admitting row, where there is one.
        rejected: ``(route, reasons)`` of the routes preferred to this one and of the others with
            an objection, in order of priority.
        notes: what running it turned up, e.g. that a capture failed and the route ran eagerly.
        contract: the call that was decided on.
    """

    route: str
    launch: Launch
    grounds: str
    contract: RuntimeContract
    admission: Admission | None = None
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """The decision as people read it, several lines."""
        contract = self.contract
        case = "undisclosed shape" if contract.case is None else f"case {contract.case}"
        lines = [
            f"{contract.config.label()} ({case}), {contract.dtype}, mask {contract.mask.value}, "
            f"{contract.device.name}",
            f"route:    {self.route}{_launch_text(self.launch)}",
            f"grounds:  {self._grounds_text()}",
        ]
        lines += [f"note:     {note}" for note in self.notes]
        lines += [f"rejected: {name}: {'; '.join(reasons)}" for name, reasons in self.rejected]
        return "\n".join(lines)

    def _grounds_text(self) -> str:
        if self.admission is not None:
            return f"admitted by {self.admission.evidence}"
        return {
            "requested": "requested by route=, without regard to admissions",
            "eligible": 'no evidence: first eligible route under policy="eligible"',
            "reference": "reference arithmetic, which needs no evidence. To admit a faster route "
            "on this device: pytest --fastlayer-bench --fastlayer-admit",
        }[self.grounds]


def decide(
    contract: RuntimeContract,
    admissions: Admissions,
    policy: Policy = "strict",
    route: str | None = None,
    launch: Launch | None = None,
    routes: Sequence[Route] = ROUTES,
) -> Decision:
    """Chooses the route for one call.

    An explicit ``route`` is taken or refused, never replaced; ``launch`` then overrides its
    default. Otherwise the admitted route is taken; under the policy "eligible" the first route
    without objection whose launch was not refused; else the reference arithmetic.

    Raises:
        RouteError: ``route`` is unknown or objects to the call.
        UnsafeFallbackError: no faster route may be used and dense would not fit the memory.
    """
    objections = {item.name: tuple(item.objections(contract)) for item in routes}
    able = [name for name, reasons in objections.items() if not reasons]
    if route is not None:
        return _requested(contract, route, launch, objections, able, routes)

    reasons: dict[str, tuple[str, ...]] = {}
    row = admissions.lookup(contract)
    for item in routes:
        if objections[item.name]:
            reasons[item.name] = objections[item.name]
    if row is not None and row.route in able:
        return _decision(contract, row.route, row.launch, "admitted", reasons, row)

    for item in routes:
        if item.name not in able or item.name == REFERENCE_ROUTE:
            continue
        if policy == "strict":
            reasons[item.name] = (_not_admitted(contract),)
            continue
        refused: list[str] = []
        for option in item.launches(contract):
            refusal = admissions.refusal(contract, item.name, option)
            if refusal is None:
                return _decision(contract, item.name, option, "eligible", reasons)
            refused.append(f"refused by measurement{_launch_text(option)}: {refusal.reason}")
        reasons[item.name] = tuple(refused) or ("it offers no launch for this call",)

    if REFERENCE_ROUTE in able:
        return _decision(contract, REFERENCE_ROUTE, {}, "reference", reasons)
    others = {name: why for name, why in reasons.items() if name != REFERENCE_ROUTE}
    raise UnsafeFallbackError(
        contract.config.label(),
        contract.dense_bytes,
        contract.available_bytes,
        "; ".join(f"{name}: {', '.join(why)}" for name, why in others.items()) or "there is none",
    )


def _requested(
    contract: RuntimeContract,
    route: str,
    launch: Launch | None,
    objections: dict[str, tuple[str, ...]],
    able: list[str],
    routes: Sequence[Route],
) -> Decision:
    chosen = next((item for item in routes if item.name == route), None)
    if chosen is None:
        unknown = (f"no route has that name; there are {', '.join(objections)}",)
        raise RouteError(route, unknown, able)
    if objections[route]:
        raise RouteError(route, objections[route], able, objections)
    options = chosen.launches(contract)
    chosen_launch: Launch = launch if launch is not None else options[0] if options else {}
    reasons = {name: why for name, why in objections.items() if why}
    return _decision(contract, route, chosen_launch, "requested", reasons)


def _decision(
    contract: RuntimeContract,
    route: str,
    launch: Launch,
    grounds: str,
    reasons: dict[str, tuple[str, ...]],
    admission: Admission | None = None,
) -> Decision:
    rejected = tuple((name, why) for name, why in reasons.items() if name != route)
    return Decision(route, dict(launch), grounds, contract, admission, rejected)


def _not_admitted(contract: RuntimeContract) -> str:
    what = "this shape" if contract.case is None else f"case {contract.case}"
    return (
        f"not admitted for {what} on {contract.device.name} at float32 matmul precision "
        f"{contract.precision.float32_matmul_precision}"
    )


def _launch_text(launch: Launch) -> str:
    if not launch:
        return ""
    return " (" + ", ".join(f"{key}={value}" for key, value in launch.items()) + ")"
