"""With a copy of this folder: `model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, draft=...)`."""

from functools import lru_cache
from typing import Any

from specctl import speculative

kept = lru_cache(maxsize=4)(speculative)  # with the drafts that it has loaded


def generate(model: Any, draft: Any = None, policy: Any = None, streamer: Any = None, **settings: Any) -> Any:
    """The output of `model.generate`, with a draft: a model, also as `assistant_model`, or a model's name."""
    fast = kept(draft if draft is not None else settings.pop("assistant_model", None), policy)
    fast.streamer = streamer
    return model.generate(**{**settings, "assistant_model": None}, custom_generate=fast)
