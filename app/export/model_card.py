"""The model card of an exported policy: what it is, how it was trained, what that changed, how to load it.

A card is made to be uploaded, so settings of a single machine stay out of it, and of local paths only the last name
is told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from app.checkpoint.policy_checkpoint import SavedPolicy
from app.model.io.model_files import BUILTIN_PREFIX
from app.model.quantization import QUANTIZE_BASE
from app.records.run_directory import RunDirectory
from app.report.before_after import before_and_after
from app.report.run_files import RunFiles
from app.runtime.model_spec import ModelInput
from app.tracking.run_log import WANDB_SECTIONS
from settings import InputError, Resolved
from settings.loading.printing import from_yaml
from settings.loading.secrets import redacted

CARD_FILE = "README.md"

HUB_DATA_PREFIX = "hf:"

KEY_SETTINGS = (
    "model.path", "model.revision", "model.dtype", "data.source", "data.system_prompt", "reward.functions",
    "algorithm.name", "algorithm.beta", "optimizer.learning_rate", "rollout.prompts_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.temperature", "run.steps", "run.seed",
)  # fmt: skip
"""Told whether anybody set them or not."""

RANK = "model.lora.rank"

OF_ADAPTERS = (RANK, "model.lora.alpha", "model.lora.targets", QUANTIZE_BASE)
"""Told of a run with adapters, and of no other."""

NAMING_FILES = ("model.path", "data.source", "data.eval_source")
"""What is neither built in nor of the hub is a path here, however it begins."""

PRIVATE_SETTINGS = ("run.dir", "run.name")
"""In sections that are uploaded, and still those of one machine, or told elsewhere."""

USE = """\
```python
{imports}

path = "path/of/this/folder"
tokenizer = AutoTokenizer.from_pretrained(path)
model = {loads}.from_pretrained(path)
messages = {messages}
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**ids, max_new_tokens={max_new_tokens})[0, ids["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```"""


@dataclass(frozen=True)
class Form:
    """In which a policy is written."""

    says: str
    """What its weights are."""
    library: str = "transformers"
    relation: str = "finetune"
    """To its base, in a hub's words."""
    imports: str = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    loads: str = "AutoModelForCausalLM"


WHOLE = Form("The weights are those of the checkpoint")
MERGED = Form("The weights are the base's, with the adapters of the checkpoint merged into them")
ADAPTER = Form(
    "The weights are the adapters of the checkpoint alone",
    library="peft",
    relation="adapter",
    imports="from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer",
    loads="AutoPeftModelForCausalLM",
)


def notes(form: Form, *, dtype: str, quantization: str | None) -> Iterator[str]:
    """For people, wherein what is written is not what the run measured.

    Args:
        quantization: of what adapters learned beside.
    """
    if form is MERGED and dtype != "float32":
        yield (
            f"merged in {dtype}, small changes of a weight are rounded away, and with them maybe most of what the "
            "adapters learned; `grpo export --dtype float32` keeps it, and so does `--adapter`"
        )
    if quantization is not None:
        yield (
            f"the adapters were trained beside the base's kernels in {quantization} ({QUANTIZE_BASE}); beside the base "
            "itself they make another model than the one that the run measured"
        )


def model_card(resolved: Resolved, saved: SavedPolicy, model: ModelInput, *, form: Form, dtype: str) -> str:
    """The README.md of an export of this checkpoint, without figures where the run's cannot be read."""
    files = _files_of(saved.run)
    settings = {name: value for name, (value, _) in from_yaml(resolved.to_yaml().encode(), name="settings").items()}
    if files is not None:
        settings |= {name: value for name, (value, _) in files.settings.items()}
    # Those of the model that was opened: --set may have named another place of it than the run had it from.
    settings |= {"model.path": resolved.settings.model.path, "model.revision": model.files.commit}
    hub_id = settings["model.path"] if model.files.commit is not None else None
    settings |= {name: _last_name(settings[name]) for name in NAMING_FILES if name != "model.path" or hub_id is None}
    base = hub_id or model.files.name
    name = base.rpartition("/")[2].removeprefix("builtin:")
    parts = [
        front_matter(form, hub_id, str(settings["data.source"])),
        f"# {name} after {saved.step} steps of {settings['algorithm.name']}",
        _origin(saved, settings, form, base=base, dtype=dtype),
    ]
    if files is not None:
        parts += ["## Before and after", *_figures(files, settings, step=saved.step)]
    parts += ["## Training", _settings_table(settings, files), "## Use", _use(form, settings)]
    return redacted("\n\n".join(parts) + "\n")


