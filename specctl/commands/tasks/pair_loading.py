"""Loads a profile's models for a command and shows the progress. Torch is imported when a function runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from specctl.commands.options import warn

if TYPE_CHECKING:
    from rich.console import Console

    from specctl.models.running.pair import Pair
    from specctl.policies.tree_shape import TreeSize
    from specctl.profile import Profile
    from specctl.profile.schema import ModelTable
    from specctl.terminal.progress import TerminalProgress


def load(
    profile: "Profile",
    console: "Console",
    *,
    expected_tokens: int = 0,
    drafts: "Sequence[ModelTable] | None" = None,
    above: Sequence[int | None] = (),
    heads: Sequence[Sequence[str]] | None = None,
    with_predictors: bool = True,
    foreign_head: bool = False,
    tree: "TreeSize | Literal['profile'] | None" = "profile",
    longest: int | None = None,
    quiet: bool = False,
    torch_weights: bool = False,
    models: bool = True,
    progress: "TerminalProgress | None" = None,
) -> "Pair":
    """Load the pair of a profile; compile or capture its passes where the profile wants that.

    Args:
        profile: names the models and how their passes run.
        console: writes to standard error.
        expected_tokens: number of tokens to generate in all, 0 if unknown; decides whether compiling pays.
        drafts, above, heads, with_predictors: as in `load_pair`.
        foreign_head: use heads that were trained on another draft, with a warning.
        tree: the size of the trees that drafts are to be, None for chains, or what the profile says.
        longest: the most tokens drafted in a round; None for what the profile says.
        quiet: show only warnings.
        torch_weights: as in `load_pair`, for who runs the transformers models too.
        models: as in `load_pair`.
        progress: shows what is loaded; None for a new one on the console.
    """
    from specctl.terminal.progress import TerminalProgress, note

    progress = progress or TerminalProgress(console, False if quiet else None)
    if tree == "profile":
        tree = profile.draft.own_setting.tree if profile.draft is not None else None
    if longest is None:
        longest = profile.draft.setting.longest_draft if profile.draft is not None else 0
    with progress.doing("starting") as show:
        from specctl.decoding.prompt_format import PromptFormat
        from specctl.models.loading.assembly import load_pair
        from specctl.models.running.engines import EngineSettings

        notice: Any = (lambda _: None) if quiet else (lambda text: note(console, text))
        engines = replace(EngineSettings.of(profile, expected_tokens, notice, show), trees=tree is not None)
        pair = load_pair(
            profile,
            drafts=drafts,
            above=above,
            heads=heads,
            with_predictors=with_predictors,
            on_foreign_predictor=warn if foreign_head else None,
            engines=engines,
            torch_weights=torch_weights,
            models=models,
            progress=lambda what: show(f"loading {what}"),
        )
        if pair.threads is not None and pair.threads.warning is not None:
            warn(pair.threads.warning)
        for role, runner in (("target", pair.target), *(("draft", draft) for draft in pair.drafts[:1])):
            if tree is not None and (why := runner.no_trees):
                notice(f"drafts are no trees: the {role} reads chains only, because {why}")
                break
        # On CUDA also what is not captured: libraries and kernels are loaded by the first pass of each kind.
        if pair.preparing_seconds is not None or pair.target.device.type == "cuda":
            from specctl.decoding.warming import warm_up

            warm_up(pair, profile.sampling, tree=tree, longest=longest)
        if told := PromptFormat.of(pair.tokenizer, profile.prompt).note(profile.prompt):
            notice(told)
    return pair
