"""What released chat templates make use of: each construct in a template of our own, as transformers renders it.

Seen in the templates of LLaVA-1.5, Qwen2-VL and Qwen3-VL, which both libraries rendered to the same text.
"""

import pytest

from kvpatch_jax.models.inputs.chat import ChatTemplate

MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is <this> & that?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A page."}]},
    {"role": "user", "content": "And?"},
]
EACH = "{% for m in messages %}"

CONSTRUCTS = {
    "LLaVA-1.5: a role in capitals": (EACH + "{{ m['role'].upper() + ':' }}{% endfor %}", "USER:ASSISTANT:USER:"),
    "LLaVA-1.5: entries chosen by their type": (
        "{% for c in messages[0]['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for c in messages[0]['content'] | selectattr('type', 'equalto', 'text') %}{{ c.text + ' ' }}{% endfor %}",
        "<image>\nWhat is <this> & that? ",
    ),
    "LLaVA-1.5: the assistant's part marked": ("a{% generation %}{{ 'b ' }}{% endgeneration %}c", "ab c"),
    "LLaVA-1.5: a comment": ("a{# Render all images first #}b", "ab"),
    "Qwen2-VL: a count kept across entries": (
        "{% set n = namespace(value=0) %}" + EACH + "{% set n.value = n.value + 1 %}{{ n.value }}{% endfor %}",
        "123",
    ),
    "Qwen2-VL: content that is a text or entries": (
        EACH + "{% if m['content'] is string %}S{% else %}L{% endif %}{% endfor %}",
        "LLS",
    ),
    "Qwen2-VL: the first turn is another's": (
        EACH + "{% if loop.first and m['role'] != 'system' %}<system>{% endif %}.{% endfor %}",
        "<system>...",
    ),
    "Qwen2-VL: a key that entries may have": (
        "{% for c in messages[0]['content'] %}{% if c.type == 'image' or 'image_url' in c %}P{% endif %}{% endfor %}",
        "P",
    ),
    "Qwen2-VL: a name that nobody gives": ("a{% if add_vision_id %}Picture 1: {% endif %}b", "ab"),
    "Qwen3-VL: blanks around tags": (
        "{%- if tools %}\n    {{- 'tools' }}\n{%- else %}\n    {{- 'plain' }}\n{%- endif %}\n{{- '!\n' }}",
        "plain!\n",
    ),
    "Qwen3-VL: the turn before": (
        EACH
        + "{% if loop.index0 and messages[loop.index0 - 1].role != m.role %}/{% endif %}{{ m.role[0] }}{% endfor %}",
        "u/a/u",
    ),
    "Qwen3-VL: a table as JSON": ("{{ {'name': 'é', 'n': [1, 2]} | tojson }}", '{"name": "é", "n": [1, 2]}'),
    "Qwen3-VL: attributes of a message that it lacks": (EACH + "{% if m.tool_calls %}T{% endif %}{% endfor %}-", "-"),
    "Qwen3-VL: the answer opened": (
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_start|>assistant\n",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_of_released_templates_renders(name):
    template, text = CONSTRUCTS[name]
    assert ChatTemplate(template).render(MESSAGES) == text
