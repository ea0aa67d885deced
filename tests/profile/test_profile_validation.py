import pytest

from specctl.errors import ProfileError
from specctl.policies.setting import TreeSize
from specctl.profile import resolve


@pytest.fixture
def mistakes(tmp_path, monkeypatch):
    """What is wrong with a profile file of the given text, line by line."""
    monkeypatch.chdir(tmp_path)

    def mistakes(text="", **arguments):
        name = None
        if text:
            (tmp_path / "x.toml").write_text(text)
            name = "x.toml"
        arguments.setdefault("environ", {})
        arguments["environ"]["XDG_CONFIG_HOME"] = str(tmp_path)
        with pytest.raises(ProfileError) as caught:
            resolve(name, **arguments)
        assert caught.value.exit_code == 2
        return [line.strip() for line in caught.value.message.splitlines()]

    return mistakes


def test_every_mistake_is_listed_with_place_key_value_and_remedy(mistakes):
    title, *lines = mistakes(
        """
[target]
model = "m"
dtype = "float61"
[draft]
modle = "n"
policy.name = "svip"
policy.treshold = 1
[sampling]
temperature = -1
top_k = "3"
[sampler]
x = 1
"""
    )
    assert title == "profile 'x.toml': 7 mistakes"
    assert sorted(line.partition(": ")[0] for line in lines) == [
        f"x.toml:{n}" for n in ("10", "11", "12", "4", "5", "6", "8")
    ]
    found = {line.split(": ")[1]: line for line in lines}
    assert "\"float61\" must be 'auto', 'bfloat16', 'float16' or 'float32'" in found["target.dtype"]
    assert "did you mean 'float16'?" in found["target.dtype"]
    assert found["draft.model"].endswith("is required")
    assert "did you mean 'model'?" in found["draft.modle"]
    assert (
        "unknown setting of svip; did you mean 'threshold'? (known: name, threshold" in found["draft.policy.treshold"]
    )
    assert "-1 must be greater than or equal to 0" in found["sampling.temperature"]
    assert '"3" must be an integer' in found["sampling.top_k"]
    assert "did you mean 'sampling'?" in found["sampler"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("temperature=1", "temperature: unknown key; did you mean sampling.temperature?"),
        ("target.model=embedded:tarrget", 'target.model: "embedded:tarrget" is unknown: there is no embedded model'),
        ("target.model=''", "target.model:"),
        ("target.device=gpu", 'target.device: "gpu" must be auto,'),
        ("target.device=cuda:x", 'target.device: "cuda:x" must be auto,'),
        ("target.device=3", "target.device: 3 must be a string or a table"),
        ("target.device={a = [1]}", "target.device.a: [1] must be an integer or a string"),
        ("sampling.stop=[1]", "sampling.stop.0: 1 must be a string"),
        ("sampling.temperature=nan", "sampling.temperature: NaN must be a finite number"),
        ("sampling.top_p=0", "sampling.top_p: 0 must be greater than 0"),
        ("sampling.verification=blocks", "sampling.verification: \"blocks\" must be 'token' or 'block'"),
        ("sampling.max_new_tokens=true", "sampling.max_new_tokens: true must be an integer"),
        ("prompt.chat=1", "prompt.chat: 1 must be a boolean"),
        ("policy.name=svp", "draft.policy.name: \"svp\" is not a policy; did you mean 'svip'?"),
        ("policy.name=3", "draft.policy.name: 3 must be a string"),
        ("policy=svip", 'draft.policy: "svip" must be a table'),
        ("policy.threshold=inf", "draft.policy.threshold: Infinity must be a finite number"),
        ("policy.max_draft=1.5", "draft.policy.max_draft: 1.5"),
        ("policy.keep_trigger=1", "draft.policy.keep_trigger: 1 must be a boolean"),
        ("policy.gamma=1", "draft.policy.gamma: unknown setting of svip; it is a setting of adaedl"),
        ("draft.draft.device=cpu", "draft.draft.model: is required"),
        ("draft.draft={model='m', policy={name='nonne'}}", 'draft.draft.policy.name: "nonne" is not a policy'),
        ("extends=embedded", "extends: unknown key"),
        ("schema_version=2", "schema_version: 2 must be 1"),
    ],
)
def test_a_wrong_override_names_itself(mistakes, override, expected):
    (line,) = mistakes(overrides=[override])
    assert line.startswith(f"--set: {expected}")


@pytest.mark.parametrize("override", ["x", "=1", "a..b=1", ".a=1", ""])
def test_a_malformed_override(mistakes, override):
    assert mistakes(overrides=[override]) == [f"--set {override}: expected KEY=VALUE"]


