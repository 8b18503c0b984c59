"""CUDA: does the candidate keep to the order of the caller's current stream?

Inputs arrive late (behind a delay on the current stream), and the outputs are copied on that
stream as soon as it gets there. Work on another stream that does not wait for the current one
reads the inputs before they arrive: certain to be caught. Work that nobody waits for is copied
before it is done: a race that the copy wins unless the hidden work takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pytest_fastlayer.feeding import is_overlapping, overwrite
from pytest_fastlayer.outputs import tensors
from pytest_fastlayer.probes.memory import poison_free_memory

#: GPU cycles before the inputs arrive: some 30 ms at 1.8 GHz, far longer than any launch.
DELAY_CYCLES = 50_000_000
#: Repetitions, for the half of the probe that is a race.
ATTEMPTS = 3
#: Of an output larger than this only the end is copied: in time, and without its memory again.
COPIED_BYTES = 256 << 20


def late_inputs(
    call: Callable[[], object], args: object, want: object, device: torch.device
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Call ``ATTEMPTS`` times with late inputs.

    Yields copies of the output's tensors, taken in stream order, and the same parts of ``want``.
    """
    data = [one for one in tensors(args) if one.is_floating_point() and not is_overlapping(one)]
    contents = [one.clone() for one in data]
    for _ in range(ATTEMPTS):
        poison_free_memory(want)
        for one in data:
            overwrite(one, torch.zeros_like(one), silently=True)
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(DELAY_CYCLES)
            for one, content in zip(data, contents, strict=True):
                overwrite(one, content, silently=True)
            copies = [last_rows(one).clone() for one in tensors(call())]
            torch.cuda.synchronize(device)
        yield copies, [last_rows(one) for one in tensors(want)]


def last_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The end of a large tensor, which hidden work writes last; a small one whole."""
    size = tensor.numel() * tensor.element_size()
    if size <= COPIED_BYTES or tensor.dim() == 0:
        return tensor
    return tensor[-max(1, tensor.shape[0] * COPIED_BYTES // size) :]
