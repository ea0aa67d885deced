"""Memory that a model takes on its device while it works, on top of its weights."""

from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.memory import Estimate
from specctl.profile.schema import Engine

CUDA_CONTEXT = 512 * 1024**2
"""Of a process on a CUDA device: its context and kernels. 300 to 500 MiB, by device and versions."""
WORKSPACES = 64 * 1024**2
"""Of one model: cuBLAS's workspaces on its streams (32 MiB each on Hopper, 8 on others)."""


def working_bytes(need: Estimate, dtype: str, tokens: int, engine: Engine, *, on_cuda: bool, first: bool) -> int:
    """Bytes that a model takes beyond its weights for a text of so many tokens.

    Args:
        need: of the model.
        dtype: of its cache.
        tokens: in the cache.
        engine: the profile's; ``auto`` is counted as eager.
        on_cuda: whether it is on a CUDA device; elsewhere the cache is counted alone.
        first: whether it is the first model of the process there, which brings the context along.
    """
    cache = need.cache_bytes(dtype, tokens)
    if not on_cuda:
        return cache
    # While buffers grow, those of one layer exist twice, which is little.
    chosen = engine_named(engine)
    return int(cache * chosen.spare) + WORKSPACES + CUDA_CONTEXT * first + chosen.kept
