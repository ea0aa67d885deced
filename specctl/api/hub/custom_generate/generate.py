"""For `model.generate(..., custom_generate=FOLDER, trust_remote_code=True, assistant_model=draft)`: a copy of this folder
in any model's repository, or in one of its own, lets `generate` write with specctl."""

from functools import lru_cache

from specctl import speculative

_kept = lru_cache(maxsize=4)(speculative)  # with the drafts that it has loaded


def generate(model, assistant_model=None, draft=None, policy=None, streamer=None, **settings):
    """`generate` with a draft: `assistant_model`, or by name `draft` ("prompt:lookup", a folder, a hub id)."""
    fast = _kept(assistant_model if assistant_model is not None else draft, policy)
    fast.streamer = streamer
    return model.generate(**settings, custom_generate=fast)
