"""Families of models whose shards compute what the whole model does, by ``model_type`` of their text decoder.

`python -m tests.faults.sharded_families` compares them. A family that is not named here is refused: transformers also
has plans under which a model computes something else without an error.
"""

SPLIT = frozenset(
    """
    afmoe apertus arcee aria_text axk1 axk2 beam cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32
    diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder
    jais2 kolibri1 laguna llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905 - a line for each would be 90 lines
)
"""Each process has a part of every layer. Not hrm_text, whose logits differ, nor doge, which fails."""

STAGED = frozenset(
    "cohere deepseek_v3 gemma glm4 granite llama olmo2 qwen2 qwen3 qwen3_moe seed_oss smollm3".split()  # noqa: SIM905
)
"""Each process has some of the layers. transformers cuts a model at the names that Llama's modules have: GPT-NeoX's
stages would each apply the last norm."""
