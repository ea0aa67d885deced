import pytest

from specctl.errors import ProfileError
from specctl.profile import parse_policy, resolve
from specctl.profile.profile_file import available, packaged_directory

PAIR = '[target]\nmodel = "big"\n[draft]\nmodel = "small"\n'


def test_without_a_name_the_embedded_family_is_used(environ):
    resolved = resolve(environ=environ)
    assert resolved.name == "embedded"
    assert resolved.source == packaged_directory() / "embedded.toml"
    assert resolved.profile.target.model == "embedded:target"
    assert resolved.profile.draft.policy.name == "svip"


def test_environment_names_the_profile_and_an_argument_beats_it(environ):
    environ["SPECCTL_PROFILE"] = "embedded-constant"
    assert resolve(environ=environ).name == "embedded-constant"
    assert resolve("embedded-adaedl", environ=environ).name == "embedded-adaedl"


@pytest.mark.parametrize("path", sorted(packaged_directory().glob("*.toml")), ids=lambda path: path.stem)
def test_every_ready_profile_is_valid_and_cites_its_paper(path, environ):
    profile = resolve(path.stem, environ=environ).profile
    home_made = profile.draft.policy.name == "cost-optimal"
    assert home_made or "arXiv" in profile.description or "HSDDW" in profile.description
    profile.draft.policy.setting.build().reset()


def test_search_order(write, environ):
    write("x", PAIR, "config/specctl/profiles")
    assert "config" in str(resolve("x", environ=environ).source)
    near = write("x", PAIR)
    assert resolve("x", environ=environ).source.samefile(near)
    assert available(environ)["x"].samefile(near)
    given = write("x", PAIR, "elsewhere")
    assert resolve("elsewhere/x.toml", environ=environ).source.samefile(given)
    assert resolve(str(given), environ=environ).source == given


@pytest.mark.parametrize(
    ("sources", "value", "origin"),
    [
        ({}, 0.0, "default"),
        ({"file"}, 0.1, "profiles/x.toml:6"),
        ({"file", "env"}, 0.2, "environment SPECCTL_SAMPLING__TEMPERATURE"),
        ({"file", "env", "set"}, 0.3, "--set"),
        ({"file", "env", "set", "flag"}, 0.4, "flag --temperature"),
    ],
)
def test_precedence_and_origins(write, environ, sources, value, origin):
    write("x", PAIR + ("[sampling]\ntemperature = 0.1\n" if "file" in sources else ""))
    if "env" in sources:
        environ["SPECCTL_SAMPLING__TEMPERATURE"] = "0.2"
    overrides = ["sampling.temperature=0.3"] if "set" in sources else []
    flags = {"sampling.temperature": 0.4 if "flag" in sources else None}
    resolved = resolve("x", environ=environ, overrides=overrides, flags=flags)
    assert resolved.profile.sampling.temperature == value
    assert resolved.origins["sampling.temperature"] == origin


def test_set_values_are_toml_or_bare_words(environ):
    overrides = ["target.dtype=bfloat16", 'sampling.stop=["a", "b"]', "prompt.chat=true", 'target.revision="12"']
    profile = resolve(environ=environ, overrides=overrides).profile
    assert profile.target.dtype == "bfloat16"
    assert profile.sampling.stop == ["a", "b"]
    assert profile.prompt.chat is True
    assert profile.target.revision == "12"


def test_a_value_cannot_smuggle_in_further_keys(environ):
    profile = resolve(environ=environ, overrides=["prompt.system=1\nother = 2"]).profile
    assert profile.prompt.system == "1\nother = 2"


def test_integers_serve_as_floats(environ):
    profile = resolve(environ=environ, overrides=["sampling.temperature=1", "policy.threshold=1"]).profile
    assert profile.draft.policy.setting.build().threshold == 1.0
    assert isinstance(profile.sampling.temperature, float)


def test_debug_is_no_key(environ):
    resolve(environ=environ | {"SPECCTL_DEBUG": "1"})


