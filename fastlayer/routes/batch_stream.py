"""The batch in slices: peak memory is bounded by a working set, whatever the batch."""

from __future__ import annotations

from fastlayer.contract import RuntimeContract
from fastlayer.routes.base import Bound, Launch, common_objections
from fastlayer.routes.sdpa import bind_sdpa, sdpa_launches
from fastlayer.weights import ModelState


class BatchStreamRoute:
    """``sdpa`` over slices as large as the contract's working set and the free memory allow."""

    name = "batch_stream"

    def objections(self, contract: RuntimeContract) -> list[str]:
        found = common_objections(contract)
        whole = contract.config.linear_bytes(contract.itemsize)
        if whole <= contract.working_set_bytes:
            found.append(
                f"the whole batch needs {whole:,} bytes, within the working set of "
                f"{contract.working_set_bytes:,}, so slices would only add launches"
            )
        sample = contract.with_batch(1).config.linear_bytes(contract.itemsize)
        room = min(contract.working_set_bytes, contract.available_bytes)
        if sample > room:
            found.append(f"one sample alone needs {sample:,} bytes and the bound is {room:,}")
        return found

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        """As ``sdpa`` has them, in slices of the working set unless a launch's own are smaller."""
        largest = working_set_samples(contract)
        found: list[Launch] = []
        for launch in sdpa_launches(contract):
            size = launch.get("slice")
            sized = {**launch, "slice": min(largest, int(size)) if size else largest}
            if sized not in found:
                found.append(sized)
        return found

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        size = launch.get("slice") or working_set_samples(contract)
        return bind_sdpa(self.name, state, contract, {**launch, "slice": size})


def working_set_samples(contract: RuntimeContract) -> int:
    """Samples in a slice, at least one: as many as the working set and free memory hold.

    A slice takes what the body takes, and its own copy of the input where a graph reads it.
    """
    one = contract.with_batch(1).config
    sample = one.linear_bytes(contract.itemsize) + one.activation_bytes(contract.itemsize)
    room = min(contract.working_set_bytes, contract.available_bytes)
    return max(1, min(contract.config.batch_size, room // sample))
