"""Versions of what a run depends on."""

import platform


def versions() -> dict[str, str]:
    """Versions of Python and the libraries, for bug reports."""
    import huggingface_hub
    import torch
    import transformers

    import specctl

    return {
        "specctl": specctl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "huggingface_hub": huggingface_hub.__version__,
        "cuda": torch.version.cuda or "none",
    }
