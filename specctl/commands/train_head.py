"""`specctl train-head`: a network on the draft that foretells acceptance, for the policy `specdec++`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.options import (
    CategoryOption,
    InputOption,
    JsonOption,
    LimitOption,
    MaxNewTokensOption,
    ProfileOption,
    QuietOption,
    SamplesOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    chosen_prompts,
    warn,
)
from specctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from specctl.heads.evaluation import Evaluation
    from specctl.heads.examples import DataFolder
    from specctl.heads.training import Recipe, Schedule
    from specctl.profile import Profile
    from specctl.prompts.suites import Suite

EXAMPLES, STATE, SWEEP = "examples", "training.safetensors", "sweep.json"


def train_head(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where the head goes, and what is needed to resume.")
    ],
    profile: ProfileOption = None,
    set_: SetOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    limit: LimitOption = None,
    category: CategoryOption = None,
    samples_per_category: SamplesOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float, typer.Option("-t", "--temperature", min=0, help="Of the answers and the proposals.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of the answers and the proposals; 0 keeps all tokens.")] = 50,
    examples_only: Annotated[bool, typer.Option("--examples-only", help="Collect training examples and stop.")] = False,
    examples: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Examples that an earlier run collected; no target is loaded.")
    ] = None,
    depth: Annotated[int, typer.Option(min=0, help="Residual blocks; 0 is a linear head.")] = 3,
    reject_weight: Annotated[float, typer.Option(help="What a refusal counts; an acceptance counts 1.")] = 6.0,
    mix: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of the target's tokens in what the draft reads.")
    ] = 0.15,
    signals: Annotated[
        bool,
        typer.Option(
            "--signals",
            help="Let the head read the draft's entropy and probabilities too; the paper's does not.",
        ),
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data, each mixed anew.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers in a step.")] = 32,
    lr: Annotated[float, typer.Option(help="Adam's learning rate at first; it follows half a cosine to 0.")] = 5e-5,
    seed: Annotated[int, typer.Option(min=0, help="Of answers, proposals, mixing and the head.")] = 0,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Train depths 0 to 4 with refusals counting 1, 3, 6 and 12, each in its folder."),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a head on the draft that foretells acceptance (SpecDec++), for the policy specdec++.

    The target answers the prompts, the draft proposes a token at every place, and the head learns from the draft's
    hidden states which proposals the target lets pass. It is judged on every tenth prompt, which it does not see.

    Examples:

    [cyan]specctl train-head -i prompts.jsonl -o my-head[/]

    [cyan]specctl train-head --examples my-head/examples -o sweep --sweep[/]
    """
    if reject_weight <= 0 or lr <= 0:
        raise UsageError("--reject-weight and --lr must be more than 0")
    if examples is not None and examples_only:
        raise UsageError("--examples-only collects examples, and --examples brings them", "leave one of them out")
    if examples is not None and any(option is not None for option in (suite, data, input_)):
        raise UsageError("--examples replaces the prompts", "leave out --examples, or the options that choose prompts")
    if examples is None and suite is None and input_ is None:
        # No default: a head trained on what bench runs would be judged by what it has seen.
        raise UsageError("there are no prompts to train on", "give --input FILE or --suite NAME, or --examples DIR")
    from specctl.profile import resolve

    flags = {
        "sampling.seed": seed,
        "sampling.temperature": temperature,
        "sampling.top_k": top_k,
        "sampling.max_new_tokens": max_new_tokens,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    resolved = _headless(resolve(profile, overrides=set_ or (), flags=given).profile)
    if _is_finished(output, resume):
        _say(f"{output} is finished", quiet)
        return

    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    if examples is not None:
        folder, draft = _given_examples(examples, resolved, console)
    else:
        prompts = chosen_prompts(suite, data, input_, limit, category, samples_per_category, seed)
        folder, draft = _collected(output / EXAMPLES, resolved, prompts, console, quiet)
    if examples_only:
        return

    from specctl.heads.report import sweep_recipes
    from specctl.heads.training import Recipe, Schedule

    recipes = sweep_recipes() if sweep else [Recipe(depth, reject_weight)]
    schedule = Schedule(mix, epochs, batch_size, lr, seed, signals)
    evaluations = _train(output, folder, draft, recipes, schedule, console, quiet)
    _show(evaluations, sweep, json_)


def _headless(profile: "Profile") -> "Profile":
    """The profile with a policy that needs no head, since that is what is to be made."""
    from specctl.policies import POLICIES
    from specctl.profile.schema import PolicyTable

    if profile.draft is None:
        raise UsageError("the profile has no draft to train a head on", "name one with [draft] in the profile or --set")
    policy = profile.draft.policy
    if "accept_prob" in POLICIES[policy.name](**policy.settings()).signals:
        policy = PolicyTable(name="constant")
    draft = profile.draft.model_copy(update={"policy": policy, "head": None})
    return profile.model_copy(update={"draft": draft})


def _is_finished(output: Path, resume: bool) -> bool:
    """Whether an earlier run has left nothing to do; raises UsageError where it would be overwritten."""
    from specctl.models.loading.head_checkpoint import CONFIG

    results = (CONFIG, SWEEP)
    if not resume and (found := [n for n in (*results, STATE, f"{EXAMPLES}/index.json") if (output / n).exists()]):
        raise UsageError(
            f"{output} already holds {found[0]}",
            f"go on with --resume, train on its examples with --examples {output / EXAMPLES}, or name another folder",
        )
    return any((output / name).exists() for name in results)


def _given_examples(path: Path, profile: "Profile", console: "Console") -> tuple["DataFolder", "PreTrainedModel"]:
    """Data that is there, and the draft alone."""
    from specctl.terminal.loading import loading

    assert profile.draft is not None
    with loading(console, "starting") as say:
        from specctl.heads.examples import DataFolder
        from specctl.models.loading.checkpoint import locate
        from specctl.models.loading.head_checkpoint import weights_hash
        from specctl.models.loading.model import load_model

        folder = DataFolder.open(path)
        say(f"loading {profile.draft.model}")
        draft = load_model(profile.draft, role="draft").model
    if folder.facts["draft_sha256"] != weights_hash(locate(profile.draft, "draft").weight_files()):
        raise UsageError(
            f"{path} was made with another draft than {profile.draft.model!r}: with {folder.facts['draft']}",
            "collect data with this draft first",
        )
    return folder, draft


def _collected(
    path: Path, profile: "Profile", suite: "Suite", console: "Console", quiet: bool
) -> tuple["DataFolder", "PreTrainedModel"]:
    """Data of these prompts, made or finished where it is not there; models load only as needed."""
    from specctl.terminal.loading import counting, loading

    assert profile.draft is not None
    with loading(console, "starting") as say:
        from specctl.decoding.prompt_format import PromptFormat
        from specctl.heads.collection import collect, describe
        from specctl.heads.examples import INDEX, DataFolder
        from specctl.models.loading.pair import load_pair

        facts = describe(profile, suite)
        if (path / INDEX).exists():
            folder = DataFolder.open(path)
            _require_same(folder.facts, facts, path)
            if folder.done == folder.prompts:
                return _given_examples(path, profile, console)
        else:
            folder = DataFolder.create(path, facts, len(suite.prompts))
        pair = load_pair(
            profile, drafts=[profile.draft], with_heads=False, progress=lambda what: say(f"loading {what}")
        )
    prompt_format = PromptFormat(pair.tokenizer, profile.prompt.chat, profile.prompt.system)
    with counting(console, "answers", len(suite.prompts), folder.done) as advance:
        for _ in collect(folder, pair, suite.prompts, profile.sampling, profile.draft.policy, prompt_format):
            advance()
    for identity, reason in folder.left_out.items():
        warn(f"prompt {identity} is left out: {reason}")
    _say(f"data: {folder.prompts} prompts in {folder.seconds:.1f} s, in {path}", quiet)
    return folder, pair.models[1]


def _require_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Refuse to mix two data sets in one folder."""
    for name in new:
        if old.get(name) != new[name]:
            raise UsageError(
                f"{path} holds other data: its {name} differs", "resume with the same options, or name another folder"
            )


def _train(
    output: Path,
    folder: "DataFolder",
    draft: "PreTrainedModel",
    recipes: list["Recipe"],
    schedule: "Schedule",
    console: "Console",
    quiet: bool,
) -> list["Evaluation"]:
    """Train and judge the heads and write each with its card; gives what they are worth."""
    from time import perf_counter

    from specctl.heads.evaluation import SEQUENCES_AT_ONCE, evaluate
    from specctl.heads.figure import write_reliability
    from specctl.heads.report import as_document, head_card, head_config
    from specctl.heads.training import Training
    from specctl.models.loading.diagnosis import versions
    from specctl.models.loading.head_checkpoint import save_head, write_whole
    from specctl.terminal.loading import counting

    split = folder.split()
    training = Training(draft, recipes, schedule, split.train, output / STATE)
    with counting(console, "steps", training.steps, training.step) as advance:
        training.run(advance)
    _say(f"training: {training.steps} steps in {training.seconds:.1f} s", quiet)
    began = perf_counter()
    with counting(console, "judging", -(-len(split.dev) // SEQUENCES_AT_ONCE)) as advance:
        evaluations = evaluate(draft, training.heads, recipes, split, schedule.mix, schedule.seed, advance)
    seconds = {"data": folder.seconds, "training": training.seconds, "evaluation": perf_counter() - began}
    _say(f"evaluation: {evaluations[0].tokens} tokens in {seconds['evaluation']:.1f} s", quiet)
    more = {
        "seconds": {stage: round(spent, 1) for stage, spent in seconds.items()},
        "versions": {name: version for name, version in versions().items() if name in ("specctl", "torch")},
    }
    for head, evaluation in zip(training.heads, evaluations, strict=True):
        place = output if len(recipes) == 1 else output / evaluation.recipe.name
        config = head_config(evaluation, schedule, folder.facts, more)
        save_head(place, head, config, head_card(evaluation, config))
        write_reliability(evaluation, place)
        _say(f"wrote {place}", quiet)
    if len(recipes) > 1:
        import json

        write_whole(output / SWEEP, json.dumps(as_document(evaluations), indent=1) + "\n")
    (output / STATE).unlink(missing_ok=True)
    return evaluations


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)


def _show(evaluations: list["Evaluation"], sweep: bool, as_json: bool) -> None:
    from rich.console import Console

    from specctl.files import write_line
    from specctl.heads.report import as_document, head_tables, sweep_tables
    from specctl.reporting.console import print_tables

    if as_json:
        write_line(sys.stdout, {"heads": as_document(evaluations)})
    else:
        print_tables(Console(), sweep_tables(evaluations) if sweep else head_tables(evaluations[0]))
