"""Which contexts the kernels of a captured graph belong to: there they run, wherever the graph is replayed."""

from __future__ import annotations

from smpart.partition.cuda.driver import Driver


def contexts_of(api: Driver, graph: int) -> frozenset[int]:
    """Handles of the contexts of a graph's kernels.

    Args:
        graph: a `CUgraph` as a number.

    Raises:
        CudaError: it is no graph.
    """
    handle = api.api.CUgraph(graph)
    _, count = api("cuGraphGetNodes", handle, 0)
    nodes, _ = api("cuGraphGetNodes", handle, count)
    kernel = api.api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernels = [node for node in nodes if api("cuGraphNodeGetType", node) == kernel]
    return frozenset(int(api("cuGraphKernelNodeGetParams", node).ctx) for node in kernels)
