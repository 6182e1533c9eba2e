"""A plugin of lmms-eval (0.7): its tasks over reused KV.

    LMMS_EVAL_PLUGINS=evals.plugins.lmms python -m lmms_eval --model kvpatch \
        --model_args pretrained=/models/Qwen2.5-VL-3B-Instruct,store=/var/chunks --tasks docvqa_val

It imports `<plugin>.models` for `AVAILABLE_MODELS`, and adds `<plugin>.tasks` to where it looks for tasks.
"""
