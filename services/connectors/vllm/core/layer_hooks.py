"""Whether an engine's blocks are saved layer by layer, decided from what its configuration says of its hooks."""

from __future__ import annotations


def why_whole_blocks(*, wanted: bool, full_graphs: bool, groups: int = 1, states: bool = False) -> str:
    """Why blocks are saved whole, after their step; "" when each layer is saved as it is computed.

    Saving layer by layer hides the save behind the layers still to come, at the cost of a processor that copies while
    they are computed. On an engine that computes on the processor that is the same one.
    """
    if not wanted:
        return "connector.layerwise is false"
    if full_graphs:
        return "vLLM replays full graphs, in which no hook of a layer runs"
    if states:
        return "no hook of a layer with a recurrent state runs"
    if groups > 1:
        return "blocks are in several parts: groups of KV cache, of heads or of layers"
    return ""


def replays_full_graphs(config: object) -> bool:
    """What vLLM's configuration says of its graphs."""
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    return mode is not None and bool(mode.has_full_cudagraphs())
