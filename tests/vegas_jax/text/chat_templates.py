"""Chat templates in the style of real ones, written for these tests."""

# Like Qwen3's: tools as JSON, thoughts of earlier turns left out, a switch against thinking.
QWEN3 = r"""
{%- if tools %}
    {{- "<|im_start|>system\n" }}
    {%- if messages[0].role == "system" %}
        {{- messages[0].content + "\n\n" }}
    {%- endif %}
    {{- "You may call these functions:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == "system" %}
    {{- "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and "</think>" in content %}
        {%- set content = content.split("</think>")[-1].lstrip("\n") %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- "<think>\n\n</think>\n\n" }}
    {%- endif %}
{%- endif %}
"""

# Like Llama 3's: a BOS, today's date, one header for each message.
LLAMA3 = r"""{{- bos_token }}
{%- if date_string is not defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{#- The system message is always there, for the date. #}
{%- if messages[0]["role"] == "system" %}
    {%- set system, rest = messages[0]["content"] | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = "", messages %}
{%- endif %}
{%- macro header(role) %}
    {{- "<|start_header_id|>" + role + "<|end_header_id|>\n\n" }}
{%- endmacro %}
{{- header("system") + "Today is " + date_string + ".\n\n" + system + "<|eot_id|>" }}
{%- for message in rest %}
    {{- header(message["role"]) + message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header("assistant") }}
{%- endif %}
"""

# Like gpt-oss's: reasoning effort, a developer message, channels.
GPT_OSS = r"""
{%- set effort = reasoning_effort or "medium" %}
{{- "<|start|>system<|message|>Reasoning: " + effort + "\n\n" }}
{{- "# Valid channels: analysis, commentary, final.<|end|>" }}
{%- for message in messages %}
    {%- if message.role in ("system", "developer") %}
        {{- "<|start|>developer<|message|># Instructions\n\n" + message.content + "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {%- if "<|channel|>" in message.content %}
            {{- raise_exception("give the final text, and the analysis as \"thinking\"") }}
        {%- endif %}
        {%- if loop.last and message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
            {{- message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant" }}
{%- endif %}
"""

# Like Mistral's: no system message, and roles must alternate.
MISTRAL = r"""{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- raise_exception("system role not supported") }}
    {%- endif %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional\nsystem message, roles must alternate!") }}
    {%- endif %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + " [/INST]" }}
    {%- else %}
        {{- " " + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
