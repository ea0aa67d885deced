"""Models on llama.cpp write what the target alone would: in law, over all branches of chance, and token by token."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from law_table import BY_BLOCK, CASES, LENGTH, SAMPLINGS, Case, enumerate_decode

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.models.llama.model import LlamaModel
from specctl.models.llama.passes import LlamaPasses
from specctl.models.llama.rounding import Rounding
from specctl.models.llama.width_trial import rounding_of
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import AdaEdl, Constant, Svip
from specctl.profile.schema import Verification
from tests.support.enumeration import largest_difference
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import ARCHITECTURES, KINDS, SCALES, write

pytestmark = pytest.mark.usefixtures("drafts_at_will")

EXACT = 3e-7
FEW_IDS = 3  # Of the models' vocabularies, so that all branches can be walked
TOKENS = 48
Opener = Callable[..., Slot]


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.slow)])
def opener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Makes a tiny model and opens it: a target as its trial of widths allows, one with a noise as drafts are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "real":
        needs_llama()
    else:
        PretendedLlama(lone=0.3).install(monkeypatch)

    def opened(
        architecture: str = "llama",
        kind: str = "F32",
        ids: int = FEW_IDS,
        *,
        noise: float | None = None,
        threads: int = 1,
    ) -> Slot:
        file = tmp_path / f"{architecture}-{kind}-{noise or 0}.gguf"
        if not file.exists():
            write(file, architecture, kind, noise=noise or 0)
        rounding = rounding_of(file, threads=threads) if noise is None else Rounding()
        model = LlamaModel.open(file, repack=rounding.repack)
        return Slot(LlamaPasses(model, ids, 512, rounding, threads))

    return opened


LAWS = [case for case in CASES if case.sampling in ("T=1", BY_BLOCK)]


@pytest.mark.parametrize("case", LAWS, ids=str)
@pytest.mark.representatives(
    "pretended-svip: threshold=0.37; T=1",
    "pretended-constant: draft_length=3; T=1 by block",
    slow=(
        "real-svip: threshold=0.37; T=1",
        "real-cost-optimal: max_draft=2; T=1",
        "real-constant: draft_length=3; T=1",
    ),
)
def test_output_has_the_law_of_the_target(opener: Opener, case: Case) -> None:
    target = opener()
    require_law(target, case.drafter, SAMPLINGS[case.sampling])


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.representatives(
    "pretended-lfm2-Q8_0-token",
    slow=(
        "real-llama-F32-token",
        "real-llama-Q4_K-token",
        "real-gemma3-Q8_0-token",
        "real-lfm2-F32-token",
        "real-qwen35-Q8_0-token",
        "real-mamba2-Q8_0-token",
    ),
)
def test_models_on_llama_cpp_draft_for_each_other(
    opener: Opener, architecture: str, kind: str, verification: Verification
) -> None:
    sampling = Sampling(temperature=1.0, verification=verification)
    target, draft, other = opener(architecture, kind), opener(architecture, kind, noise=0.1), opener(noise=0.2)

    def middle() -> Drafter:
        return PreVerifiedDrafter(ModelDrafter(other, Constant(1)), draft, Svip(max_draft=2))

    require_law(target, lambda: ModelDrafter(draft, Constant(2)), sampling, length=3)
    require_law(target, middle, sampling, length=3)


def require_law(target: Slot, drafter: Callable[[], Drafter], sampling: Sampling, length: int = LENGTH) -> None:
    """Require that drafts leave the law of a target."""
    enumerate_ = partial(enumerate_decode, sampling=sampling, length=length, limit=length, target=lambda: target)
    found, alone = enumerate_(drafter), enumerate_(lambda: None)
    assert sum(alone.law.values()) == pytest.approx(1)
    assert len(alone.law) > length
    assert largest_difference(found.law, alone.law) < EXACT


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.representatives(
    "pretended-llama-F32-1",
    "pretended-gemma3-Q8_0-2",
    "pretended-mamba2-F16-1",
    slow=(
        "real-llama-F32-1",
        "real-llama-Q4_K-1",
        "real-qwen3-Q4_0-1",
        "real-gemma3-Q8_0-1",
        "real-lfm2-F16-1",
        "real-qwen35-Q8_0-1",
        "real-mamba2-Q8_0-1",
        "real-granitehybrid-BF16-1",
        "real-falcon-h1-Q6_K-1",
    ),
)
def test_greedy_text_is_the_targets_own(opener: Opener, architecture: str, kind: str, threads: int) -> None:
    """As token by token, also where a text crosses 256 cells, from where attention takes another path."""
    target = opener(architecture, kind, 320, threads=threads)
    # Blocks that gguf cannot write are random, so that no other file drafts for one with them.
    near = opener(architecture, kind, 320, noise=0.0 if kind in SCALES else 0.1)
    far = opener(architecture, kind, 320, noise=0.5)
    prompt = [(7 * place) % 300 + 10 for place in range(230)]
    expected = alone(target, prompt)
    assert len(set(expected)) > 3
    drafters = [
        ModelDrafter(near, Constant(4)),
        ModelDrafter(near, AdaEdl()),
        ModelDrafter(far, Svip()),
        LookupDrafter(Slot(LookupPasses(320)), Constant(5)),
    ]
    accepted = rejected = 0
    for drafter in drafters:
        target.rollback(0)
        drafter.rollback(0)
        rounds = list(decode(target, drafter, prompt, TOKENS, Sampling()))
        assert [token for one in rounds for token in one.emitted] == expected
        accepted += sum(one.accepted for one in rounds)
        rejected += sum(one.drafted - one.accepted for one in rounds)
    assert accepted > 3
    assert rejected > 3


def alone(target: Slot, prompt: Sequence[int]) -> list[int]:
    """What the target writes token by token, its prompt read token by token too."""
    target.rollback(0)
    found = [*prompt]
    while len(found) < len(prompt) + TOKENS:
        for token in found[target.length :]:
            row = target.extend([token], 1).columns[-1]
        found.append(int(row.argmax()))
    return found[len(prompt) :]
