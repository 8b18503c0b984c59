"""The errors fastlayer raises: each says what was given, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class FastlayerError(Exception):
    """Base of every error that fastlayer raises on purpose."""


class ConfigError(FastlayerError, ValueError):
    """A configuration field, or an option of ``owner``, breaks its rule."""

    def __init__(
        self, field: str, value: object, rule: str, owner: str = "TransformerConfig"
    ) -> None:
        super().__init__(f"{owner}.{field} = {value!r}, but {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class InputError(FastlayerError, ValueError):
    """A tensor given to ``forward``, or a module given to ``from_reference``, does not fit."""

    def __init__(self, what: str, given: str, expected: str, remedy: str) -> None:
        super().__init__(f"{what}: given {given}; expected {expected}. {remedy}")


class RouteError(FastlayerError, ValueError):
    """A route was requested by name, and does not exist or cannot serve this call."""

    def __init__(
        self,
        route: str,
        objections: Sequence[str],
        valid: Sequence[str],
        rejected: Mapping[str, Sequence[str]] | None = None,
        remedy: str = "",
    ) -> None:
        choice = ", ".join(valid) if valid else "none"
        advice = remedy or (
            f"An explicit request never falls back. Routes that can: {choice}. Pass one of these "
            "as route=, or route=None to let the admissions decide."
        )
        super().__init__(
            f"route {route!r} cannot serve this call: {'; '.join(objections)}. {advice}"
        )
        self.route = route
        self.objections = tuple(objections)
        self.valid = tuple(valid)
        self.rejected = dict(rejected or {})


class RouteRefused(FastlayerError, RuntimeError):
    """A route found while binding that it must not serve; it objects to such calls from then on."""

    def __init__(self, route: str, reason: str) -> None:
        super().__init__(f"route {route!r} refuses this call: {reason}")
        self.route = route
        self.reason = reason


class UnsafeFallbackError(FastlayerError, RuntimeError):
    """No route is admitted, and dense arithmetic would not fit the memory that is free."""

    def __init__(self, shape: str, needed_bytes: int, available_bytes: int, reason: str) -> None:
        super().__init__(
            f"{shape}: the dense path would need {needed_bytes:,} bytes "
            f"({needed_bytes / 2**30:,.2f} GiB) and {available_bytes:,} bytes "
            f"({available_bytes / 2**30:,.2f} GiB) are available; no other route is used because "
            f"{reason}. Admit a route by measurement (pytest --fastlayer-bench --fastlayer-admit), "
            'pass policy="eligible" to run one without evidence, or reduce the batch.'
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class AdmissionError(FastlayerError, ValueError):
    """An admissions file does not follow its schema."""
