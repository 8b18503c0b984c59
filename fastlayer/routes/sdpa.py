"""Float32 scaled-dot-product attention on strided head views, eager, compiled or graph-captured."""

from __future__ import annotations

from fastlayer.contract import RuntimeContract
from fastlayer.routes.base import Bound, Launch, check_launch, common_objections
from fastlayer.routes.body import make_body, mkldnn_linear_available, serve_mask
from fastlayer.routes.execution import execute
from fastlayer.routes.slices import Slices
from fastlayer.weights import ModelState

#: Options of a launch and their values, per device type; an empty tuple admits any number.
_OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "cuda": {
        "packed_qkv": (True, False),
        "linear": ("aten",),
        "execution": ("graph", "compiled_graph", "eager", "compiled"),
        "slice": (),
    },
    "cpu": {
        "packed_qkv": (True, False),
        "linear": ("mkldnn", "aten"),
        "execution": ("eager", "compiled"),
        "slice": (),
    },
}

#: Executions worth measuring, the default first. On CUDA a graph removes the launch gaps that
#: dominate the small cases. On a CPU Inductor's code took 1.0 (case 12) and 3.0 (case 1) times as
#: long as the same launch run eagerly, after 8 to 17 seconds of compilation.
_EXECUTIONS: dict[str, tuple[str, ...]] = {
    "cuda": ("graph", "compiled_graph", "eager"),
    "cpu": ("eager",),
}

#: On a CPU a slice whose activation takes this many bytes stays in cache from one operation to the
#: next: on two quiet cores cases 1 and 5 ran 1.06 and 1.2 times as fast in slices of 32 samples
#: (2 MiB) as whole. Slices multiply the barriers between threads, though, and beside another busy
#: process the same cases ran at half the whole batch's speed and less: so whole is the default, and
#: slices are for a machine whose admission shows that they pay. A layer's weights must fit too:
#: case 8's (24 MiB) are read anew by each slice, which ran at 0.7 of the whole batch's speed.
#: Slices of fewer samples give the threads too little: case 13 in twos was no faster than whole.
_CACHED_BYTES = 2 * 2**20
_LEAST_SAMPLES = 8


class SdpaRoute:
    """Linear memory in N: the scores live only inside the fused attention kernel."""

    name = "sdpa"

    def objections(self, contract: RuntimeContract) -> list[str]:
        found = common_objections(contract)
        needed = contract.config.linear_bytes(contract.itemsize)
        if needed > contract.available_bytes:
            found.append(
                f"the whole batch at once needs {needed:,} bytes and "
                f"{contract.available_bytes:,} are available"
            )
        return found

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        return sdpa_launches(contract)

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        return bind_sdpa(self.name, state, contract, launch)


def sdpa_launches(contract: RuntimeContract) -> list[Launch]:
    """Launches worth measuring, the default first.

    On a CPU oneDNN's prepacked products come first: on a Zen 5 processor they took 0.4-0.5 of the
    time of the BLAS in torch's wheel.
    """
    choices = _options(contract)
    linears = [
        str(linear)
        for linear in choices["linear"]
        if linear != "mkldnn" or mkldnn_linear_available()
    ]
    found: list[Launch] = [
        {"packed_qkv": bool(packed), "linear": linear, "execution": execution}
        for execution in _EXECUTIONS.get(contract.device.type, ("eager",))
        for linear in linears
        for packed in choices["packed_qkv"]
    ]
    size = cached_samples(contract)
    return [*found, {**found[0], "slice": size}] if size else found


def bind_sdpa(name: str, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
    """The forward pass as ``launch`` says, for the route ``name``.

    Raises:
        ValueError: the launch holds an option or a value that does not exist on this device.
    """
    check_launch(name, launch, _options(contract))
    if contract.capturing:
        # No graph can be captured within the caller's, and nothing packed: a replay would read
        # buffers that a later edit of the weights leaves behind.
        state.notes.append("a CUDA graph is being captured: eager execution, weights not packed")
        launch = {**launch, "packed_qkv": False, "execution": "eager"}
    size = launch.get("slice")
    part = contract.with_batch(int(size)) if size else contract
    body = make_body(
        state,
        part,
        packed_qkv=bool(launch.get("packed_qkv", True)),
        linear=str(launch.get("linear", "aten")),
    )
    run = execute(body, str(launch.get("execution", "eager")), state, part)
    if size:
        run = Slices(body, run, int(size), state)
    return serve_mask(run, contract.mask)


def cached_samples(contract: RuntimeContract) -> int | None:
    """Samples of a slice that suits a CPU's caches, or None where slices do not pay."""
    config = contract.config
    layer_weights = config.parameter_count // config.num_layers * contract.itemsize
    size = _CACHED_BYTES // contract.with_batch(1).config.activation_bytes()
    if contract.device.type != "cpu" or layer_weights > _CACHED_BYTES or size < _LEAST_SAMPLES:
        return None
    return size if config.batch_size >= 2 * size else None


def _options(contract: RuntimeContract) -> dict[str, tuple[object, ...]]:
    return _OPTIONS.get(contract.device.type, _OPTIONS["cpu"])
