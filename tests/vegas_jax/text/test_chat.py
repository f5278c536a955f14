import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.vegas_jax.text.chat_templates import GPT_OSS, LLAMA3, MISTRAL, QWEN3
from vegas_jax import ChatTemplate, CheckpointError, InputError
from vegas_jax.checkpoint import resolve
from vegas_jax.text import Tokenizer, load

HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "<think>\nSure.\n</think>\n\nYes."},
    {"role": "user", "content": "2 < 1?"},
]
TOOL = {"type": "function", "function": {"name": "é<f>'", "a": 1}}


# --- rendering


def test_qwen3_style():
    template = ChatTemplate(QWEN3)
    assert template.render(HELLO) == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert template.render(HELLO, enable_thinking=False).endswith("\n<think>\n\n</think>\n\n")
    assert template.render(TALK, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\n2 < 1?<|im_end|>\n"
    )


def test_json_is_as_json_dumps_writes_it():
    text = ChatTemplate(QWEN3).render(HELLO, tools=[TOOL])
    assert "<tools>\n" + json.dumps(TOOL, ensure_ascii=False) + "\n</tools>" in text
    source = "{{ tools | tojson(indent=2) }}"
    assert ChatTemplate(source).render(HELLO, tools=[TOOL]) == json.dumps(
        [TOOL], ensure_ascii=False, indent=2
    )


def test_llama3_style():
    template = ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>"})
    assert template.render(TALK[:2], date_string="1 May 2026") == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Today is 1 May 2026.\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1 < 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert f"Today is {today}." in template.render(HELLO)


def test_gpt_oss_style():
    template = ChatTemplate(GPT_OSS)
    assert template.render(TALK[:2], reasoning_effort="low") == (
        "<|start|>system<|message|>Reasoning: low\n\n"
        "# Valid channels: analysis, commentary, final.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>1 < 2?<|end|><|start|>assistant"
    )
    assert "Reasoning: medium" in template.render(HELLO)
    thoughtful = {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    text = template.render([*HELLO, thoughtful], add_generation_prompt=False)
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
    )


def test_mistral_style():
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TALK[1:2]) == "<s>[INST] 1 < 2? [/INST]"
    with pytest.raises(InputError, match=r"refuses the messages: system role not supported$"):
        template.render(TALK)
    with pytest.raises(InputError, match="After the optional system message, roles must"):
        template.render(HELLO * 2)


def test_blocks_take_their_line_with_them_and_loops_may_break():
    source = """
    {% for message in messages %}
{{ message.content }}
        {% break %}
    {% endfor %}
    {% generation %}
end
    {% endgeneration %}
"""
    assert ChatTemplate(source).render(TALK) == "\nBe brief.\nend\n"


def test_arguments_go_before_special_tokens():
    template = ChatTemplate("{{ bos_token }}{{ documents is none }}{{ x }}", {"bos_token": "<s>"})
    assert template.render(HELLO) == "<s>True"
    assert template.render(HELLO, bos_token="!", documents=[], x=1) == "!False1"


# --- errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ bos_token + 'a' }}", "fails on the messages: 'bos_token' is undefined"),
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ messages[7].content }}", "fails on the messages: .* has no element 7"),
        ("{{ 1 + 'a' }}", "fails on the messages: unsupported operand"),
        ("{{ 1 // 0 }}", "fails on the messages: integer division"),
        ("{{ x | tojson }}", "fails on the messages: Object of type Undefined"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe$"),
        ("{{ ''.__class__.__mro__ }}", "fails on the messages: .* is unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion"),
    ],
)
def test_a_template_that_fails_is_one_sentence(source, message):
    with pytest.raises(InputError, match=message) as error:
        ChatTemplate(source).render(HELLO)
    assert "\n" not in str(error.value)


def test_a_template_nested_too_deeply_is_refused():
    with pytest.raises(InputError, match="nested too deeply"):
        ChatTemplate("{% if 1 %}" * 500 + "{% endif %}" * 500)


@pytest.mark.parametrize("source", ["a\n{% if %}", "{{ 'a' | nonsense }}", "{% generation %}"])
def test_a_malformed_template_is_refused_with_its_line(source):
    with pytest.raises(InputError, match=f"malformed at line {source.count(chr(10)) + 1}: "):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("Hello", "non-empty list"),
        (None, "non-empty list"),
        (HELLO[0], "non-empty list"),
        (["Hello"], r"messages\[0\] is a str"),
        ([*HELLO, {"content": "a"}], r"messages\[1\] has the role None"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], "content of type int"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(InputError, match=message):
        ChatTemplate(QWEN3).render(messages)


def test_calls_of_tools_need_no_content_and_content_may_have_parts():
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls or m.content }}{% endfor %}")
    messages = [{"role": "assistant", "tool_calls": [1]}, {"role": "user", "content": [2]}]
    assert template.render(messages) == "[1][2]"