class TestPolicies:
    def settings(self, resolved):
        return {
            key.rpartition(".")[2]: origin
            for key, origin in resolved.origins.items()
            if key.startswith("draft.policy.") and origin != "default"
        }

    def test_defaults_are_filled_in(self, environ, write):
        write("x", PAIR)
        resolved = resolve("x", environ=environ)
        assert resolved.profile.draft.policy.setting.all_values == {
            "threshold": 0.3,
            "c": 0.15,
            "max_draft": 40,
            "keep_trigger": True,
        }
        assert resolved.origins["draft.policy.name"] == "default"

    def test_another_policy_drops_the_settings_of_the_old_one(self, environ):
        resolved = resolve(environ=environ, overrides=["policy.name=adaedl"])
        assert self.settings(resolved) == {"name": "--set"}

    def test_settings_of_the_same_precedence_stay_whatever_their_order(self, environ):
        resolved = resolve(environ=environ, overrides=["policy.gamma=0.5", "policy.name=adaedl"])
        assert self.settings(resolved) == {"name": "--set", "gamma": "--set"}
        assert resolved.profile.draft.policy.setting.all_values["gamma"] == 0.5

    def test_settings_of_higher_precedence_stay_and_lower_ones_go(self, environ):
        environ |= {"SPECCTL_POLICY__NAME": "adaedl", "SPECCTL_DRAFT__POLICY__ALPHA": "0.7"}
        kept = resolve(environ=environ, overrides=["policy.gamma=0.5"])
        assert self.settings(kept).keys() == {"name", "alpha", "gamma"}
        gone = resolve(environ=environ, flags={"draft.policy": parse_policy("constant:draft_length=3")})
        assert self.settings(gone) == {"name": "flag --policy", "draft_length": "flag --policy"}

    def test_naming_the_same_policy_keeps_its_settings(self, environ):
        resolved = resolve(environ=environ, overrides=["policy.name=svip", "policy.threshold=0.9"])
        assert self.settings(resolved)["max_draft"].endswith("embedded.toml:19")

    def test_another_draft_drops_the_head_of_the_old_one(self, write, environ):
        write("own", 'extends = "embedded"\n[draft]\nmodel = "other"\n')
        write("both", 'extends = "embedded"\n[draft]\nmodel = "other"\nhead = "a/head"\n')
        write("same", 'extends = "embedded"\n[draft]\nmodel = "embedded:draft"\ndtype = "bfloat16"\n')
        heads = {name: resolve(name, environ=environ).profile.draft.head for name in ("own", "both", "same")}
        assert heads == {"own": None, "both": "a/head", "same": "embedded:draft-head"}
        overridden = resolve(environ=environ, overrides=["draft.model=other"])
        assert overridden.profile.draft.head is None
        assert overridden.origins["draft.head"] == "default"

    def test_settings_without_a_name_belong_to_the_default_policy(self, write, environ):
        write("x", PAIR)
        write("y", 'extends = "x"\n[draft.policy]\nmax_draft = 9\n')
        assert resolve("y", environ=environ).profile.draft.policy.setting.all_values["max_draft"] == 9

    @pytest.mark.parametrize(
        ("text", "table"),
        [
            ("svip", {"name": "svip"}),
            ("svip:threshold=0.4,max_draft=20", {"name": "svip", "threshold": 0.4, "max_draft": 20}),
            (" adaedl: carry_over = true", {"name": "adaedl", "carry_over": True}),
        ],
    )
    def test_parse_policy(self, text, table):
        assert parse_policy(text) == table

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("svpi", "did you mean 'svip'"),
            ("", "is not a policy"),
            ("svip:", None),
            ("svip:threshold", "expected NAME:KEY=VALUE"),
            ("svip:name=adaedl", "expected NAME:KEY=VALUE"),
            ("svip:treshold=1", "did you mean 'threshold'"),
            ("svip:gamma=1", "a setting of adaedl"),
            ("svip:max_draft=0", "greater than or equal to 1"),
            ("svip:max_draft=2.5", "integer"),
            ("adaedl:_lambda=1", "unknown setting"),
            ("adaedl:signals=1", "unknown setting"),
        ],
    )
    def test_parse_policy_mistakes(self, text, message):
        if message is None:
            assert parse_policy(text) == {"name": "svip"}
            return
        with pytest.raises(ProfileError, match=message) as caught:
            parse_policy(text)
        assert str(caught.value).startswith(f"--policy {text}:")


