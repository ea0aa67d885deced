"""The typed keys of a profile's ``[draft]`` tables."""

from dataclasses import replace
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from specctl.plugins import DRAFTER
from specctl.policies import NONE, Setting, nested
from specctl.policies.policy_text import policy_table
from specctl.policies.setting import Parallel
from specctl.policies.tree_shape import BEAMS, LEAST, MOST, MOST_BEAMS, TreeSize
from specctl.profile.base_tables import PolicyTable
from specctl.profile.known_names import known_head
from specctl.profile.model_table import LOOKUP, ModelTable, sources, unchained

LOOKUP_POLICY: dict[str, Any] = {"name": "cost-optimal", "use_foresight": True}
"""The policy of such a draft where none is named: `DEFAULT_POLICY` reads what it does not have."""


class DraftTable(ModelTable):
    """A draft model with the policy that stops it and, in a hierarchy, the faster model that drafts for it.

    In a hierarchy this model verifies the tokens of the faster model, and the policy decides when the collected block
    is verified by the model above. ``head`` is a network, trained on exactly these draft weights, that predicts
    acceptance: a hub id, a path, or ``embedded:NAME`` for a head that ships with the package. Policies that read
    ``accept_prob`` need a SpecDec++ head, those that read ``own_accept_prob`` a DISCO head.
    """

    kind: Literal["auto", "lookup"] = "auto"
    """``lookup`` for a draft without a model, which copies from the text so far; ``auto`` for what the files hold, a
    model or a draft head."""
    policy: PolicyTable = PolicyTable()
    batch_policies: dict[str, str] | None = None
    """Other policies, each in one word, by how many texts are written at once: used from that number on."""
    tree: Annotated[int, Field(ge=0, le=MOST)] | None = None
    """How many tokens the target verifies in a round of a dynamic tree, the newest one included, at most. None and 0
    for chains."""
    tree_beams: Annotated[int, Field(ge=1, le=MOST_BEAMS)] = BEAMS
    """How many tokens of each level of a tree are continued, and by how many tokens each."""
    head: Annotated[str, Field(min_length=1), AfterValidator(known_head)] | None = None
    draft: "DraftTable | None" = None
    pre_verify: Literal["loop", "once"] | None = None
    """How often the faster model drafts for one block: ``loop`` (the default), until the policy stops, or ``once``, so
    that the policy only limits the block's length."""

    parallel: Parallel | None = None
    """Whether the draft writes on while the target verifies, blocks of a ``constant`` policy's length; for a draft and
    a target on different devices. ``force``: also where they share one."""

    vocabulary: Literal["auto", "shared", "intersection", "text"] = "auto"
    """Whether a draft may have another tokenizer than the target, and drafts the tokens that both have or writes text,
    of which the target's tokens are cut."""
    lookup: bool = False
    """Whether a lookup drafts in turn with this draft: in each round the one of which more is expected. ``model =
    ["prompt:lookup", MODEL]`` says so too."""

    earlier: Annotated[int, Field(ge=0)] = 0
    """In a chain with a lookup, of how many tokens answers to earlier prompts of the run are copied too."""

    tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """How many ids the draft can write, the likeliest ones, so that its output layer computes few logits; ``auto`` for
    as many as should be fastest. None for all."""
    token_counts: Annotated[str, Field(min_length=1)] | None = None
    """The file of `specctl calibrate` that says how often ids occur; None for the package's own prompts."""

    @field_validator("batch_policies")
    @classmethod
    def _by_numbers_of_texts(cls, policies: dict[str, str] | None) -> dict[str, str] | None:
        if wrong := [number for number in policies or () if not (number.isdecimal() and int(number) > 1)]:
            raise ValueError(f"is by numbers of texts from 2 on, and {wrong[0]} is none")
        return policies or None

    @field_validator("tokens")
    @classmethod
    def _of_a_lowest_model(cls, tokens: int | str | None, info: ValidationInfo) -> int | str | None:
        if tokens is None:
            return None
        if info.data.get("kind") == "lookup":
            raise ValueError("has no place in a draft that copies from the text")
        if str(info.data.get("model", "")).startswith(DRAFTER):
            raise ValueError("is about an output layer, and a registered drafter has none")
        if info.data.get("draft") is not None:
            raise ValueError("has no place in a draft that verifies a faster one: it needs all tokens; set it there")
        if info.data.get("shards") is not None:
            raise ValueError("needs a draft whose output layer is in one piece: leave its shards out")
        return tokens

    @field_validator("token_counts")
    @classmethod
    def _say_which_tokens(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("tokens", 1) is None:
            raise ValueError("says which tokens a draft of few can write: set tokens too")
        return path

    @field_validator("pre_verify")
    @classmethod
    def _has_something_to_verify(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("draft", True) is None:
            raise ValueError("needs a faster draft to verify: add a [draft] table inside this one")
        return value

    @field_validator("tree")
    @classmethod
    def _has_room_for_a_token(cls, tree: int | None) -> int | None:
        if tree and tree < LEAST:
            raise ValueError(f"needs at least {LEAST} tokens: the newest one and one that is drafted")
        return tree or None

    @field_validator("draft")
    @classmethod
    def _is_a_chain_for_a_draft(cls, draft: "DraftTable | None", info: ValidationInfo) -> "DraftTable | None":
        if draft is not None and draft.tree is not None:
            raise ValueError("cannot draft trees: only a draft that the target verifies can")
        if draft is not None and info.data.get("tree") is not None:
            raise ValueError(
                "cannot draft for a draft of trees: set tree = 0 in the table above, or leave this one out"
            )
        if draft is not None and draft.parallel:
            raise ValueError("cannot be parallel: only the draft that the target verifies can")
        if draft is not None and draft.lookup:
            raise ValueError("cannot be in a chain with a lookup: only the draft that the target verifies can")
        return draft

    @model_validator(mode="before")
    @classmethod
    def _of_the_kind_named(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {"kind": "lookup", **table} if table.get("model") == LOOKUP else unchained(table)

    @field_validator("model", mode="before")
    @classmethod
    def _a_chain_of_two(cls, model: object) -> object:
        return sources(model)[0]

    @field_validator("kind")
    @classmethod
    def _named_alike(cls, kind: str, info: ValidationInfo) -> str:
        if "model" in info.data and (kind == "lookup") != (info.data["model"] == LOOKUP):
            raise ValueError(f"does not fit model = {info.data['model']!r}; a lookup has no model")
        return kind

    @field_validator("parallel")
    @classmethod
    def _drafts_fixed_blocks(cls, parallel: Parallel | None, info: ValidationInfo) -> Parallel | None:
        policy = info.data.get("policy")
        if parallel and policy is not None and not policy.setting.fixed_length:
            raise ValueError(
                'needs policy name = "constant": while the target verifies all the time, there is nothing for '
                f"{policy.name} to decide"
            )
        if parallel and info.data.get("tree") is not None:
            raise ValueError("needs a draft of chains: set tree = 0")
        if parallel and info.data.get("shards") is not None:
            raise ValueError("needs a draft on a device of its own: leave its shards out")
        if parallel and info.data.get("draft") is not None:
            raise ValueError("needs a draft that no other model drafts for")
        if parallel and info.data.get("kind") == "lookup":
            raise ValueError("needs a draft model: copying from the text takes no time that could be hidden")
        return parallel or None

    @field_validator("lookup")
    @classmethod
    def _drafts_in_turn(cls, lookup: bool, info: ValidationInfo) -> bool:
        if lookup and (other := next((key for key in ("tree", "parallel") if info.data.get(key)), None)):
            raise ValueError(f"excludes {other}: a lookup and a model draft chains, and one at a time")
        return lookup

    @field_validator("earlier")
    @classmethod
    def _of_a_chain(cls, earlier: int, info: ValidationInfo) -> int:
        if earlier and not info.data.get("lookup"):
            raise ValueError(f'is for a chain with a lookup: set model = ["{LOOKUP}", MODEL]')
        return earlier

    @field_validator("tree", "head", "draft", "lookup")
    @classmethod
    def _not_of_a_lookup(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("kind") == "lookup":
            raise ValueError("has no place in a draft that copies from the text")
        return value

    @field_validator("head")
    @classmethod
    def _of_a_model(cls, head: str | None, info: ValidationInfo) -> str | None:
        if head is not None and str(info.data.get("model", "")).startswith(DRAFTER):
            raise ValueError("reads hidden states, and a registered drafter has none")
        return head

    @property
    def levels(self) -> "tuple[DraftTable, ...]":
        """This table and all draft tables below it, from the top down."""
        return (self, *(self.draft.levels if self.draft is not None else ()))

    @property
    def setting(self) -> Setting:
        """The settings of this draft and the drafts below it, joined by `nested`."""
        return nested([level.own_setting for level in self.levels])

    @property
    def own_setting(self) -> Setting:
        """The setting of this level alone."""
        tree = None if self.tree is None else TreeSize(self.tree, self.tree_beams)
        once = self.pre_verify == "once"
        one = replace(self.policy.setting, once=once, tree=tree, parallel=self.parallel)
        chain: dict[str, Any] = {"lookup": self.lookup, "earlier": self.earlier}
        batches = ((int(least), Setting.of(policy_table(word))) for least, word in (self.batch_policies or {}).items())
        chained = ((least, replace(each, **chain) if each.drafts else each) for least, each in batches)
        return replace(one, batches=tuple(sorted(chained, key=itemgetter(0))), **chain)

    def stopped_by(self, setting: Setting) -> "DraftTable":
        """The same models with another setting; models below the setting's last level get the policy ``none``."""
        policy = PolicyTable(name=setting.policy, **setting.all_values)
        shape = {"tree": None, "parallel": setting.parallel}
        chain = {"lookup": setting.lookup, "earlier": setting.earlier}
        words = {str(least): one.word for least, one in setting.batches}
        changed: dict[str, Any] = {"policy": policy, "batch_policies": words or None, **shape, **chain}
        if setting.tree is not None:
            changed |= {"tree": setting.tree.tokens, "tree_beams": setting.tree.beams}
        if setting.head is not None:
            changed["head"] = setting.head
        if self.draft is not None:
            changed |= {"pre_verify": setting.pre_verify, "draft": self.draft.stopped_by(setting.below or NONE)}
        return self.model_copy(update=changed)

    def at_work(self) -> "DraftTable | None":
        """This table without a level that never drafts and the levels below it; None if this level never drafts."""
        if not any(one.drafts for one in (self.policy.setting, *(one for _, one in self.own_setting.batches))):
            return None
        below = self.draft.at_work() if self.draft is not None else None
        return self.model_copy(update={"draft": below, "pre_verify": self.pre_verify if below is not None else None})