def test_overrides_that_contradict_each_other_in_shape(mistakes):
    (line,) = mistakes(overrides=["sampling=3", "sampling.seed=1"])
    assert line == "--set: sampling.seed: sampling is already set to a value and cannot be a table"


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("SPECCTL_SAMPLING__TEMPERATURE", "hot", "sampling.temperature"),
        ("SPECCTL_SAMPLING__TEMPERATUR", "1", "sampling.temperatur"),
        ("SPECCTL_TEMP", "1", "temp"),
        ("SPECCTL_POLICY__TRESHOLD", "1", "draft.policy.treshold"),
    ],
)
def test_a_wrong_variable_names_itself(mistakes, variable, value, key):
    (line,) = mistakes(environ={variable: value})
    assert line.startswith(f"environment {variable}: {key}: ")


def test_a_wrong_flag_names_itself(mistakes):
    (line,) = mistakes(flags={"sampling.max_new_tokens": 0})
    assert line.startswith("flag --max-new-tokens: sampling.max_new_tokens: 0 must be")


def test_a_missing_target_names_the_file(mistakes):
    assert mistakes('description = "x"') == ["x.toml: target: is required"]


def test_a_key_in_an_inline_table_is_placed_at_its_line(mistakes):
    (line,) = mistakes('[target]\nmodel = "m"\n[draft]\nmodel = "n"\npolicy = {name = "svip", treshold = 1}\n')
    assert line.startswith("x.toml:5: draft.policy.treshold")


def test_an_unknown_profile_suggests_a_known_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError, match="no profile named 'embeded'; did you mean 'embedded'"):
        resolve("embeded", environ={"XDG_CONFIG_HOME": str(tmp_path)})
    with pytest.raises(ProfileError, match=r"no profile file nowhere/x\.toml"):
        resolve("nowhere/x.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[target]\nmodel = "m"\n[draft]\nmodel = "n"\npre_verify = "once"\n',
            'x.toml:5: draft.pre_verify: "once" needs a faster draft to verify: add a [draft] table inside',
        ),
        (
            '[target]\nmodel = "m"\n[draft]\nmodel = "n"\npre_verify = "onec"\n[draft.draft]\nmodel = "o"\n',
            "x.toml:5: draft.pre_verify: \"onec\" must be 'loop' or 'once'; did you mean 'once'?",
        ),
        (
            '[target]\nmodel = "m"\n[draft]\nmodel = "n"\n[draft.draft]\nmodel = "o"\npolicy.name = "svpi"\n',
            "x.toml:7: draft.draft.policy.name: \"svpi\" is not a policy; did you mean 'svip'?",
        ),
        (
            '[target]\nmodel = "m"\n[draft]\nmodel = "n"\n[draft.draft]\nmodel = "o"\npolicy.name = "specdec++"\n',
            "x.toml:5: draft.draft.head: is required by the policy specdec++",
        ),
    ],
)
def test_mistakes_in_a_hierarchy(mistakes, text, expected):
    (line,) = mistakes(text)
    assert line.startswith(expected)


def test_a_policy_that_reads_a_heads_prediction_needs_a_head(mistakes):
    pair = '[target]\nmodel = "m"\n[draft]\nmodel = "n"\n'
    (line,) = mistakes(pair + '[draft.policy]\nname = "specdec++"\n')
    assert line.startswith("x.toml:3: draft.head: is required by the policy specdec++")
    (line,) = mistakes(pair + 'head = "embedded:haed"\n')
    assert "there is no embedded head 'haed' (known: draft-head, eagle3-head, disco-head)" in line


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ('["svip"]', 'draft.policy.arms: ["svip"] must have at least 2 entries'),
        ("svip", 'draft.policy.arms: "svip" must be a list'),
        ('["svip", 3]', "draft.policy.arms.1: 3 must be a string"),
        ('["svip", "adaedl:treshold=1"]', 'arms: "adaedl:treshold=1": treshold: unknown setting of adaedl; did you'),
        ('["svip", "adaedl:threshold=2"]', '"adaedl:threshold=2": threshold: 2 must be'),
        ('["svip", "adaedl:7"]', '"adaedl:7": expected NAME:KEY=VALUE,...'),
        ('["svip", "vip"]', 'arms: "vip": name: "vip" is not a policy; did you mean \'svip\'?'),
        ('["svip", "none"]', "draft.policy: none cannot be an arm: it never drafts"),
        ('["svip", "bandit"]', "draft.policy: bandit cannot be an arm"),
        ('["svip", "svip:keep_trigger=false"]', "cannot be an arm: an arm keeps the token at which it stops"),
    ],
)
def test_the_arms_of_a_bandit(mistakes, arms, message):
    (line,) = mistakes(overrides=["policy.name=bandit", f"policy.arms={arms}"])
    assert message in line