class TestPairsWithoutAProfile:
    def test_the_pair_is_the_whole_profile(self, environ, write):
        write("own", PAIR + "[sampling]\ntop_k = 3\n")
        environ |= {"SPECCTL_PROFILE": "own", "SPECCTL_SAMPLING__TOP_P": "0.5"}
        resolved = resolve(environ=environ, flags={"target.model": "a/b", "draft.model": "./small"})
        profile = resolved.profile
        assert (profile.target.model, profile.draft.model, profile.draft.head) == ("a/b", "./small", None)
        assert profile.draft.policy.name == "cost-optimal"
        assert (profile.sampling.top_k, profile.sampling.top_p) == (0, 0.5)
        assert (resolved.name, resolved.source) == ("--target a/b --draft ./small", None)
        origins = {key: resolved.origins[key] for key in ("target.model", "draft.model", "draft.policy.name")}
        assert list(origins.values()) == ["flag --target", "flag --draft", "default"]

    def test_another_policy_takes_the_place_of_the_default(self, environ):
        flags = {"target.model": "a", "draft.model": "b"}
        named = resolve(environ=environ, flags={**flags, "draft.policy": parse_policy("svip:threshold=0.4")})
        assert named.profile.draft.policy.setting.all_values["threshold"] == 0.4
        assert (
            resolve(environ=environ, flags=flags, overrides=["policy.max_draft=9"]).profile.draft.policy.max_draft == 9
        )

    def test_a_target_alone_has_no_draft(self, environ):
        assert resolve(environ=environ, flags={"target.model": "a", "draft.model": None}).profile.draft is None
        with pytest.raises(ProfileError, match=r"draft\.model: is required\nAdd --draft MODEL"):
            resolve(environ=environ, flags={"target.model": "a"}, overrides=["policy.name=svip"])

    def test_a_draft_alone_needs_a_profile(self, environ, write):
        write("own", PAIR)
        flags = {"draft.model": "other"}
        with pytest.raises(ProfileError, match="a draft without a target"):
            resolve(environ=environ, flags=flags)
        for resolved in (
            resolve("own", environ=environ, flags=flags),
            resolve(environ=environ | {"SPECCTL_PROFILE": "own"}, flags=flags),
        ):
            assert (resolved.profile.target.model, resolved.profile.draft.model) == ("big", "other")

    def test_mistakes_name_the_flag(self, environ):
        with pytest.raises(ProfileError, match=r"^flag --target: target\.model: .*no embedded model 'tarjet'"):
            resolve(environ=environ, flags={"target.model": "embedded:tarjet", "draft.model": "b"})


