"""By what an item's pairs are measured: its settings and marks, as tolerance, schedule and policy.

The command line wins over a marker, a marker over the ini file, the ini file over the device's
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fastlayer import gate, measurement
from pytest_fastlayer.comparison import Tolerance
from pytest_fastlayer.measurement import Progress, Schedule
from pytest_fastlayer.options import Settings
from pytest_fastlayer.session import make_policy


@dataclass(frozen=True)
class Marks:
    """What the test's own markers say."""

    tolerance: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, Any] = field(default_factory=dict)
    seeds: int | None = None


@dataclass(frozen=True)
class Terms:
    """Settings and marks of one test item, resolved for a pair on a device."""

    settings: Settings
    marks: Marks
    family_size: int  #: cases of the run that are timed
    rerun: str  #: the command that replays this test
    progress: Progress

    def knob(self, name: str, device: torch.device) -> Any:
        """A setting of this item: command line, marker, ini, or the device's default."""
        marked = self.marks.seeds if name == "seeds" else self.marks.timing.get(name)
        return self.settings.choose(name, marked, measurement.DEFAULTS[device.type][name])

    @property
    def seeds_are_asked(self) -> bool:
        """The number of seeds was asked for, by command line or marker: no budget cuts it."""
        return self.settings.seeds is not None or self.marks.seeds is not None

    def tolerance(self, given: Tolerance | None = None) -> Tolerance:
        """The pair's tolerance: as given, else by marker, else by ini.

        The command line may only tighten what the test promises.
        """
        promised: dict[str, Any] = {"atol": 0.002, "rtol": 0.02, "mode": "either"}
        if given is not None:
            promised = {"atol": given.atol, "rtol": given.rtol, "mode": given.mode}
        else:
            ini = self.settings.ini
            promised |= {k: v for k, v in ini.items() if k in promised and v is not None}
            promised |= dict(self.marks.tolerance)
        for name in ("atol", "rtol"):
            asked = getattr(self.settings, name)
            if asked is None:
                continue
            if asked > promised[name]:
                raise ValueError(
                    f"--fastlayer-{name}={asked:g} would loosen this test's {name} of "
                    f"{promised[name]:g}; a tolerance is loosened only where the test states it, "
                    "with @pytest.mark.tolerance"
                )
            promised[name] = asked
        return Tolerance(**promised)

    def schedule(self, device: torch.device, reference_kind: str = "other") -> Schedule:
        """How long a pair is timed; a diagnostic where the reference is an oracle."""
        return Schedule(
            pairs=self.knob("pairs", device),
            settle_s=self.knob("settle_s", device),
            block_ms=self.knob("block_ms", device),
            budget_s=self.knob("budget_s", device),
            l2=self.knob("l2", device),
            min_effect=self.knob("min_effect", device),
            control=1.0 if self.settings.aa else 1 / 3,
            diagnostic=reference_kind == "oracle",
        )

    def policy(self) -> gate.Policy:
        """The gate's rules for this item."""
        return make_policy(self.settings, family_size=self.family_size)