def test_an_arm_that_reads_a_heads_prediction_needs_a_head(mistakes):
    policy = '[draft.policy]\nname = "bandit"\narms = ["svip", "specdec++"]\n'
    (line,) = mistakes(f'[target]\nmodel = "m"\n[draft]\nmodel = "n"\n{policy}')
    assert "draft.head: is required by the policy bandit" in line


def test_the_least_draft_cannot_be_longer_than_the_longest(mistakes):
    (line,) = mistakes(overrides=["policy.name=specdec++", "policy.min_draft=9", "policy.max_draft=4"])
    assert "min_draft = 9 is more than max_draft = 4" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["engine=grpah"],
            "engine: \"grpah\" must be 'auto', 'eager', 'static', 'graph', 'onnx' or 'llama'; did you mean 'graph'?",
        ),
        (
            ["engine=onnx", "compile=true"],
            'compile: true needs engine = "static", "graph" or "auto"; onnx passes are not compiled',
        ),
        (["compile=maybe"], "compile: \"maybe\" must be a boolean or 'auto'"),
        (["deterministic=1"], "deterministic: 1 must be a boolean"),
        (
            ["engine=eager", "compile=true"],
            'compile: true needs engine = "static", "graph" or "auto"; eager passes are not compiled',
        ),
    ],
)
def test_how_passes_run(mistakes, changes, message):
    (line,) = mistakes(overrides=changes)
    assert line == f"--set: {message}"


def test_how_passes_run_is_known_with_its_origin():
    found = resolve("embedded", overrides=["engine=static"], environ={"SPECCTL_DETERMINISTIC": "true"})
    assert (found.profile.engine, found.profile.compile, found.profile.deterministic) == ("static", "auto", True)
    assert [found.origins[key] for key in ("engine", "compile", "deterministic")] == [
        "--set",
        "default",
        "environment SPECCTL_DETERMINISTIC",
    ]


@pytest.mark.parametrize("table", ["target", "draft"])
def test_a_model_that_is_no_text_is_a_mistake_like_any_other(mistakes, table):
    tables = {"target": '"m"', "draft": '"n"'} | {table: "nan"}  # which differs even from itself
    text = "".join(f"[{name}]\nmodel = {model}\n" for name, model in tables.items())
    (line,) = mistakes(text)
    assert f"{table}.model: NaN must be a string" in line


@pytest.mark.parametrize(
    ("given", "tree"), [("tree = 30", TreeSize(30, 10)), ("tree = 8\ntree_beams = 3", TreeSize(8, 3))]
)
def test_a_draft_of_trees(tmp_path, given, tree):
    (tmp_path / "x.toml").write_text(f'extends = "embedded"\n[draft]\n{given}\n')
    draft = resolve(str(tmp_path / "x.toml"), environ={}).profile.draft
    assert draft.setting.tree == tree
    assert draft.stopped_by(draft.setting).setting == draft.setting
    assert draft.stopped_by(draft.setting).tree == tree.tokens
    chains = resolve(str(tmp_path / "x.toml"), overrides=["draft.tree=0"], environ={}).profile.draft
    assert chains.tree is chains.setting.tree is None


@pytest.mark.parametrize("given", ["-1", "1", "65", '"deep"', "true", "1.5"])
def test_trees_of_an_impossible_size_are_a_mistake(mistakes, given):
    (line,) = mistakes(f'extends = "embedded"\n[draft]\ntree = {given}\n')
    assert "x.toml:3: draft.tree" in line


def test_beams_are_at_least_one(mistakes):
    (line,) = mistakes('extends = "embedded"\n[draft]\ntree = 9\ntree_beams = 0\n')
    assert "x.toml:4: draft.tree_beams" in line


def test_no_draft_of_a_hierarchy_is_a_tree(mistakes):
    (line,) = mistakes('extends = "embedded-hsddw"\n[draft]\ntree = 9\n')
    assert "set tree = 0" in line
    (line,) = mistakes('extends = "embedded-hsddw"\n[draft.draft]\ntree = 9\n')
    assert "only a draft that the target verifies" in line


def test_a_lookup_drafts_no_trees(mistakes):
    (line,) = mistakes('extends = "embedded-lookup"\n[draft]\ntree = 9\n')
    assert "copies from the text" in line