class TestReplacedModels:
    OWN = (
        '[target]\nmodel = "big"\nrevision = "v1"\ntrust_remote_code = true\ndtype = "float16"\n'
        '[draft]\nmodel = "small"\nhead = "a/head"\n[draft.policy]\nthreshold = 0.2\n[provenance]\nprompts = 3\n'
    )

    @pytest.fixture(autouse=True)
    def own(self, write):
        write("own", self.OWN)

    def test_what_belongs_to_the_old_target_goes(self, environ):
        """Above all the permission to run its code: it was not given for another model."""
        resolved = resolve("own", environ=environ, flags={"target.model": "huge"})
        target = resolved.profile.target
        assert (target.revision, target.trust_remote_code, target.dtype) == (None, False, "float16")
        assert resolved.profile.draft.head == "a/head"
        assert resolved.profile.provenance is None
        assert resolved.outdated == (
            'profiles/own.toml:3: left out target.revision = "v1" and target.trust_remote_code = true: '
            "meant for big, which flag --target replaces",
            "profiles/own.toml:9: the settings of draft.policy were chosen for big with small; "
            "`specctl calibrate` finds those of this pair",
        )

    def test_what_is_set_for_the_new_model_stays(self, environ):
        resolved = resolve(
            "profiles/own.toml",
            environ=environ,
            overrides=["draft.model=tiny", "draft.head=b/head", "policy.threshold=1"],
        )
        assert resolved.profile.draft.head == "b/head"
        assert resolved.outdated == ()

    def test_the_same_models_lose_nothing(self, environ):
        resolved = resolve("profiles/own.toml", environ=environ, flags={"target.model": "big", "draft.model": "small"})
        assert (resolved.outdated, resolved.profile.provenance) == ((), {"prompts": 3})

    def test_another_policy_has_nothing_to_say_of_the_old_ones_settings(self, environ):
        flags = {"draft.model": "tiny", "draft.policy": parse_policy("adaedl")}
        (head,) = resolve("profiles/own.toml", environ=environ, flags=flags).outdated
        assert 'draft.head = "a/head"' in head

    def test_a_policy_that_needs_the_head_says_where_it_went(self, environ):
        with pytest.raises(ProfileError, match=r"draft\.head: is required by .*\n.*flag --draft replaces"):
            resolve("own", environ=environ, overrides=["policy.name=specdec++"], flags={"draft.model": "tiny"})


class TestExtends:
    def test_tables_merge_deeply_and_origins_name_each_file(self, write, environ):
        write("base", PAIR + "[sampling]\ntop_k = 3\ntop_p = 0.5\n")
        write("leaf", 'extends = "base"\n[sampling]\ntop_k = 4\n')
        resolved = resolve("leaf", environ=environ)
        assert (resolved.profile.sampling.top_k, resolved.profile.sampling.top_p) == (4, 0.5)
        assert resolved.origins["sampling.top_k"] == "profiles/leaf.toml:3"
        assert resolved.origins["sampling.top_p"] == "profiles/base.toml:7"

    def test_another_policy_replaces_the_table(self, write, environ):
        write("base", PAIR + '[draft.policy]\nname = "svip"\nthreshold = 0.1\n')
        write("same", 'extends = "base"\n[draft.policy]\nname = "svip"\nc = 1\n')
        write("other", 'extends = "base"\n[draft.policy]\nname = "adaedl"\n')
        assert resolve("same", environ=environ).profile.draft.policy.setting.all_values["threshold"] == 0.1
        assert resolve("other", environ=environ).profile.draft.policy.setting.all_values["threshold"] == 0.4

    def test_a_device_map_is_replaced_whole(self, write, environ):
        write("base", PAIR + '[target.device]\n"model.a" = 0\n')
        write("leaf", 'extends = "base"\n[target.device]\n"model.b" = 1\n')
        resolved = resolve("leaf", environ=environ)
        assert resolved.profile.target.device == {"model.b": 1}
        assert resolved.origins['target.device."model.b"'] == "profiles/leaf.toml:3"

    def test_a_grammar_is_replaced_whole_and_by_another(self, write, environ):
        write("base", PAIR + '[sampling]\njson_schema = {type = "object", required = ["a"]}\n')
        write("leaf", 'extends = "base"\n[sampling]\njson_schema = {type = "array"}\n')
        write("other", 'extends = "base"\n[sampling]\nregex = "a+"\n')
        assert resolve("leaf", environ=environ).profile.sampling.json_schema == {"type": "array"}
        assert resolve("other", environ=environ).profile.sampling.rules == ["regex"]

    def test_provenance_is_not_inherited(self, write, environ):
        write("base", PAIR + "[provenance]\nprompts = 3\n")
        write("leaf", 'extends = "base"\n')
        assert resolve("base", environ=environ).profile.provenance == {"prompts": 3}
        assert resolve("leaf", environ=environ).profile.provenance is None

    def test_names_are_searched_beside_the_file_first(self, write, environ):
        write("base", PAIR + "[sampling]\ntop_k = 1\n")
        write("base", PAIR + "[sampling]\ntop_k = 2\n", "far")
        leaf = write("leaf", 'extends = "base"\n', "far")
        assert resolve(str(leaf), environ=environ).profile.sampling.top_k == 2

    def test_paths_start_at_the_file(self, write, environ):
        write("base", PAIR, "far")
        leaf = write("leaf", 'extends = "../far/base.toml"\n', "other")
        assert resolve(str(leaf), environ=environ).profile.target.model == "big"

    def test_a_profile_may_extend_the_one_it_shadows(self, write, environ):
        write("embedded", 'extends = "embedded"\n[sampling]\nmax_new_tokens = 7\n')
        resolved = resolve("embedded", environ=environ)
        assert resolved.profile.sampling.max_new_tokens == 7
        assert resolved.profile.target.model == "embedded:target"

    def test_a_circle_is_named(self, write, environ):
        write("a", 'extends = "b"\n')
        write("b", '\nextends = "a"\n')
        with pytest.raises(ProfileError, match=r"profiles/b\.toml:2: extends: .*a -> b -> a"):
            resolve("a", environ=environ)

    @pytest.mark.parametrize(
        ("value", "message"), [('"bose"', "did you mean 'base'"), ("3", "must be the name or path")]
    )
    def test_a_bad_parent_names_the_line(self, write, environ, value, message):
        write("base", PAIR)
        write("leaf", f"\nextends = {value}\n")
        with pytest.raises(ProfileError, match=rf"profiles/leaf\.toml:2: extends: .*{message}"):
            resolve("leaf", environ=environ)


