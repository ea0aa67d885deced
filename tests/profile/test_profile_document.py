import pytest

from specctl.errors import ProfileError
from specctl.profile.profile_file import key_lines, read


def test_lines_of_tables_plain_dotted_and_quoted_keys():
    text = "\n".join(
        [
            "a = 1",  # 1
            "[target]",  # 2
            'model = "m"  # c = 1',  # 3
            '[draft . "policy"]',  # 4
            "name='x'",  # 5
            "other.deep = 2",  # 6
            "[draft]",  # 7
        ]
    )
    lines = key_lines(text)
    assert lines[("a",)] == 1
    assert lines[("target",)] == 2
    assert lines[("target", "model")] == 3
    assert lines[("draft", "policy")] == 4
    assert lines[("draft",)] == 4
    assert lines[("draft", "policy", "name")] == 5
    assert lines[("draft", "policy", "other", "deep")] == 6
    assert ("c",) not in lines


@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_text_in_a_multi_line_string_is_no_key(quotes):
    lines = key_lines(f"description = {quotes}\n[fake]\nkey = 1\n{quotes}\nkey = 2\n")
    assert lines == {("description",): 1, ("key",): 5}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[target]\nmodel = = 3\n", ":2: "),
        ("a = 1\na = 2\n", ":2: "),
        ('a = 1\nb = "', ":2: "),
        ("a = [1,\n2", ":2: "),
    ],
)
def test_syntax_errors_name_file_and_line(tmp_path, text, place):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{place}")


def test_a_file_that_is_not_utf8_is_an_error(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b'description = "caf\xe9"\n')
    with pytest.raises(ProfileError, match="not UTF-8"):
        read(path)


@pytest.mark.parametrize("version", [0, 2])
def test_another_schema_is_an_error_before_its_keys_are_checked(tmp_path, version):
    path = tmp_path / "other.toml"
    path.write_text(f"\nschema_version = {version}\nunheard_of = 1\n")
    with pytest.raises(ProfileError, match=rf"other\.toml:2: schema_version {version}; this specctl reads 1") as caught:
        read(path)
    assert "unheard_of" not in str(caught.value)
