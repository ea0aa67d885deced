"""The typed tables and keys of a profile file."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from specctl.errors import ProfileError, UsageError
from specctl.plugins import DRAFTER, DRAFTERS
from specctl.policies import NONE, POLICIES, Setting, nested
from specctl.policies.registry import policy_table
from specctl.policies.setting import BEAMS, LEAST_TREE, MOST_BEAMS, MOST_TREE, Parallel, TreeSize

NAMES = ("target", "mid", "draft", "eagle3", "dspark")
HEADS = ("draft-head", "eagle3-head", "disco-head")
_FOLDER = Path(__file__).parents[1] / "models" / "embedded"


def model_path(name: str) -> Path:
    """The directory of an embedded model's checkpoint; raises ProfileError if there is no such model."""
    if name not in NAMES:
        raise ProfileError(f"there is no embedded model '{name}' (known: {', '.join(NAMES)})")
    return _FOLDER / name


def predictor_path(name: str) -> Path:
    """The directory of an embedded draft's acceptance head; raises ProfileError if there is no such head."""
    if name not in HEADS:
        raise ProfileError(f"there is no embedded head '{name}' (known: {', '.join(HEADS)})")
    return _FOLDER / name


EMBEDDED = "embedded:"
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mlu")


def known_device(device: str) -> str:
    """A device or a strategy of accelerate; raises ValueError for anything else."""
    kind, _, index = device.partition(":")
    if device in _STRATEGIES or (kind in _DEVICES and (device == kind or index.isdecimal())):
        return device
    raise ValueError(f"must be {', '.join(_STRATEGIES)}, or a device such as {', '.join(_DEVICES)} or cuda:1")


def known_model(model: str) -> str:
    """A model's name; raises ValueError for an unknown embedded model or registered drafter."""
    if model.startswith(EMBEDDED):
        try:
            model_path(model.removeprefix(EMBEDDED))
        except ProfileError as error:
            raise ValueError(f"is unknown: {error.message}") from error
    if model.startswith(DRAFTER):
        name = model.removeprefix(DRAFTER).partition(":")[0]
        if name not in DRAFTERS:
            known = f"no drafter is registered by this name (known: {', '.join(DRAFTERS) or 'none'})"
            raise ValueError(f"is unknown: {DRAFTERS.broken.get(name, known)}")
    return model


def known_head(head: str) -> str:
    """An acceptance head's name; raises ValueError for an unknown one among those that ship with the program."""
    if head.startswith(EMBEDDED):
        try:
            predictor_path(head.removeprefix(EMBEDDED))
        except ProfileError as error:
            raise ValueError(f"is unknown: {error.message}") from error
    return head


Verification = Literal["token", "block"]  # How the tokens of a sampled draft are verified
DEFAULT_POLICY = "svip"
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""An id of the target's vocabulary, as a text: keys of tables are texts."""
Repetition = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]  # Added to logits, with OpenAI's bounds of the last two
MOST_LOGPROBS = 20  # The most log-probabilities reported per token
FILTERS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""The sampling keys that filter tokens by their probabilities."""
ABOUT_PROMPTS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
"""Sampling rules that depend only on the prompt; generation_config.json may have them too."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", *ABOUT_PROMPTS)
"""The sampling keys that change tokens' probabilities depending on the text."""
GRAMMARS = ("json_schema", "regex", "grammar")  # The sampling keys that constrain the text's format


