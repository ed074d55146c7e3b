"""Chat templates that write tools and calls as those of model families do, with the roles of the fake engine."""

from functools import cache
from typing import Any

from serve_tools import FAULTS, KNOWN, ROLES

HERMES = """
{%- if tools %}<|system|>You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|system|><tool_response>
{{ message.content }}
</tool_response><|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if thinks %}<think>
{% endif %}{% endif %}"""
QWEN3 = HERMES + "{# content.split('</think>') #}"
LLAMA = """
{%- if tools %}<|system|>Environment: ipython
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}{% set call = message.tool_calls[0].function %}<|assistant|>{"name": "{{ call.name }}", "parameters": {{
 call.arguments | tojson }}}<|end|>
{%- elif message.role == 'tool' %}<|system|>{{ {"output": message.content} | tojson }}<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
PYTHONIC = """
{%- if tools %}<|system|>Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]
{{ tools | tojson(indent=4) }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>[{% for call in message.tool_calls %}{{ call.function.name }}(
{%- for name in call.function.arguments %}{{ name }}={{ call.function.arguments[name] | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|end|>
{%- elif message.role == 'tool' %}<|system|>{{ message.content | tojson }}<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MISTRAL = """
{%- if tools %}<|system|>[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>[TOOL_CALLS] [{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}
{%- endfor %}]<|end|>
{%- elif message.role == 'tool' %}<|system|>[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{
 message.tool_call_id }}"}[/TOOL_RESULTS]<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MISTRAL_ARGS = """
{%- if tools %}<|system|>[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{{ message.content }}{% for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + call['function']['arguments'] | tojson }}{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|system|>[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DEEPSEEK = """
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<｜tool▁call▁begin｜>function<｜tool▁sep｜><function_name>
```json
<function_arguments_in_json_format>
```<｜tool▁call▁end｜><|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{{ message.content }}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
{{- call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{% if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}<|end|>
{%- elif message.role == 'tool' %}<|system|>{{ '<｜tool▁outputs▁begin｜>' + message.content }}<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DEEPSEEK_31 = """
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜><|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{{ message.content }}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}<|end|>
{%- elif message.role == 'tool' %}<|system|>{{ '<｜tool▁output▁begin｜>' + message.content }}<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
QWEN3_CODER = """
{%- if tools %}<|system|>You have access to the following functions: {{ tools | tojson }}
If you choose to call a function ONLY reply in the following format with NO suffix:
<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call><|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{{ message.content }}{% for call in message.tool_calls %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}
{{- value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|user|><tool_response>
{{ message.content }}
</tool_response><|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DEEPSEEK_32 = """
{%- set dsml_token = "｜DSML｜" %}
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<{{ dsml_token }}function_calls>
<{{ dsml_token }}invoke name="$FUNCTION_NAME">
<{{ dsml_token }}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{ dsml_token }}parameter>
</{{ dsml_token }}invoke>
</{{ dsml_token }}function_calls><|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>{{ message.content }}{{ '\n\n<' + dsml_token + 'function_calls>' }}
{%- for call in message.tool_calls %}{{ '\n<' + dsml_token + 'invoke name="' + call.function.name + '">' }}
{%- for name, value in call.function.arguments | items %}
{{- '\n<' + dsml_token + 'parameter name="' + name + '" string="' + ('true' if value is string else 'false') + '">' }}
{{- value if value is string else value | tojson }}{{ '</' + dsml_token + 'parameter>' }}{% endfor %}
{{- '\n</' + dsml_token + 'invoke>' }}{% endfor %}{{ '\n</' + dsml_token + 'function_calls>' }}<|end|>
{%- elif message.role == 'tool' %}<|user|><function_results>
<result>{{ message.content }}</result>
</function_results><|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DEEPSEEK_4 = DEEPSEEK_32.replace("function_calls", "tool_calls")
TEMPLATES = {
    "hermes": HERMES,
    "pythonic": PYTHONIC,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "mistral with [ARGS]": MISTRAL_ARGS,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_31,
    "qwen3_coder": QWEN3_CODER,
    "deepseek_v32": DEEPSEEK_32,
    "deepseek_v4": DEEPSEEK_4,
}
# As the tokenizers of these families have them: some special, others only added.
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"]
DEEPSEEKS = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>", *DEEPSEEKS, "｜DSML｜"]


@cache
def tokenizer_with(template: str) -> Any:
    """Byte-level, for the fake engine and for tiny models."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*ROLES, *FAULTS, *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([KNOWN] * 4, trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=template)
