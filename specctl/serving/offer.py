"""What a server offers besides OpenAI's parameters: policies with their settings and bounds."""

from typing import Any

from specctl.decoding.named_drafters import NamedDrafters
from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import ProfileError, UsageError
from specctl.models.running.pair import Pair
from specctl.policies import POLICIES
from specctl.profile import Profile
from specctl.profile.validation import settings_model


def offer(pair: Pair, profile: Profile, name: str) -> dict[str, Any]:
    """A JSON document: the model's name, the sampling and policy of the profile, and what `specctl.policy` may name.

    Args:
        pair: loaded; nobody uses it yet.
        profile: how it is used.
        name: what clients call the model.
    """
    draft, sampling = profile.draft, profile.sampling
    drafters = NamedDrafters(pair, draft)
    return {
        "model": name,
        "chat": PromptFormat(pair.tokenizer, profile.prompt.chat).chat,
        "chat_template": PromptFormat(pair.tokenizer).chat,
        "sampling": {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens},
        "policy": None if draft is None else {"id": draft.setting.policy, "label": draft.setting.label},
        "policies": [
            {"id": policy, "settings": settings_model(policy).model_json_schema()["properties"]}
            for policy in POLICIES
            if _fits(drafters, policy)
        ],
    }


def _fits(drafters: NamedDrafters, policy: str) -> bool:
    """Whether a policy can stop the pair's draft: some read what a trained head says."""
    try:
        return drafters.of(policy) is not None
    except (ProfileError, UsageError):
        return False