def with_one_grammar(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a sampling table; a grammar replaces one of another kind."""
    return {**(dict.fromkeys(GRAMMARS) if values.keys() & {*GRAMMARS} else {}), **values}


class Table(BaseModel):
    """A TOML table: unknown keys are mistakes, values are never converted to another type, results are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SamplingTable(Table):
    """How tokens are sampled. Temperature 0 is greedy.

    top_k 0, top_p 1, min_p 0, typical_p 1, epsilon_cutoff 0, eta_cutoff 0 and top_h 0 switch that filter off.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the tokens whose information is nearest to the entropy, of this total probability."""
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keeps tokens of at least this probability, and the likeliest one."""
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The same with a lower bound where the entropy is high: this, or its square root times exp(-entropy) if less."""
    top_h: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keeps the likeliest of 100 tokens as long as their part of the entropy is at most this."""
    verification: Verification = "block"
    """Whether sampled draft tokens are verified one by one or as a block; greedy decoding is the same with both."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    seed: Annotated[int, Field(ge=0)] = 0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Report each token's log-probability and those of this number of likeliest ids; None for neither."""
    repetition_penalty: Repetition = 1.0
    """Divides positive logits of ids that the text has, prompt included, and multiplies negative ones."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of ids that were written after the prompt."""
    frequency_penalty: Penalty = 0.0
    """The same once for each time."""
    encoder_repetition_penalty: Repetition = 1.0
    """Multiplies positive logits of ids that the prompt has, and divides negative ones: above 1 favours them."""
    encoder_no_repeat_ngram_size: Annotated[int, Field(ge=0)] = 0
    """This number of ids in a row from the prompt is not written again; 0 for no such rule."""
    logit_bias: dict[Token, Bias] | None = None
    """Added to the logits of these ids."""
    json_schema: dict[str, Any] | bool | None = None
    """The text is JSON that fits this schema; true and {} stand for any JSON."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The whole text matches this regular expression, in the syntax of Rust's regex."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """The text follows this grammar, in llguidance's variant of Lark."""

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if len(given := [name for name in self.rules if name in GRAMMARS]) > 1:
            raise ValueError(f"{' and '.join(given)} each say what the text may be; give one of them")
        return self

    @property
    def rules(self) -> list[str]:
        """The active keys that forbid tokens or change their probabilities."""
        return [name for name, nothing in self._nothing().items() if getattr(self, name) != nothing]

    @property
    def unruled(self) -> Self:
        """The same without such rules."""
        return self.model_copy(update=self._nothing())

    @classmethod
    def _nothing(cls) -> dict[str, Any]:
        return {name: cls.model_fields[name].default for name in (*PENALTIES, *GRAMMARS)}


class PromptTable(Table):
    """Conversion of prompts to tokens: raw text, or through the tokenizer's chat template."""

    chat: bool | None = None
    """Whether texts go through the chat template; None for the rule: they do where the target's tokenizer has one."""
    system: str | None = None


class PolicyTable(Table):
    """A stopping policy by name, with its settings as further keys; the policy's dataclass defines and checks them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str = DEFAULT_POLICY

    @property
    def setting(self) -> Setting:
        return Setting.of({"name": self.name, **(self.model_extra or {})})


IN_TARGET = "target:mtp"  # The model name of a draft head in the files of the model above it
LOOKUP = "prompt:lookup"  # The model name of a draft that copies from the text so far


def sources(model: object) -> tuple[object, bool]:
    """The model of a draft, and whether it is in a chain with a lookup, as `prompt:lookup+MODEL` or a list of both say.

    Raises ValueError for a list or such a text that is not a lookup and one model.
    """
    names = _parts(model) if isinstance(model, str) else model
    if not isinstance(names, list) or names == [model]:
        return model, False
    form = f'a chain is two sources, a lookup and one model: ["{LOOKUP}", MODEL]'
    if not names or "" in names:
        raise ValueError(f"names no {'draft' if not names else 'model'}; {form}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names {twice} twice; {form}")
    if names == [LOOKUP]:
        raise ValueError(f"names a lookup alone; without a model it is not a chain: model = '{LOOKUP}'")
    if (
        len(names) != 2
        or LOOKUP not in names
        or not all(isinstance(name, str) and _parts(name) == [name] for name in names)
    ):
        raise ValueError(f"is {names}; {form}; a model that drafts for another is in a [draft.draft] table")
    return next(name for name in names if name != LOOKUP), True


def _parts(name: str) -> list[str]:
    """The parts of a text with a lookup before or after a model: the model, and each lookup."""
    after = name.removeprefix(f"{LOOKUP}+")
    between = after.removesuffix(f"+{LOOKUP}")
    return [*([LOOKUP] if after != name else []), between, *([LOOKUP] if between != after else [])]


def unchained(table: dict[str, Any]) -> dict[str, Any]:
    """A draft's table with a chain split into ``model`` and ``lookup``; unchanged without a valid chain."""
    try:
        model, chained = sources(table.get("model"))
    except ValueError:
        return table
    return {**table, "model": model, "lookup": True} if chained else table


class ModelTable(Table):
    """One checkpoint and where it runs.

    ``model`` is a hub id, a path, a name of a GGUF file (see ``models.files.gguf_names``), or ``embedded:NAME`` for a
    model that ships with the package.
    """

    model: Annotated[str, Field(min_length=1), AfterValidator(known_model)]
    revision: str | None = None
    device: Annotated[str, AfterValidator(known_device)] | dict[str, int | str] = "auto"
    """``auto``, a device such as ``cuda:1`` or ``cpu``, an accelerate strategy, or a device_map table."""
    max_memory: dict[str, str] | None = None
    """Memory cap per device for a device_map, e.g. ``{0 = "20GiB", cpu = "60GiB"}``."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """A folder or hub id of a LoRA adapter, whose changes are added to the weights when the model is loaded."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantize: Literal["int8", "int4", "fp8", "nf4", "fp4"] | None = None
    """How the weights of linear layers are quantised while they are loaded; None to load them as they are."""
    shards: Annotated[int, Field(ge=2)] | None = None
    """Over how many cards the model is split, the first ones of the machine; None for where ``device`` says."""
    placement: Literal["tensor", "pipeline", "spread"] | None = None
    """How it is split: ``tensor`` (the default), a part of every layer on each card, which work at the same time;
    ``pipeline``, some of the layers on each, a process for each card; ``spread``, the same in one process."""
    trust_remote_code: bool = False

    @field_validator("*")
    @classmethod
    def _goes_with_the_others(cls, value: Any, info: ValidationInfo) -> Any:
        if (why := next(cls._conflicts(str(info.field_name), value, info.data), None)) is not None:
            raise ValueError(why)
        return value

    @classmethod
    def _conflicts(cls, key: str, value: Any, given: Mapping[str, Any]) -> Iterator[str]:
        """Why a value conflicts with those of earlier keys, to end a sentence."""
        model = str(given.get("model", ""))
        match key:
            case "adapter" if value is not None and (model in (LOOKUP, IN_TARGET) or model.startswith(DRAFTER)):
                yield f"needs a model with its own files, and {model} has none"
            case "shards" if value is not None:
                for name, plain in (("device", ("auto", "cpu")), ("max_memory", (None,))):
                    if (other := given.get(name)) not in plain:
                        yield f"excludes {name} = {other!r}: shards go to the first cards, one each"
                if given.get("adapter") is not None:
                    yield 'excludes adapter: an adapter is merged in one process; set device = "balanced" instead'
            case "placement" if value is not None and given.get("shards", True) is None:
                yield "needs shards, the number of cards"

    @property
    def splits(self) -> bool:
        """Whether the model is split over processes, one for each card."""
        return self.shards is not None and self.placement != "spread"

    @property
    def full_name(self) -> str:
        """Its name in reports: the model and its adapter."""
        return self.model if self.adapter is None else f"{self.model} with {self.adapter}"

    @property
    def is_lookup(self) -> bool:
        """Whether it is a lookup, which copies from the text and has no checkpoint."""
        return self.model == LOOKUP

    @property
    def is_registered(self) -> bool:
        """Whether it is a drafter registered by another distribution, which has no checkpoint."""
        return self.model.startswith(DRAFTER)

    @property
    def has_files(self) -> bool:
        """Whether it has a checkpoint."""
        return not (self.is_lookup or self.is_registered)

    @property
    def checkpoint(self) -> str:
        """The hub id or path to load; absolute for a model that ships with the package."""
        if self.model.startswith(EMBEDDED):
            return str(model_path(self.model.removeprefix(EMBEDDED)).absolute())
        return self.model


def require_whole(table: ModelTable, key: str, purpose: str) -> None:
    """Raise UsageError if a model is split over processes; ``purpose`` is the use that needs all of it here."""
    if table.splits:
        raise UsageError(
            f"{purpose} reads the {key} model itself, of which each process has a share",
            f'set {key}.placement = "spread", or leave its shards out',
        )


LOOKUP_POLICY: dict[str, Any] = {"name": "cost-optimal", "use_foresight": True}
"""The default policy of a lookup: `DEFAULT_POLICY` reads signals that it does not have."""


class DraftTable(ModelTable):
    """A draft model with the policy that stops it and, in a hierarchy, the faster model that drafts for it.

    In a hierarchy this model verifies the tokens of the faster model, and the policy decides when the collected block
    is verified by the model above. ``head`` is a network that predicts acceptance, trained on exactly these draft
    weights: a hub id, a path, or ``embedded:NAME``. Policies that read ``accept_prob`` need a SpecDec++ head, those
    that read ``own_accept_prob`` a DISCO head.
    """

    kind: Literal["auto", "lookup"] = "auto"
    """``lookup`` for a draft without a model, which copies from the text so far; ``auto`` for what the files hold, a
    model or a draft head."""
    policy: PolicyTable = PolicyTable()
    batch_policies: dict[str, str] | None = None
    """Other policies, each in one word, by how many texts are written at once: used from that number on."""
    tree: Annotated[int, Field(ge=0, le=MOST_TREE)] | None = None
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

    @field_validator("batch_policies", "tree", "parallel")
    @classmethod
    def _none_for_nothing(cls, value: Any) -> Any:
        return value or None

    @classmethod
    def _conflicts(cls, key: str, value: Any, given: Mapping[str, Any]) -> Iterator[str]:
        yield from super()._conflicts(key, value, given)
        model, copies = str(given.get("model", "")), given.get("kind") == "lookup"
        if key == "kind" and "model" in given and (value == "lookup") != (model == LOOKUP):
            yield f"does not fit model = {model!r}; a lookup has no model"
        if not value:
            return
        if copies and key in ("tree", "head", "draft", "lookup", "tokens"):
            yield "does not apply to a draft that copies from the text"
        match key:
            case "batch_policies":
                if wrong := [number for number in value if not (number.isdecimal() and int(number) > 1)]:
                    yield f"has numbers of texts from 2 on as keys, and {wrong[0]} is not one"
            case "tree" if value < LEAST_TREE:
                yield f"needs at least {LEAST_TREE} tokens: the newest one and one that is drafted"
            case "head" if model.startswith(DRAFTER):
                yield "reads hidden states, and a registered drafter has none"
            case "draft":
                if value.tree is not None:
                    yield "cannot draft trees: only a draft that the target verifies can"
                if given.get("tree") is not None:
                    yield "cannot draft for a draft of trees: set tree = 0 in the table above, or leave this one out"
                if value.parallel:
                    yield "cannot be parallel: only the draft that the target verifies can"
                if value.lookup:
                    yield "cannot be in a chain with a lookup: only the draft that the target verifies can"
            case "pre_verify" if given.get("draft", True) is None:
                yield "needs a faster draft to verify: add a [draft] table inside this one"
            case "parallel":
                policy = given.get("policy")  # an unknown one has an error of its own
                if policy is not None and policy.name in POLICIES and not policy.setting.fixed_length:
                    always = "while the target verifies all the time, there is nothing for"
                    yield f'needs policy name = "constant": {always} {policy.name} to decide'
                if given.get("tree") is not None:
                    yield "needs a draft of chains: set tree = 0"
                if given.get("shards") is not None:
                    yield "needs a draft on a device of its own: leave its shards out"
                if given.get("draft") is not None:
                    yield "needs a draft that no other model drafts for"
                if copies:
                    yield "needs a draft model: copying from the text takes no time that could be hidden"
            case "lookup":
                if other := next((name for name in ("tree", "parallel") if given.get(name)), None):
                    yield f"excludes {other}: a lookup and a model draft chains, and one at a time"
            case "earlier" if not given.get("lookup"):
                yield f'is for a chain with a lookup: set model = ["{LOOKUP}", MODEL]'
            case "tokens":
                if model.startswith(DRAFTER):
                    yield "needs an output layer, and a registered drafter has none"
                if given.get("draft") is not None:
                    yield "does not apply to a draft that verifies a faster one, which needs all tokens: set it there"
                if given.get("shards") is not None:
                    yield "needs a draft whose output layer is in one piece: leave its shards out"
            case "token_counts" if given.get("tokens", 1) is None:
                yield "names the tokens that a draft may write: set tokens too"

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
        """The same models with another setting; drafts below its last level get the policy ``none``."""
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
        """This table without levels that never draft and the levels below those; None if this level never drafts."""
        if not any(one.drafts for one in (self.policy.setting, *(one for _, one in self.own_setting.batches))):
            return None
        below = self.draft.at_work() if self.draft is not None else None
        return self.model_copy(update={"draft": below, "pre_verify": self.pre_verify if below is not None else None})


SCHEMA_VERSION = 1
Engine = Literal["auto", "eager", "static", "graph", "onnx", "llama"]
COMPILED = ("auto", "static", "graph")  # The engines whose passes can be compiled


class Profile(Table):
    """A model pair, its policy and its settings."""

    schema_version: Literal[1] = 1
    description: str = ""
    engine: Engine = "auto"
    """How forward passes run: ``eager``, any model with a growing cache; ``static``, with a cache at fixed addresses;
    ``graph``, as ``static`` but captured as CUDA graphs; ``onnx``, by onnxruntime; ``llama``, GGUF files by llama.cpp.
    ``auto`` is ``llama`` for GGUF files where llama.cpp is installed, else ``static`` if passes are compiled, else
    ``eager``. An engine that the model or the machine cannot run falls back to a simpler one, with a
    message."""
    compile: bool | Literal["auto"] = "auto"
    """Whether torch.compile compiles the passes of the static engine, which takes minutes at the start of a run;
    ``auto`` compiles in long runs only."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """With how many threads passes on the CPU run; ``auto`` measures it once the models are loaded, unless the
    environment or torch sets a number."""
    deterministic: bool = False
    """Verify in passes of one shape, so that greedy output is the same with every policy, in every dtype; slower."""
    check: bool = False
    """Compare the target once, after its first rejected token, with a fresh read of the same text; a difference that
    rounding does not explain is an error. For models of which nothing is known."""
    generation_config: bool = True
    """Whether the rules in the target's generation_config.json about which tokens may follow a text hold, such as its
    repetition penalty and suppressed tokens; for the drafts too. Its sampling settings never do: see ``sampling``."""
    target: ModelTable
    draft: DraftTable | None = None
    sampling: SamplingTable = SamplingTable()
    prompt: PromptTable = PromptTable()
    provenance: dict[str, Any] | None = None

    @property
    def models(self) -> list[tuple[str, ModelTable]]:
        """Every model with its key (``target``, ``draft``, ``draft.draft``), from the target down."""
        levels = self.draft.levels if self.draft is not None else ()
        drafts = ((".".join(["draft"] * depth), table) for depth, table in enumerate(levels, start=1))
        return [("target", self.target), *drafts]

    @field_validator("target")
    @classmethod
    def _a_model(cls, target: ModelTable) -> ModelTable:
        if target.model == IN_TARGET:
            raise ValueError(f"model {IN_TARGET!r} names a draft head in the target's files; give it in [draft]")
        if target.is_lookup:
            raise ValueError(f"model {LOOKUP!r} is a draft that copies from the text; give it in [draft]")
        if target.is_registered:
            raise ValueError(f"model {target.model!r} is a drafter; give it in [draft]")
        return target

    @field_validator("compile")
    @classmethod
    def _compiled_engine(cls, compile: bool | str, info: ValidationInfo) -> bool | str:  # noqa: A002 - the key's name
        engine = info.data.get("engine")
        if compile is True and engine not in COMPILED:
            raise ValueError(f'needs engine = "static", "graph" or "auto"; {engine} passes are not compiled')
        return compile