def test_messages_are_no_template_argument():
    with pytest.raises(InputError, match="'messages' is no argument"):
        ChatTemplate(QWEN3).render(HELLO, messages=HELLO)


def test_without_jinja2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"pip install vegas_jax\[chat\]"):
        ChatTemplate(QWEN3)


def test_jinja2_is_not_imported_unless_it_is_needed():
    code = "import sys, vegas_jax, vegas_jax.cli.main; sys.exit('jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


# --- files


def write(folder, config=None, **files):
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / f"{name}.jinja").write_text(text)
    return folder


def test_where_the_template_is_found(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, {})) is None
    assert ChatTemplate.load(write(tmp_path, {"chat_template": None})) is None
    assert ChatTemplate.load(write(tmp_path, {"chat_template": "string"})).source == "string"
    entries = [{"name": name, "template": f"list {name}"} for name in ("tool_use", "default")]
    write(tmp_path, {"chat_template": entries})
    assert ChatTemplate.load(tmp_path).source == "list default"
    write(tmp_path, chat_template="file", other="other")
    assert ChatTemplate.load(tmp_path).source == "file"
    assert ChatTemplate.load(tmp_path, tmp_path / "other.jinja").source == "other"
    assert ChatTemplate.load(resolve("codelm-16m")) is None


def test_special_tokens_are_strings_or_objects(tmp_path):
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "image_token": "<image>",
        "pad_token": None,
        "add_bos_token": True,
        "model_max_length": 5,
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token }}",
    }
    template = ChatTemplate.load(write(tmp_path, config))
    assert template.render(HELLO) == "<s></s><image>"
    assert set(template.special_tokens) == {"bos_token", "eos_token", "image_token"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a JSON list"),
        ('{"chat_template": 3}', "chat_template is a int"),
        ('{"chat_template": ["a"]}', "chat_template is a list"),
        ('{"chat_template": [{"name": "rag", "template": "a"}]}', "named 'default', but 'rag'"),
        ('{"chat_template": []}', "named 'default', but none at all"),
    ],
)
def test_bad_configs(tmp_path, config, message):
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.load(tmp_path)


def test_bad_files(tmp_path):
    (tmp_path / "latin.jinja").write_bytes(b"ab\xff")
    for name, message in [
        ("latin.jinja", "not UTF-8: bad byte at offset 2"),
        ("none.jinja", "cannot read the chat template '.*none.jinja': No such file"),
        (".", "Is a directory"),
    ]:
        with pytest.raises(InputError, match=message):
            ChatTemplate.load(tmp_path, tmp_path / name)
    with pytest.raises(CheckpointError, match="is no folder"):
        ChatTemplate.load(tmp_path / "none")


# --- tokens


def words(post_processor=None) -> Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "Hello": 3}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post_processor is not None:
        inner.post_processor = post_processor
    return Tokenizer(inner)


IDS = [("<s>", 1), ("</s>", 2)]
BOS = processors.TemplateProcessing("<s> $A", special_tokens=IDS)
POST_PROCESSORS = {
    "bos": (BOS, True),
    "bytes, then bos": (processors.Sequence([processors.ByteLevel(), BOS]), True),
    "bos and eos": (processors.TemplateProcessing("<s> $A </s>", special_tokens=IDS), True),
    "none": (None, False),
    "eos": (processors.TemplateProcessing("$A </s>", special_tokens=IDS), False),
    "bytes": (processors.ByteLevel(), False),
}
SAY = "{{ messages[0].content }}"


@pytest.mark.parametrize("processor", POST_PROCESSORS)
@pytest.mark.parametrize("bos", [None, "<s>"])
@pytest.mark.parametrize("writes", [True, False])
def test_a_bos_comes_once(processor, bos, writes):
    """From the template or the tokenizer; where neither writes one, the model knows none."""
    post_processor, adds = POST_PROCESSORS[processor]
    template = ChatTemplate("<s>" + SAY if writes else SAY, {"bos_token": bos} if bos else {})
    ids = template.encode(words(post_processor), HELLO)
    assert ids == ([1, 3] if writes or adds else [3])


def test_white_space_before_a_bos_does_not_bring_a_second():
    template = ChatTemplate("\n{{ bos_token }}" + SAY, {"bos_token": "<s>"})
    assert template.encode(words(BOS), HELLO) == [1, 3]


def test_encoding_passes_arguments_on_and_reads_special_tokens():
    tokenizer = load(resolve("codelm-16m"))
    ids = ChatTemplate(QWEN3).encode(tokenizer, HELLO, enable_thinking=False)
    start, end = (tokenizer.special_token(f"<|im_{name}|>") for name in ("start", "end"))
    assert (ids[0], ids.count(start), ids.count(end)) == (start, 2, 1)
    assert tokenizer.decode(ids) == "user\nHello\nassistant\n<think>\n\n</think>\n\n"


def test_special_tokens_by_their_text():
    tokenizer = words()
    assert [tokenizer.special_token(text) for text in ("<s>", "Hello", "none")] == [1, None, None]
