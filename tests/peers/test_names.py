"""What `--peer` can name."""

import pytest

from specctl.errors import UsageError
from specctl.peers.engines import ENGINES, parse_peer


@pytest.mark.parametrize(
    ("text", "label", "values"),
    [
        ("openvino", "openvino:constant:5", {"draft": "constant", "tokens": 5}),
        ("openvino:constant:3", "openvino:constant:3", {"draft": "constant", "tokens": 3}),
        ("openvino:confidence", "openvino:confidence:0.4", {"draft": "confidence", "threshold": 0.4}),
        ("onnxruntime-genai:adaptive", "onnxruntime-genai:adaptive:2", {"draft": "adaptive", "tokens": 2}),
        ("llama.cpp:none", "llama.cpp:none", {"draft": "none"}),
        ("llama.cpp:confidence:0.75", "llama.cpp:confidence:0.75", {"draft": "confidence", "threshold": 0.75}),
    ],
)
def test_a_setting_is_named_in_full(text, label, values):
    setting = parse_peer(text)
    assert (setting.label, dict(setting.values)) == (label, values)
    assert parse_peer(setting.label) == setting
    assert setting.engine is ENGINES[setting.peer]


def test_transformers_has_settings_of_its_own():
    setting = parse_peer("hf-constant")
    assert (setting.label, setting.engine) == ("hf-constant", None)
    assert setting.values["num_assistant_tokens"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvnio", "did you mean 'openvino'"),
        ("openvino:adaptive", "cannot draft by 'adaptive'"),
        ("openvino:constant:0", "'0' is no tokens"),
        ("openvino:constant:2.5", "'2.5' is no tokens"),
        ("openvino:confidence:1.5", "'1.5' is no threshold"),
        ("onnxruntime-genai:constant:17", "between 1 and 16"),
        ("openvino:none:3", "cannot draft by 'none'"),
        ("hf-constant:none", "no settings to choose"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UsageError) as caught:
        parse_peer(text)
    assert message in caught.value.full_message