def test_a_target_alone_may_say_that_nothing_drafts():
    found = resolve(flags={"target.model": "embedded:target", "draft.policy": parse_policy("none")}, environ={})
    assert found.profile.draft is None
    with pytest.raises(ProfileError, match=r"draft\.model: is required"):
        resolve(flags={"target.model": "embedded:target", "draft.policy": parse_policy("svip")}, environ={})


@pytest.mark.parametrize(
    ("overrides", "flags", "chat"),
    [
        ([], {}, False),
        ([], {"target.model": "other"}, None),
        (["target.model=other"], {}, None),
        (["prompt.chat=false"], {"target.model": "other"}, False),
        ([], {"target.model": "other", "prompt.chat": True}, True),
        ([], {"draft.model": "other"}, False),
    ],
)
def test_another_target_goes_back_to_the_rule_for_chat_templates(overrides, flags, chat):
    assert resolve("embedded", overrides=overrides, flags=flags, environ={}).profile.prompt.chat is chat


def test_a_profile_that_extends_one_of_another_target_does_too(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "embedded"\n[target]\nmodel = "other"\n')
    assert resolve(str(tmp_path / "mine.toml"), environ={}).profile.prompt.chat is None


def test_a_pair_follows_the_rule_unless_it_is_embedded():
    assert resolve(flags={"target.model": "other"}, environ={}).profile.prompt.chat is None
    assert resolve(flags={"target.model": "embedded:target"}, environ={}).profile.prompt.chat is False


@pytest.mark.parametrize("profile", [None, "embedded"])
def test_what_is_set_of_the_model_that_a_flag_names_stays(profile):
    def found(*overrides, draft=None, **environ):
        flags = {"target.model": "org/big", "draft.model": draft}
        return resolve(profile, overrides=overrides, flags=flags, environ=environ).profile

    told = found("target.adapter=here", "target.revision=v1", "draft.adapter=there", draft="org/small")
    assert (told.target.model, told.target.adapter, told.target.revision) == ("org/big", "here", "v1")
    assert (told.draft.model, told.draft.adapter) == ("org/small", "there")
    assert found(SPECCTL_TARGET__ADAPTER="here").target.adapter == "here"
    other = found(SPECCTL_TARGET__MODEL="org/other", SPECCTL_TARGET__ADAPTER="its")
    assert (other.target.model, other.target.adapter) == ("org/big", None), "of the model that the flag replaces"
