"""Measures what reuse costs a user's own model on the user's own data.

    python -m evals.measure --model=DIR --data=PATH --out=out/measure

Reads items (contexts in pieces, and questions behind them), caches every piece alone, serves it in every arm behind the
others, and scores the answers by the data's scorer and by their distance from re-prefill. The same command resumes
after a kill; `--shard=0/4` … `--shard=3/4` share the work on one folder, and so do tasks of a Ray cluster (`--ray`).

    python -m evals.measure --agent --model=DIR --data=FOLDER_OF_SCREENSHOTS --keep=4

Plays an agent's loop over screenshots instead: seconds, tokens, KL and decisions of a session beside a prefix cache and
a re-prefill. It does not resume.
"""

from absl import flags

from ..harness import program

flags.DEFINE_string("model", None, "a checkpoint directory, GGUF file, shipped instance, or name of real weights")
flags.DEFINE_string("data", None, "a file or folder of the data set, or a folder of images and PDFs")
flags.DEFINE_string("fields", None, "name or TOML file of a field map; by default recognised; help lists them")
flags.DEFINE_bool("agent", False, "an agent's loop over a folder of screenshots, in the order of their names")
flags.DEFINE_string("question", None, "with --agent: asked after every step")
flags.DEFINE_integer("keep", None, "screenshots that stay in the prompt; by default all, with --agent 4", lower_bound=1)
flags.DEFINE_list("methods", [], "with settings, as patch.bytes=0.1,cacheblend.budget=0.15; help lists them")
flags.DEFINE_integer("limit", 0, "a sample of so many records; 0: all", lower_bound=0)
flags.DEFINE_integer("seed", 0, "of the sample")
flags.DEFINE_enum("frame", "chat", ("chat", "plain"), "what stands around pieces and question; plain: nothing")
flags.DEFINE_integer("answer_tokens", None, "of an answer at most; by default as its scorer says", lower_bound=1)
flags.DEFINE_integer("max_tokens", None, "of a prompt: longer ones are left out; by default what config.json says", 1)
flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "of the weights")
_OUT = flags.DEFINE_string("out", "out/measure", "folder of answers and report; shards share one")
program.define_sharing(shards=8)


def main() -> None:
    """Measures, and writes answers.jsonl, results.json, rows.csv and report.html."""
    import functools
    from pathlib import Path
    from typing import Any

    from kvpatch_jax.errors import InputError
    from kvpatch_jax.repair import METHODS

    from ..harness.parts import run_plan, sharing
    from . import agent, fields, job, report

    if flags.FLAGS.fields == "help" or flags.FLAGS.methods == ["help"]:
        methods = "\n".join(f"{name:26} {(method.__doc__ or '').splitlines()[0]}" for name, method in METHODS.items())
        print(fields.help_text() if flags.FLAGS.fields else methods)
        return
    values: dict[str, Any] = {name: flags.FLAGS[name].value for name in job.Request._fields}
    request = job.Request(**values)
    if not request.model or not request.data:
        raise InputError(f"--model, --data: got {request.model!r}, {request.data!r}; expected both; see --help")
    # Workers of a cluster may run in another folder.
    paths = {name: str(Path(path).resolve()) for name in ("model", "data", "fields")
             if (path := getattr(request, name)) and Path(path).exists()}  # fmt: skip
    request, out, share = request._replace(**paths), Path(_OUT.value), sharing(flags.FLAGS)
    command = program.repeated_command("evals.measure")
    if flags.FLAGS.agent:
        frame = request.frame if flags.FLAGS["frame"].present else None
        print(agent.measure(request, frame, flags.FLAGS.question, out, command))
        print(f"steps: {out / 'agent.json'}")
        return
    planned = job.plan(request)
    print(f"{planned.config['fields']}: {len(planned.parts)} contexts. {planned.data.about}")
    print(f"methods: {', '.join(planned.config['methods'])}", flush=True)
    for refusal in planned.data.refusals:
        print(f"left out: {refusal.where}: {refusal.reason}", flush=True)

    records = run_plan(out, planned, share, functools.partial(job.plan, request))
    if len(records) < len(planned.parts):
        print(f"{len(records)} of {len(planned.parts)} contexts are finished: the last shard writes the report")
        return
    items = [record for part in planned.parts for record in records[part.key]]
    refused = [record for record in items if "refused" in record]
    for record in refused:
        print(f"left out: {record['where']}: {record['refused']}", flush=True)
    if len(refused) == len(items):
        raise InputError(f"--data: got {request.data}, of which this model can be asked nothing")
    print(report.write(out, items, planned.config, planned.data.refusals, command))
    print(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    program.start(main, "kvpatch_jax: what reuse costs your model on your data; loading libraries …")
