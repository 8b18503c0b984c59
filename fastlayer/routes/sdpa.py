"""Float32 scaled-dot-product attention on strided head views, eager, compiled or graph-captured."""

from __future__ import annotations

from fastlayer.contract import RuntimeContract
from fastlayer.routes.base import Bound, Launch, check_launch, common_objections
from fastlayer.routes.body import make_body, mkldnn_linear_available, serve_mask
from fastlayer.routes.execution import execute
from fastlayer.weights import ModelState

#: Options of a launch and their values, per device type; the first launch built of them is the
#: default. On CUDA a graph removes the launch gaps that dominate the small cases. On a CPU oneDNN's
#: prepacked products took 0.4-0.5 of the time of the BLAS in torch's wheel on a Zen 5 processor.
_OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "cuda": {
        "packed_qkv": (True, False),
        "linear": ("aten",),
        "execution": ("graph", "eager", "compiled", "compiled_graph"),
    },
    "cpu": {
        "packed_qkv": (True, False),
        "linear": ("mkldnn", "aten"),
        "execution": ("eager", "compiled"),
    },
}


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
        check_launch(self.name, launch, options(contract))
        launch = within_capture(state, contract, launch)
        body = make_body(
            state,
            contract,
            packed_qkv=bool(launch.get("packed_qkv", True)),
            linear=str(launch.get("linear", "aten")),
        )
        how = str(launch.get("execution", "eager"))
        return serve_mask(execute(body, how, state, contract), contract.mask)


def options(contract: RuntimeContract) -> dict[str, tuple[object, ...]]:
    """The launch options that exist for the contract's device."""
    return _OPTIONS.get(contract.device.type, _OPTIONS["cpu"])


def sdpa_launches(contract: RuntimeContract) -> list[Launch]:
    """Launches worth measuring, the default first."""
    choices = options(contract)
    linears = [
        linear for linear in choices["linear"] if linear == "aten" or mkldnn_linear_available()
    ]
    return [
        {"packed_qkv": bool(packed), "linear": str(linear), "execution": str(execution)}
        for execution in choices["execution"]
        for linear in linears
        for packed in choices["packed_qkv"]
        if not (execution != "eager" and linear == "mkldnn" and contract.device.type == "cpu")
    ]


def within_capture(state: ModelState, contract: RuntimeContract, launch: Launch) -> Launch:
    """``launch``, or what is left of it inside a graph capture of the caller's.

    No graph can be captured there, and nothing packed: a replay would read buffers that a later
    edit of the weights leaves behind.
    """
    if not contract.capturing:
        return launch
    state.notes.append("a CUDA graph is being captured: eager execution, weights not packed")
    return {**launch, "packed_qkv": False, "execution": "eager"}