def _files_of(run: RunDirectory) -> RunFiles | None:
    """What the run left behind; None where the checkpoint was carried away from it, or it cannot be read."""
    if not (run.settings.is_file() and run.metrics.is_file()):
        return None
    try:
        return RunFiles.read(run.path)
    except InputError as error:
        print(f"note: the model card tells no figures of the run: {error}", file=sys.stderr)
        return None


def front_matter(form: Form, hub_id: str | None, source: str) -> str:
    """What a hub reads of a card: YAML between two lines.

    Args:
        form: in which it is written.
        hub_id: of the base; None where it is not from the hub, which takes nothing else for a base.
        source: `data.source`.
    """
    fields: dict[str, Any] = {"library_name": form.library, "pipeline_tag": "text-generation"}
    if hub_id is not None:
        fields |= {"base_model": hub_id, "base_model_relation": form.relation}
    if source.startswith(HUB_DATA_PREFIX):
        fields["datasets"] = [source.removeprefix(HUB_DATA_PREFIX).partition(":")[0]]
    fields["tags"] = ["grpo", "reinforcement-learning"]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _origin(saved: SavedPolicy, settings: Mapping[str, Any], form: Form, *, base: str, dtype: str) -> str:
    weights = f"{form.says}, {'in float32' if dtype == 'float32' else f'rounded once to {dtype}'}."
    quantization = settings.get(QUANTIZE_BASE) if settings.get(RANK) else None
    weights += "".join(f" Note: {note}." for note in notes(form, dtype=dtype, quantization=quantization))
    return (
        f"`{base}`, trained with the algorithm `{settings['algorithm.name']}` on `{settings['data.source']}`: "
        f"step {saved.step} of the run `{settings['run.name']}`, written by `grpo export`. {weights}"
    )


def _figures(files: RunFiles, settings: Mapping[str, Any], *, step: int) -> list[str]:
    """What the run measured up to the step."""
    found = before_and_after([record for record in files.history if record["step"] <= step])
    header = found.header or ("", "first", "last")
    lines = [_table(header, found.rows)] if found.rows else ["Nothing was measured up to this step."]
    if found.header:
        most, num_samples = settings["eval.num_prompts"], settings.get("eval.num_samples", 1)
        prompts = "All held-out prompts" if most is None else f"{most} held-out prompts at most"
        lines.append(
            f"{prompts} of `{settings['data.eval_source'] or settings['data.source']}`, "
            f"{'one answer' if num_samples == 1 else f'{num_samples} answers'} each at temperature "
            f"{settings['eval.temperature']}."
        )
    return lines


def _settings_table(settings: Mapping[str, Any], files: RunFiles | None) -> str:
    """The key settings, and all that somebody has set to something else than the default."""
    chosen = {one.name for one in files.chosen_settings() if one.origin != "derived"} if files else set()
    told = {*KEY_SETTINGS, *(name for name in chosen if name not in OF_ADAPTERS)}
    if settings.get(RANK):
        told |= {*OF_ADAPTERS}
    public = (name for name in settings if name.partition(".")[0] in WANDB_SECTIONS and name not in PRIVATE_SETTINGS)
    values = {name: _shown(settings[name]) for name in public if name in told}
    rows = [(f"`{name}`", f"`{json.dumps(value, ensure_ascii=False)}`") for name, value in values.items()]
    return _table(("setting", "value"), rows)


def _use(form: Form, settings: Mapping[str, Any]) -> str:
    system = settings["data.system_prompt"]
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "..."})
    longest = settings["rollout.max_new_tokens"]
    return USE.format(imports=form.imports, loads=form.loads, messages=messages, max_new_tokens=longest)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _shown(value: Any) -> Any:
    """The same, of a local path its last name alone."""
    if isinstance(value, Mapping):
        return {name: _shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    is_local = isinstance(value, str) and value.startswith(("/", "~", "./", "../"))
    return _last_name(value) if is_local else value


def _last_name(source: Any) -> Any:
    """Of a path; what is built in or of the hub, or nothing at all, stays as it is."""
    if not isinstance(source, str) or source.startswith((HUB_DATA_PREFIX, BUILTIN_PREFIX)):
        return source
    return source.rstrip("/").rpartition("/")[2]
