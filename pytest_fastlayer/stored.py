"""The baselines that a run is held against: each is read once, before anything is measured.

What is missing, unreadable or another device's is told before the first forward. What happens to
the files later cannot cost a measured case its verdict.
"""

from __future__ import annotations

from pathlib import Path

from pytest_fastlayer import baselines
from pytest_fastlayer.comparability import describe
from pytest_fastlayer.options import Settings
from pytest_fastlayer.records import Device, RunRecord

_CREATE = "create it with --fastlayer-update-baseline"


class Stored:
    """The baselines of one process, by device."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._read: dict[Path, RunRecord | None] = {}
        self._flag = f"--fastlayer-baseline={settings.baseline}"

    def path(self, device: Device) -> Path:
        """The file for ``device``, whether or not it is there."""
        return baselines.find(self._settings.baseline, device)

    def of(self, device: Device) -> RunRecord | None:
        """What is stored for ``device``; None where nothing is, and nothing has to be.

        Raises:
            BaselineError: it cannot be read; or it is missing or another device's, where it was
                given by name, is required, or is to be updated.
        """
        stored = self._load(device)
        if stored is not None and self._must_serve and not stored.device.matches(device):
            raise self._foreign(stored, device)
        return stored

    def check(self, devices: list[Device]) -> None:
        """Whether some of ``devices``, the run's own first, can be served; at a session's start.

        The devices are told apart by kind and name alone: threads are a test's own choice.

        Raises:
            BaselineError: as ``of``.
        """
        complaint: baselines.BaselineError | None = None
        for device in devices:
            try:
                stored = self._load(device)
            except baselines.BaselineNotFoundError as error:
                complaint = complaint or error
                continue
            if stored is None or not self._must_serve:
                return
            if (stored.device.type, stored.device.name) == (device.type, device.name):
                return
            complaint = complaint or self._foreign(stored, device)
        if complaint is not None:
            raise complaint

    def _foreign(self, stored: RunRecord, device: Device) -> baselines.BaselineError:
        return baselines.BaselineError(
            f"{self._flag}: {self.path(device)} was measured on {describe(stored.device)}, this "
            f"run is on {describe(device)}; give this device's own file, or a folder of "
            f"<device>.json files, or {_CREATE}"
        )

    @property
    def _must_serve(self) -> bool:
        settings = self._settings
        return settings.baseline_given or settings.update_baseline or settings.require_baseline

    def _load(self, device: Device) -> RunRecord | None:
        path, settings = self.path(device), self._settings
        if path not in self._read:
            try:
                self._read[path] = baselines.load(path)
            except baselines.BaselineNotFoundError:
                self._read[path] = None
            except baselines.BaselineError as error:
                raise baselines.BaselineError(
                    f"--fastlayer-baseline: {error}; mend or remove it, or give another"
                ) from None
        stored = self._read[path]
        if stored is None and not settings.update_baseline:
            if settings.baseline_given:
                there = sorted(one.name for one in path.parent.glob("*.json"))[:5]
                beside = f" (there are {', '.join(there)})" if there else ""
                raise baselines.BaselineNotFoundError(
                    f"{self._flag}: {path} does not exist{beside}; give a record or a folder of "
                    f"<device>.json files, or {_CREATE}"
                )
            if settings.require_baseline:
                raise baselines.BaselineNotFoundError(
                    f"--fastlayer-require-baseline: {path} does not exist, so every case would "
                    f"fail; {_CREATE}, or drop the requirement"
                )
        return stored
